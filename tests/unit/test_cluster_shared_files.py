"""A node that does not see the run's directory or model is named before anything starts there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import WorkerCrashedError

from megagrpo.cluster import nodes, shared_files
from megagrpo.cluster.nodes import NodeWatch
from megagrpo.cluster.shared_files import check_files
from megagrpo.cluster.waiting import wait_for
from megagrpo.errors import NodeLostError, PreflightError, RankError
from megagrpo.weights.topology import Place


@pytest.fixture
def other_node(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A run on this node and on `b`; `b.hidden` are the directories that b has not."""
    node = SimpleNamespace(hidden=set(), asked=0)

    def look(paths: list[str]) -> list[str]:
        node.asked += 1
        assert all(Path(path).exists() for path in paths if ".seen_by" in path)
        return [path for path in paths if any(Path(path).is_relative_to(hidden) for hidden in node.hidden)]

    monkeypatch.setattr(shared_files.missing, "options", lambda **given: SimpleNamespace(remote=look))
    monkeypatch.setattr(shared_files, "node_names", lambda: {"a": "host-a (10.0.0.1)", "b": "host-b (10.0.0.2)"})
    monkeypatch.setattr(shared_files, "wait_for", lambda answers, **given: answers)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "a"))
    monkeypatch.setattr(shared_files, "NodeAffinitySchedulingStrategy", lambda node, soft: node)
    return node


def check(tmp_path: Path, *nodes: str, watch: NodeWatch | None = None) -> None:
    (tmp_path / "model").mkdir(exist_ok=True)
    runtime: Any = SimpleNamespace(places=tuple(Place(node) for node in nodes), watch=watch)
    check_files(runtime, (tmp_path / "run",), (tmp_path / "model",), 0.1)


def test_directories_that_are_seen_everywhere_are_left_as_they_were(tmp_path: Path, other_node: Any) -> None:
    check(tmp_path, "a", "b", "b")
    assert other_node.asked == 1
    assert not list((tmp_path / "run").iterdir())


def test_a_run_on_this_node_alone_asks_nobody(tmp_path: Path, other_node: Any) -> None:
    check(tmp_path, "a", "a")
    assert not other_node.asked


@pytest.mark.parametrize("hidden", ["run", "model"])
def test_what_a_node_does_not_see_is_named_with_the_node(tmp_path: Path, other_node: Any, hidden: str) -> None:
    other_node.hidden = {tmp_path / hidden}
    with pytest.raises(PreflightError, match=rf"host-b \(10\.0\.0\.2\)(.|\n)*{tmp_path / hidden}"):
        check(tmp_path, "a", "b")
    assert not list((tmp_path / "run").iterdir())


@pytest.fixture
def real_wait(other_node: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """check_files waits as it does in a run; b is dead once its answer was taken."""
    living = [{"NodeID": "b", "Alive": True}]
    monkeypatch.setattr(nodes, "DEATH_SECONDS", 0.05)
    monkeypatch.setattr(ray, "nodes", lambda: living)
    monkeypatch.setattr(shared_files.missing, "options", lambda **given: SimpleNamespace(remote=lambda paths: "answer"))
    monkeypatch.setattr(shared_files, "wait_for", wait_for)

    def crash(answer: str, timeout: float) -> None:
        living.clear()
        raise WorkerCrashedError

    monkeypatch.setattr(ray, "get", crash)


def test_a_node_that_does_not_answer_is_no_fault_of_the_users(
    tmp_path: Path, real_wait: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "wait", lambda answers, num_returns, timeout: ([], answers))
    with pytest.raises(RankError, match=r"host-b \(10\.0\.0\.2\)"):
        check(tmp_path, "a", "b", watch=NodeWatch({}))
    assert not list((tmp_path / "run").iterdir())


@pytest.mark.parametrize(("needed", "error"), [({"b": "host-b"}, NodeLostError), ({}, RankError)])
def test_a_probe_that_went_with_its_node_is_a_lost_node(
    tmp_path: Path, real_wait: None, monkeypatch: pytest.MonkeyPatch, needed: dict[str, str], error: type[Exception]
) -> None:
    monkeypatch.setattr(ray, "wait", lambda answers, num_returns, timeout: (answers, []))
    with pytest.raises(error, match="host-b"):
        check(tmp_path, "a", "b", watch=NodeWatch(needed))

"""Ray is joined or started with the devices of a run, each on a node, and every node must see the run's files."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st
from ray._private import ray_constants
from ray.exceptions import AuthenticationError, WorkerCrashedError

from megagrpo.cluster import runtime, waiting
from megagrpo.cluster.runtime import check_files, nodes_of_devices
from megagrpo.cluster.stopping import StopRequested
from megagrpo.cluster.waiting import NodeWatch, Wait
from megagrpo.errors import NodeLostError, PreflightError, RankError
from megagrpo.recipe.defaults import DevicePlan
from megagrpo.recipe.schema import Recipe
from megagrpo.weights.boxes import Place
from tests import tiny_run

RECIPE = Recipe.model_validate({**tiny_run.recipe(Path("tiny")), "cluster": {"device": "cpu"}})
FOR_ALL = Wait.for_all


def stop() -> None:
    raise StopRequested


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Records the calls to Ray, which is not running: its settings at the start, and its end."""
    done: list[Any] = []
    pulse = SimpleNamespace(shut_down=lambda: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(runtime, "_connect", lambda address, patience, settings: done.append(settings) or pulse)
    monkeypatch.setattr(runtime, "node_names", lambda: {"a": "host-a"})
    monkeypatch.setattr(runtime, "_reserve", lambda devices, recipe, names, watch: (None, ("a",) * devices.bundles))
    monkeypatch.setattr(ray, "shutdown", lambda: done.append("end"))
    return done


def test_ray_starts_here_with_as_many_cpus_as_the_run_reserves(connected: list[Any]) -> None:
    started = runtime.start(RECIPE)
    (settings,) = connected
    assert settings["num_cpus"] == started.devices.bundles
    assert settings["include_dashboard"] is False


@pytest.mark.parametrize("raised", [AuthenticationError("no such token"), Exception("late"), ConnectionError()])
@pytest.mark.parametrize(("address", "remedy"), [("head:6379", "RAY_AUTH_MODE"), ("local", "session_latest")])
def test_whatever_ray_raises_at_its_start_is_told_with_a_remedy(
    raised: Exception, address: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**settings: object) -> None:
        raise raised

    monkeypatch.setenv("RAY_AUTH_TOKEN", "a token")
    monkeypatch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", True)  # which _connect changes
    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(RankError, match=rf"{address}(.|\n)*{remedy}"):
        runtime._connect(address, 60.0, {})


def test_a_cluster_that_does_not_answer_ends_the_command_in_time_and_with_one_sentence() -> None:
    code = "import sys; from megagrpo.cluster import runtime; runtime._connect(sys.argv[1], 3.0, {})"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        done = subprocess.run([sys.executable, "-c", code, address], capture_output=True, text=True, timeout=100)
    assert done.returncode == RankError.exit_code
    assert f"given: {address}: no answer after 3 s" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_run_told_to_stop_while_it_reserves_devices_leaves_ray(
    connected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "_reserve", lambda devices, recipe, names, watch: watch.check())
    with pytest.raises(StopRequested):
        runtime.start(RECIPE, stop)
    assert connected[1:] == ["end"]


def test_a_stop_ends_the_wait_for_the_numbers_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    never = SimpleNamespace(options=lambda **where: SimpleNamespace(remote=object))
    monkeypatch.setattr(ray, "remote", lambda **resources: lambda function: never)
    monkeypatch.setattr(runtime, "PlacementGroupSchedulingStrategy", lambda group, index: None)
    with pytest.raises(StopRequested):
        runtime._gpus(None, ["host-a", "host-a"], 60.0, NodeWatch({}, stop))  # type: ignore[arg-type]


NAMES = """
import sys
import ray
from ray.util.placement_group import placement_group
from megagrpo.cluster import runtime, waiting
ray.init(address="local", num_cpus=2, num_gpus=2, include_dashboard=False, log_to_driver=False)
group = placement_group([{"GPU": 1.0, "CPU": 1.0}] * 2)
print(runtime._gpus(group, ["host"] * 2, 100.0, waiting.NodeWatch({}, lambda: None)))
"""


@pytest.mark.long
@pytest.mark.parametrize("visible", ["2,5", "GPU-8f5c,GPU-1b2d"])
def test_gpus_have_the_names_that_their_node_gives_them(visible: str) -> None:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": visible}
    done = subprocess.run([sys.executable, "-c", NAMES], env=environment, capture_output=True, text=True, timeout=300)
    names = [int(name) if name.isdecimal() else name for name in visible.split(",")]
    assert done.stdout.strip() in [str(dict(enumerate(order))) for order in (names, names[::-1])], done.stderr


def test_only_gpus_are_shared() -> None:
    def shares(resource: str, *engine: int) -> bool:
        devices = DevicePlan(resource, 2, (0,), (engine,), 0.5, 0.5)
        return runtime.Runtime("", devices, None, (), NodeWatch({}), None).shares_gpus  # type: ignore[arg-type]

    found = [shares("GPU", 0), shares("GPU", 1), shares("GPU"), shares("CPU", 0)]
    assert found == [True, False, False, False], "not with an engine beside, or one that a user runs, and no CPU"


# --- which node each device lies on -----------------------------------------------------------------------------------


def plan(ranks: int, engines: tuple[tuple[int, ...], ...] = ()) -> DevicePlan:
    last = max((device for engine in engines for device in engine), default=-1)
    return DevicePlan("GPU", max(ranks, last + 1), tuple(range(ranks)), engines, 1.0, 1.0)


def test_the_largest_nodes_are_filled_first_and_the_others_are_left_alone() -> None:
    assert nodes_of_devices(plan(4), 1, {"a": 2, "b": 8, "c": 2}) == ("b",) * 4
    assert nodes_of_devices(plan(16), 8, {"a": 8, "b": 8, "c": 8}) == ("a",) * 8 + ("b",) * 8


def test_tensor_ranks_are_split_only_if_there_is_no_other_way() -> None:
    assert nodes_of_devices(plan(4), 2, {"a": 3, "b": 2}) == ("a", "a", "b", "b")
    assert nodes_of_devices(plan(2), 2, {"a": 1, "b": 1}) == ("a", "b")


@given(
    groups=st.integers(1, 8),
    tensor=st.sampled_from([1, 2, 4]),
    each=st.sampled_from([1, 2, 4, 8]),
    engines=st.integers(0, 4),
    free=st.lists(st.integers(0, 8), max_size=6),
)
def test_engines_are_whole_and_no_node_has_more_than_its_room(
    groups: int, tensor: int, each: int, engines: int, free: list[int]
) -> None:
    ranks = groups * tensor
    room = {f"n{index}": size for index, size in enumerate(free)}
    starts = range(ranks, ranks + engines * each, each)
    devices = plan(ranks, tuple(tuple(range(start, start + each)) for start in starts))
    found = nodes_of_devices(devices, tensor, room)
    if each == 1:
        assert (found is not None) == (sum(free) >= devices.bundles)
    if found is None:
        return
    assert len(found) == devices.bundles
    assert all(len({found[device] for device in engine}) == 1 for engine in devices.bundles_of_engine)
    assert all(count <= room[node] for node, count in Counter(found).items())


# --- which files a node sees ------------------------------------------------------------------------------------------


@pytest.fixture
def other_node(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A run on this node and on `b`; `b.hidden` are the directories that b has not."""
    node = SimpleNamespace(hidden=set(), asked=0)

    def look(paths: list[str]) -> list[str]:
        node.asked += 1
        assert all(Path(path).exists() for path in paths if ".seen_by" in path)
        return [path for path in paths if any(Path(path).is_relative_to(hidden) for hidden in node.hidden)]

    monkeypatch.setattr(runtime.missing_files, "options", lambda **given: SimpleNamespace(remote=look))
    monkeypatch.setattr(runtime, "node_names", lambda: {"a": "host-a (10.0.0.1)", "b": "host-b (10.0.0.2)"})
    monkeypatch.setattr(Wait, "for_all", lambda self, answers: answers)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "a"))
    monkeypatch.setattr(waiting, "NodeAffinitySchedulingStrategy", lambda node, soft: node)
    return node


def check(tmp_path: Path, *nodes: str, watch: NodeWatch | None = None) -> None:
    (tmp_path / "model").mkdir(exist_ok=True)
    started: Any = SimpleNamespace(places=tuple(Place(node) for node in nodes), watch=watch)
    settings = {"track": {"directory": str(tmp_path)}, "name": "run", "cluster": {"start_timeout_seconds": 0.1}}
    recipe = Recipe.model_validate({**tiny_run.recipe(Path("tiny")), **settings})
    check_files(started, recipe, (tmp_path / "model",))


def test_directories_that_are_seen_everywhere_are_left_as_they_were(tmp_path: Path, other_node: Any) -> None:
    check(tmp_path, "a", "a")
    assert not other_node.asked
    check(tmp_path, "a", "b", "b")
    assert other_node.asked == 1
    assert not list((tmp_path / "run").rglob(".seen*"))


@pytest.mark.parametrize("hidden", ["run", "model"])
def test_what_a_node_does_not_see_is_named_with_the_node(tmp_path: Path, other_node: Any, hidden: str) -> None:
    other_node.hidden = {tmp_path / hidden}
    with pytest.raises(PreflightError, match=rf"host-b \(10\.0\.0\.2\)(.|\n)*{tmp_path / hidden}"):
        check(tmp_path, "a", "b")
    assert not list((tmp_path / "run").rglob(".seen*"))


@pytest.fixture
def real_wait(other_node: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """check_files waits as it does in a run; b is dead once its answer was taken."""
    living = [{"NodeID": "b", "Alive": True}]
    monkeypatch.setattr(waiting, "DEATH_SECONDS", 0.05)
    monkeypatch.setattr(ray, "nodes", lambda: living)
    monkeypatch.setattr(
        runtime.missing_files, "options", lambda **given: SimpleNamespace(remote=lambda paths: "answer")
    )
    monkeypatch.setattr(Wait, "for_all", FOR_ALL)

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
    assert not list((tmp_path / "run").rglob(".seen*"))


@pytest.mark.parametrize(("needed", "error"), [({"b": "host-b"}, NodeLostError), ({}, RankError)])
def test_a_probe_that_went_with_its_node_is_a_lost_node(
    tmp_path: Path, real_wait: None, monkeypatch: pytest.MonkeyPatch, needed: dict[str, str], error: type[Exception]
) -> None:
    monkeypatch.setattr(ray, "wait", lambda answers, num_returns, timeout: (answers, []))
    with pytest.raises(error, match="host-b"):
        check(tmp_path, "a", "b", watch=NodeWatch(needed))

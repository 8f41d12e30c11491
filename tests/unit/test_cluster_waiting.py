"""Nodes that a run has lost, failures because of it, and addresses that a run can use."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RaySystemError

from megagrpo.cluster import waiting
from megagrpo.cluster.actors import interface_of
from megagrpo.cluster.waiting import NodeWatch, Wait, node_names, raylet_with
from megagrpo.errors import NodeLostError, RankError
from megagrpo.preflight.machine import address_problem


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Lists two nodes in Ray's place."""
    told = [
        {"NodeID": name, "Alive": True, "NodeManagerHostname": f"host-{name}", "NodeManagerAddress": f"10.0.0.{number}"}
        for number, name in enumerate("ab", start=1)
    ]
    monkeypatch.setattr(ray, "nodes", lambda: told)
    monkeypatch.setattr(waiting, "CHECK_SECONDS", 0.0)
    monkeypatch.setattr(waiting, "DEATH_SECONDS", 0.05)
    return told


def test_a_lost_node_is_named_and_others_do_not_matter(listed: list[dict[str, Any]]) -> None:
    names = node_names()
    watch = NodeWatch({"a": names["a"]})
    listed[1]["Alive"] = False
    watch.check()
    assert node_names() == {"a": "host-a (10.0.0.1)"}
    listed[0]["Alive"] = False
    with pytest.raises(NodeLostError, match=r"host-a \(10\.0\.0\.1\)"):
        watch.check()


def test_an_actor_that_dies_on_a_living_node_is_no_lost_node(listed: list[dict[str, Any]]) -> None:
    NodeWatch(node_names()).after_failure(ActorDiedError())


def test_an_actor_out_of_reach_is_waited_for_until_ray_has_given_up_its_node(
    listed: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = NodeWatch(node_names())
    monkeypatch.setattr(waiting.time, "sleep", lambda seconds: listed.pop(0))
    with pytest.raises(NodeLostError, match="host-a"):
        watch.after_failure(ActorUnavailableError("gone", None))


def test_a_raylet_that_has_just_ended_does_not_hide_another(tmp_path: Path) -> None:
    raylet, socket = tmp_path / "raylet", str(tmp_path / "socket")
    shutil.copy(shutil.which("bash") or "", raylet)
    ended = subprocess.Popen([raylet, "-c", "true"])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # its number is taken until its code is asked for
    other = subprocess.Popen([raylet, "-c", "read -r line", f"--name={socket}"], stdin=subprocess.PIPE)
    try:
        assert raylet_with(socket) == other.pid
    finally:
        other.communicate()
        ended.wait()


def test_a_stop_ends_a_wait_too() -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        NodeWatch({}, stop).check()


def test_results_are_in_the_order_of_the_actors_whichever_answers_first(
    listed: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "wait", lambda answers, num_returns, timeout: (answers[-1:], answers[:-1]))
    monkeypatch.setattr(ray, "get", lambda answer, timeout: answer.upper())
    asked: Any = {"rank 0": "a", "rank 1": "b", "rank 2": "c"}
    found = Wait("asking", 1.0, RankError, NodeWatch({})).for_all(asked)
    assert list(found.items()) == [("rank 0", "A"), ("rank 1", "B"), ("rank 2", "C")]


def test_a_lack_of_file_descriptors_while_an_answer_is_read_is_this_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(answer: str, timeout: float) -> None:
        raise RaySystemError(OSError(errno.EMFILE, os.strerror(errno.EMFILE)))

    monkeypatch.setattr(ray, "wait", lambda answers, num_returns, timeout: (answers, []))
    monkeypatch.setattr(ray, "get", read)
    asked: Any = {"rank 0": "a"}
    with pytest.raises(OSError, match="Too many open files"):
        Wait("asking", 1.0, RankError, watch=None).settle(asked)


@pytest.mark.parametrize("address", ["ray://head:10001", "http://head:8265"])
def test_addresses_of_servers_for_clients_or_jobs_are_refused_with_the_command_that_works(address: str) -> None:
    problem = address_problem(address, "cluster.address")
    assert problem is not None
    assert "ray job submit --address http://head:8265" in problem.fix
    for usable in ("auto", "head:6379", "local", "10.0.0.1:6379", "[::1]:6379"):
        assert address_problem(usable, "cluster.address") is None
    for malformed in ("head", "head:", "head:0", "head:99999", ":6379", "head:6379:1", "head :6379", "a/b:1", "\x00:1"):
        assert address_problem(malformed, "cluster.address") is not None, malformed


def test_the_interface_is_the_one_that_has_the_address() -> None:
    name, addresses = next(iter(psutil.net_if_addrs().items()))
    assert interface_of(addresses[0].address) == name
    assert interface_of("203.0.113.7") is None

"""Reward workers on two Ray nodes: every response is scored once, also when a node is lost on the way."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megagrpo.cluster.reward_nodes import workers_of_nodes
from tests.loop.ray_nodes import RayNodes

DRIVER = """
import json, os, signal, sys
import numpy as np
import ray
from megagrpo.cluster.reward_nodes import RewardNodes
from megagrpo.cluster.waiting import raylet_with
from megagrpo.reward.functions import FunctionSpec, Task
from megagrpo.reward.workers import Limits
from megagrpo.types import Prompt, Sample

ray.init(logging_level="error", log_to_driver=False)
here = ray.get_runtime_context().get_node_id()
(other,) = (node for node in ray.nodes() if node["Alive"] and node["NodeID"] != here)
there, raylet = other["NodeID"], raylet_with(other["RayletSocketName"])
spec = FunctionSpec("mine", sys.argv[1], 1.0, {}, "test")
nothing = np.zeros(0, np.int32)

def run(calls, lose=lambda: None):
    futures = pool.submit(calls)
    futures[0].add_done_callback(lambda _: lose())
    return [future.result() for future in futures]

def tasks(start, count):
    sample = lambda i: Sample("a", i, nothing, nothing.astype(np.float32), nothing, "stop", str(start + i))
    return [(0, Task(Prompt("a", (), "s", "7"), (sample(i),))) for i in range(count)]

def drivers(outcomes):
    return sorted({outcome.notes["driver"] for (outcome,) in outcomes})

def tell(outcomes):
    numbers = [outcome.score for (outcome,) in outcomes]
    secrets = sorted({outcome.notes["secret"] for (outcome,) in outcomes})
    print(json.dumps([numbers, drivers(outcomes), secrets]), flush=True)

pool = RewardNodes({0: spec}, 1, {there: 1}, Limits(100.0, 1 << 32, {"TOKEN": "x"}))
try:
    tell(run(tasks(0, 40)))
    tell(run(tasks(100, 40), lambda: os.kill(raylet, signal.SIGKILL)))
    while len(drivers(after_loss := run(tasks(200, 8)))) > 1:
        pass  # until Ray says that the node is lost
    tell(after_loss)
    for future in pool.submit(tasks(0, 4000)):
        future.cancel()
    tell(run(tasks(300, 3)))
finally:
    pool.close()
"""

MINE = """
import os, pathlib, time

SEEN = pathlib.Path(__file__).with_name("seen")

def mine(response):
    above = pathlib.Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1]
    driver = above + os.readlink("/proc/self/ns/pid")
    (SEEN / driver).touch()
    while len(list(SEEN.iterdir())) < 2:  # until the limit of a call: the first wait for the workers of both nodes
        time.sleep(0.02)
    time.sleep(0.05)
    return {"score": int(response), "driver": driver, "secret": os.environ.get("TOKEN", "none")}
"""


def test_workers_are_spread_evenly_and_the_first_node_has_the_most() -> None:
    assert workers_of_nodes(1, 4) == [1]
    assert workers_of_nodes(6, 4) == [2, 2, 1, 1]
    assert workers_of_nodes(8, 1) == [8]


@pytest.mark.long
def test_calls_are_scored_on_both_nodes_and_here_alone_once_the_other_is_lost(tmp_path: Path) -> None:
    (tmp_path / "seen").mkdir()
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "driver.py").write_text(DRIVER)
    with RayNodes(cpus_per_node=1) as nodes:
        nodes.start_worker()
        command = [sys.executable, str(tmp_path / "driver.py"), f"{tmp_path / 'mine.py'}:mine"]
        environment = {**nodes.environment, "PYTHONPATH": str(Path(__file__).parents[2])}
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    told = [line for line in ended.stdout.splitlines() if line.startswith("[[")]  # not what Ray says of the lost node
    both, losing, here, after = map(json.loads, told)
    assert [part[0] for part in (both, losing, here, after)] == [
        list(range(start, start + count)) for start, count in ((0, 40), (100, 40), (200, 8), (300, 3))
    ]
    assert (len(both[1]), len(here[1])) == (2, 1)
    assert both[2] == ["x"]  # what the recipe hands over goes to both

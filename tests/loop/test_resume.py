"""A run that is stopped, killed, or loses a node continues with the same command, and with the same numbers."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from megagrpo.checkpoint.store import CheckpointStore, describe
from megagrpo.checkpoint.trainer_state import TrainerState
from megagrpo.errors import EXIT_NODE_LOST, EXIT_STOPPED
from megagrpo.track.rollout_files import read_rollouts
from tests.loop import small_run
from tests.loop.conftest import Finished
from tests.loop.listeners import Listeners, check_table, listeners
from tests.loop.ray_nodes import RayNodes

GONE_SECONDS = 300.0
"""Ray's own agents look for their parent, and for other nodes, only now and then; everything else goes at once."""
MARK = "MEGAGRPO_TEST_RUN"
Environment = Mapping[str, str]


@dataclass(frozen=True)
class Interrupted:
    """A run whose reward waits where `hold` says."""

    recipe: Path
    directory: Path
    hold: Path

    def start(self, environment: Environment, *overrides: str, **how: Any) -> subprocess.Popen[str]:
        return small_run.start(self.recipe, *overrides, environment=environment, **how)

    def held_in_step(self, step: int, environment: Environment, *overrides: str) -> subprocess.Popen[str]:
        """Started, and come to the scores of that step."""
        reached = Path(f"{self.hold}.reached")
        reached.unlink(missing_ok=True)
        self.hold.write_text(json.dumps({"metrics": str(self.directory / "metrics.jsonl"), "lines": step}))
        process = self.start(environment, *overrides)
        small_run.wait_until(reached.exists, f"scores of step {step}", process=process)
        return process

    def signalled(self, name: str, call: str, nth: int, environment: Environment, *overrides: str, code: int) -> str:
        through = ("tests.loop.altered_runs", "signal", name, call, str(nth))
        return small_run.end(self.start(environment, *overrides, through=through), code)

    def lines(self) -> int:
        return (self.directory / "metrics.jsonl").read_text().count("\n")


@pytest.fixture
def interrupted(inputs: Path, tmp_path: Path) -> Interrupted:
    values, hold = small_run.recipe(inputs, tmp_path), tmp_path / "hold.json"
    values["reward"]["functions"][0]["arguments"] = {"hold": str(hold)}
    values["reward"]["timeout_seconds"] = small_run.RUN_SECONDS
    return Interrupted(small_run.write(values, tmp_path), tmp_path / values["name"], hold)


def processes_of(mark: str) -> list[psutil.Process]:
    """All that descend from a run with a Ray of its own, also those whose parent is gone."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                found.append(process)
        except psutil.Error:  # it has ended
            continue
    return found


def check_listeners(found: Listeners, cluster: RayNodes) -> None:
    on_both = {cluster.head, cluster.worker}
    found.pop(("driver", "127.0.0.1"), None)  # the stores, where the kernel takes filters from root alone
    assert {address for kind, address in found if kind == "agent"} == on_both
    assert {address: count for (kind, address), count in found.items() if kind == "driver"} == {
        "::": 1,
        cluster.head: 4,
    }
    words = {
        "every interface": ["::"],
        "the node's address": on_both,
        "the driver's address": [cluster.head],
        "the interface with the node's address": ["127.0.0.1"],  # of all addresses of an interface, gloo's first
        "127.0.0.1": ["127.0.0.1"],
    }
    check_table(found, 2, words)


@pytest.mark.long
@pytest.mark.timeout(2 * small_run.RUN_SECONDS)
def test_stopped_killed_and_without_a_node_a_run_continues_with_the_same_numbers(
    interrupted: Interrupted, finished: Finished, ray: Environment
) -> None:
    run, mark = interrupted, uuid.uuid4().hex
    rarely = "checkpoint.every_steps=100"

    process = run.held_in_step(2, ray, rarely)
    process.send_signal(signal.SIGTERM)
    printed = small_run.end(process, EXIT_STOPPED)
    assert "stopped by SIGTERM" in printed
    assert "step_000001" in printed, "the step before is saved, though no checkpoint was due"
    run.hold.unlink()

    printed = run.signalled("SIGUSR1", "update", 1, ray, rarely, code=EXIT_STOPPED)
    assert "continuing after step 1" in printed
    assert "stopped by SIGUSR1" in printed
    assert "step_000002" in printed, "an update that has begun is finished and saved"
    assert run.lines() == 2, "its metrics wait for the evaluation that is due"

    own_ray = small_run.own_environment() | {MARK: mark}
    printed = run.signalled("SIGKILL", "save", 2, own_ray, code=-signal.SIGKILL)
    assert "continuing after step 2" in printed
    assert run.lines() == 5, "a step is logged before it is saved"
    assert (run.directory / "checkpoints" / ".saving_step_000004" / "rank").exists()

    with RayNodes(cpus_per_node=1) as cluster:
        cluster.start_worker()
        process = run.held_in_step(3, cluster.environment)
        check_listeners(listeners(process.pid, *cluster.pids()), cluster)
        cluster.kill(cluster.worker)
        killed = time.monotonic()
        run.hold.unlink()
        printed = small_run.end(process, EXIT_NODE_LOST)
        assert time.monotonic() - killed < GONE_SECONDS
        assert f"({cluster.worker})" in printed

        cluster.start_worker()
        assert "continuing after step 2" in small_run.end(run.start(cluster.environment))
    ours, theirs = (small_run.metrics(directory) for directory in (run.directory, finished.directory))
    assert small_run.stable(ours) == small_run.stable(theirs)
    assert read_rollouts(run.directory) == read_rollouts(finished.directory), "each step once"
    small_run.wait_until(lambda: not processes_of(mark), "an end of all processes", GONE_SECONDS)


VERIFY = """
import sys
from functools import partial
from pathlib import Path
from megagrpo.checkpoint.store import CheckpointStore
from megagrpo.cluster import runtime
from megagrpo.recipe.defaults import plan_devices
from megagrpo.recipe.load import load

started = runtime.start(load(sys.argv[1]).recipe, devices_of=partial(plan_devices, engines_too=False))
store = CheckpointStore(Path(sys.argv[2]), keep_last=2)
store.verify = partial(runtime.damage_on_nodes, started, 300)
found = store.latest_complete()
print(len({place.node for place in started.places}), "nodes, step", found.state.step, *found.warnings)
"""
"""In a process of its own: Ray reads once what authorises a process."""


@pytest.mark.soak
def test_the_nodes_of_a_run_share_the_verification_of_a_checkpoint_and_damage_on_any_share_is_named(
    inputs: Path, tmp_path: Path
) -> None:
    recipe = small_run.write(small_run.recipe(inputs, tmp_path), tmp_path)
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=2)
    for step in (1, 2):
        path = store.begin(step) / "0.distcp"
        path.write_bytes(b"weights")
        store.commit(TrainerState(step, step, {}, {}), [describe(path.parent, path)])
    verify = [sys.executable, "-c", VERIFY, str(recipe), str(store.directory)]
    with RayNodes(cpus_per_node=1) as cluster:
        cluster.start_worker()
        how = {"env": cluster.environment, "cwd": small_run.REPOSITORY, "capture_output": True, "text": True}
        whole = subprocess.run(verify, check=True, **how).stdout
        # One file is of either share.
        for path in [store.directory / "step_000002" / name for name in ("trainer.json", "rank/0.distcp")]:
            path.write_bytes(b"\0" * path.stat().st_size)
        damaged = subprocess.run(verify, check=True, **how).stdout
    assert whole == "2 nodes, step 2\n"
    assert damaged.startswith("2 nodes, step 1 ")
    assert "trainer.json has another checksum" in damaged
    assert "rank/0.distcp has another checksum" in damaged


@pytest.mark.long
def test_in_another_layout_and_with_two_engines_elsewhere_a_run_continues_with_almost_the_same_numbers(
    inputs: Path, finished: Finished, tmp_path: Path, ray: Environment
) -> None:
    recipe = small_run.write(small_run.recipe(inputs, tmp_path), tmp_path)
    run = shutil.copytree(finished.directory, tmp_path / "small")
    shutil.rmtree(run / "checkpoints" / "step_000004")
    layout = ("train.layout.tensor=1", "train.layout.pipeline=2")
    elsewhere = ("cluster.placement=disaggregated", "rollout.engines=2")
    printed = small_run.train(recipe, *layout, *elsewhere, environment=ray)
    assert "continuing after step 2" in printed
    assert "changed: train.layout.tensor: 2 -> 1" in printed
    layouts = [yaml.safe_load((run / f"recipe.{n}.yaml").read_text())["train"]["layout"]["tensor"] for n in (1, 2)]
    assert layouts == [2, 1], "each start leaves its recipe"
    assert (run / "environment.2.json").exists()
    ours, theirs = small_run.metrics(run), small_run.metrics(finished.directory)
    assert ours[3]["grad_norm"] != theirs[3]["grad_norm"], "the step was made anew"
    assert ours[3]["grad_norm"] == pytest.approx(theirs[3]["grad_norm"], rel=1e-3)
    for step, name in ((3, "reward/mean"), (4, "reward/mean"), (4, "eval/sums/mean@1")):
        assert ours[step][name] == pytest.approx(theirs[step][name], abs=1e-6), (step, name)

"""A process that is killed or stopped beside a run ends it with one sentence and a code, and leaves nothing."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from megagrpo.errors import EXIT_NODE_LOST, EXIT_RUN_FAILED, EXIT_STOPPED
from tests.loop import small_run
from tests.loop.conftest import actors_of
from tests.loop.ray_nodes import RayNodes

SHARED_MEMORY = Path("/dev/shm")


class Faulty:
    """A run of many steps, with what happens to it after its first."""

    def __init__(self, inputs: Path, output: Path, *through: str) -> None:
        values = small_run.recipe(inputs, output)
        values["train"]["total_steps"] = 10_000
        values["cluster"]["restarts_max"] = 0
        self.recipe, self.directory = small_run.write(values, output), output / "small"
        self.process = small_run.start(self.recipe, through=through or ("megagrpo.cli",))
        lines = self.directory / "metrics.jsonl"
        small_run.wait_until(
            lambda: lines.exists() and lines.stat().st_size > 0, "the first step", process=self.process
        )
        ranks = [pid for pid, actor in actors_of(self.process.pid).items() if actor == "RankActor"]
        mapped = {Path(area.path) for pid in ranks for area in psutil.Process(pid).memory_maps()}
        self.before = {path for path in mapped if path.match(f"{SHARED_MEMORY}/megagrpo-*")}
        assert self.before
        self.processes = psutil.Process(self.process.pid).children(recursive=True)

    def limit(self, resource_: int, soft: int, *, driver: bool = True) -> None:
        """For its training ranks, and the driver, from now on."""
        ranks = [pid for pid, actor in actors_of(self.process.pid).items() if actor == "RankActor"]
        for pid in (self.process.pid, *ranks) if driver else ranks:
            resource.prlimit(pid, resource_, (soft, resource.prlimit(pid, resource_)[1]))

    def signal(self, name: str, number: int) -> None:
        for child in psutil.Process(self.process.pid).children(recursive=True):
            if name in child.name():
                child.send_signal(number)

    def end(self, code: int) -> str:
        printed = small_run.end(self.process, code)
        assert "Traceback" not in printed
        assert "state-dump" not in printed
        small_run.wait_until(lambda: not any(path.exists() for path in self.before), "no shared memory", 60)
        small_run.wait_until(lambda: not any(map(runs, self.processes)), "no process: agents of Ray stay a minute", 30)
        return printed


def runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def newest(checkpoints: Path) -> int:
    return max(int(path.name.removeprefix("step_")) for path in checkpoints.glob("step_*"))


@pytest.mark.soak
@pytest.mark.parametrize("killed", ["raylet", "gcs_server"])
def test_a_part_of_ray_that_is_killed_or_stopped_ends_the_run_with_its_node(
    inputs: Path, tmp_path: Path, killed: str
) -> None:
    """One run loses the part by SIGKILL; in another, beside it, the other part is stopped."""

    def printed(name: str) -> str:
        directory = tmp_path / name
        directory.mkdir()
        run = Faulty(inputs, directory)
        run.signal(name, signal.SIGKILL if name == killed else signal.SIGSTOP)
        return run.end(EXIT_NODE_LOST)

    for text in small_run.side_by_side(*(partial(printed, name) for name in ("raylet", "gcs_server"))):
        assert "node lost:" in text


@pytest.mark.parametrize("driver", ["head", "worker"])
@pytest.mark.soak
def test_a_lost_head_node_ends_the_run_with_its_code_wherever_the_driver_is(
    inputs: Path, tmp_path: Path, driver: str
) -> None:
    values = small_run.recipe(inputs, tmp_path)
    values["train"]["total_steps"] = 10_000
    recipe, lines = small_run.write(values, tmp_path), tmp_path / "small" / "metrics.jsonl"
    with RayNodes(cpus_per_node=1) as cluster:
        cluster.start_worker()
        through = ("tests.loop.altered_runs", "on_node", getattr(cluster, driver))
        process = small_run.start(recipe, through=through, environment=cluster.environment)
        small_run.wait_until(lambda: lines.exists() and lines.stat().st_size > 0, "an evaluation", process=process)
        cluster.kill(cluster.head)
        printed = small_run.end(process, EXIT_NODE_LOST)
    assert "node lost:" in printed
    assert cluster.head in printed


@pytest.mark.soak
def test_two_signals_end_a_run_that_waits_for_a_stopped_raylet(inputs: Path, tmp_path: Path) -> None:
    run = Faulty(inputs, tmp_path)
    run.signal("raylet", signal.SIGSTOP)
    for _ in range(2):
        run.process.send_signal(signal.SIGTERM)
        time.sleep(1.0)  # two that come at once are one
    run.process.wait(timeout=30)
    run.end(128 + signal.SIGTERM)


@pytest.mark.long
def test_processes_that_are_stopped_when_the_driver_is_killed_end_too(inputs: Path, tmp_path: Path) -> None:
    run = Faulty(inputs, tmp_path)
    actors = [psutil.Process(pid) for pid in actors_of(run.process.pid)]
    for actor in actors:
        actor.suspend()
    run.process.kill()
    _, left = psutil.wait_procs(actors, timeout=60)
    for actor in left:
        actor.kill()
    assert not left
    run.end(-signal.SIGKILL)


@pytest.mark.soak
def test_a_rank_killed_inside_a_save_is_named_in_place_of_what_the_other_raised(inputs: Path, tmp_path: Path) -> None:
    run = Faulty(inputs, tmp_path, "tests.loop.altered_runs", "signal_rank", "SIGKILL", "save", "2")
    printed = run.end(EXIT_RUN_FAILED)
    assert re.search(r"save: train rank \d died", printed)
    assert "gloo" not in printed
    assert [path.name for path in (run.directory / "checkpoints").glob("step_*")] == ["step_000002"]


@pytest.mark.soak
def test_a_disk_that_is_full_for_a_while_costs_checkpoints_and_one_that_is_full_ends_the_run_which_can_be_continued(
    inputs: Path, tmp_path: Path
) -> None:
    run, saved = Faulty(inputs, tmp_path), tmp_path / "small" / "checkpoints"
    small_run.wait_until((saved / "step_000002").exists, "a checkpoint", process=run.process)
    run.limit(resource.RLIMIT_FSIZE, 4096, driver=False)
    first, lines = time.monotonic(), run.directory / "metrics.jsonl"
    small_run.wait_until(
        lambda: time.monotonic() > first + 1 and newest(saved) < len(lines.read_text().splitlines()) - 8,
        "steps",
        process=run.process,
    )
    kept = newest(saved)
    run.limit(resource.RLIMIT_FSIZE, resource.RLIM_INFINITY, driver=False)
    small_run.wait_until(lambda: newest(saved) > kept, "a later checkpoint", process=run.process)
    small_run.wait_until(lambda: not list(saved.glob(".*")), "a moment without a save", process=run.process)

    run.limit(resource.RLIMIT_FSIZE, 1)
    printed = run.end(EXIT_RUN_FAILED)
    assert "a checkpoint could not be saved, the one before stays" in printed
    assert printed.count("machine error:") == 1
    assert re.search(r"given: File too large\n(.*\n)*.*make room", printed)
    step = newest(saved)
    again = small_run.start(run.recipe, f"train.total_steps={step + 8}")
    assert f"continuing after step {step} " in small_run.end(again)
    assert not list(saved.glob(".*"))


@pytest.mark.soak
def test_a_driver_out_of_file_descriptors_ends_with_one_sentence(inputs: Path, tmp_path: Path) -> None:
    run = Faulty(inputs, tmp_path)
    run.limit(resource.RLIMIT_NOFILE, 16)
    assert "Too many open files" in run.end(EXIT_RUN_FAILED)


@pytest.mark.soak
def test_a_directory_that_is_deleted_ends_the_run(inputs: Path, tmp_path: Path) -> None:
    run = Faulty(inputs, tmp_path)
    run.directory.rename(tmp_path / "elsewhere")
    assert "renamed, deleted or replaced during the run" in run.end(EXIT_RUN_FAILED)


@pytest.mark.soak
@pytest.mark.usefixtures("hangups")
def test_a_closed_terminal_saves_what_a_closed_pipe_has_not_ended(inputs: Path, tmp_path: Path) -> None:
    values = small_run.recipe(inputs, tmp_path)
    values["train"]["total_steps"] = 10_000
    recipe, lines = small_run.write(values, tmp_path), tmp_path / "small" / "metrics.jsonl"
    command = [sys.executable, "-m", "megagrpo.cli", "train", str(recipe)]
    reading, writing = os.pipe()
    environment = small_run.own_environment()
    process = subprocess.Popen(command, stdout=writing, stderr=writing, start_new_session=True, env=environment)
    os.close(reading)
    os.close(writing)
    try:
        small_run.wait_until(lambda: lines.exists() and lines.read_text().count("\n") > 3, "steps without a reader")
        os.killpg(process.pid, signal.SIGHUP)
        assert process.wait(timeout=small_run.RUN_SECONDS) == EXIT_STOPPED
    finally:
        process.kill()
    last = max(small_run.metrics(tmp_path / "small"))
    assert newest(tmp_path / "small" / "checkpoints") in (
        last,
        last + 1,
    )  # one that waits for its evaluation has no line

"""What is killed, stopped or taken away beside a run ends it with one sentence and a code, and nothing is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megagrpo.errors import EXIT_NODE_LOST, EXIT_RUN_FAILED, EXIT_STOPPED
from tests.loop import small_run
from tests.loop.conftest import actors_of

SHARED_MEMORY = Path("/dev/shm")


class Faulty:
    """A run of many steps, with what happens to it after its first."""

    def __init__(self, inputs: Path, output: Path) -> None:
        values = small_run.recipe(inputs, output)
        values["train"]["total_steps"] = 10_000
        self.recipe, self.directory = small_run.write(values, output), output / "small"
        self.process = small_run.start(self.recipe)
        lines = self.directory / "metrics.jsonl"
        small_run.wait_until(lambda: lines.exists() and lines.stat().st_size > 0, "the first step")
        self.before = {*SHARED_MEMORY.glob("megagrpo-*")}
        assert self.before

    def signal(self, name: str, number: int) -> None:
        for child in psutil.Process(self.process.pid).children(recursive=True):
            if name in child.name():
                child.send_signal(number)

    def end(self, code: int) -> str:
        printed = small_run.end(self.process, code)
        assert "Traceback" not in printed
        assert "state-dump" not in printed
        small_run.wait_until(lambda: not self.before & {*SHARED_MEMORY.glob("megagrpo-*")}, "no shared memory", 60)
        return printed


@pytest.mark.long
@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_part_of_ray_that_is_killed_or_stopped_ends_the_run_with_its_node(
    inputs: Path, tmp_path: Path, name: str, number: signal.Signals
) -> None:
    run = Faulty(inputs, tmp_path)
    run.signal(name, number)
    assert "node lost:" in run.end(EXIT_NODE_LOST)


@pytest.mark.long
def test_two_signals_end_a_run_that_waits_for_a_stopped_raylet(inputs: Path, tmp_path: Path) -> None:
    run = Faulty(inputs, tmp_path)
    run.signal("raylet", signal.SIGSTOP)
    for _ in range(2):
        run.process.send_signal(signal.SIGTERM)
        time.sleep(1.0)  # two that come at once are one
    run.process.wait(timeout=10)
    run.end(128 + signal.SIGTERM)


@pytest.mark.long
def test_a_killed_rank_is_named_in_place_of_what_the_other_raised_because_of_it(inputs: Path, tmp_path: Path) -> None:
    run = Faulty(inputs, tmp_path)
    ranks = [pid for pid, actor in actors_of(run.process.pid).items() if actor == "RankActor"]
    os.kill(ranks[0], signal.SIGKILL)
    assert re.search(r"train rank \d died", run.end(EXIT_RUN_FAILED))


@pytest.mark.long
def test_a_directory_that_is_deleted_ends_the_run(inputs: Path, tmp_path: Path) -> None:
    run = Faulty(inputs, tmp_path)
    run.directory.rename(tmp_path / "elsewhere")
    assert "renamed, deleted or replaced during the run" in run.end(EXIT_RUN_FAILED)


@pytest.mark.long
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
    assert (tmp_path / "small" / "checkpoints" / f"step_{last:06}").exists()

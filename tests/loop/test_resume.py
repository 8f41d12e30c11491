"""A run that is killed continues with the same command, and with the same numbers."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.loop import small_run

DEADLINE_SECONDS = 120.0
ACTOR = re.compile(r"ray::(RankActor|EngineActor)")


def kill_when(process: subprocess.Popen[str], moment: Callable[[], bool]) -> list[psutil.Process]:
    """kill -9 as soon as `moment` is true. Returns all processes that the run had started by then."""
    family = psutil.Process(process.pid)
    deadline = time.monotonic() + DEADLINE_SECONDS
    try:
        while not moment():
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline, "the moment to kill never came"
            time.sleep(0.005)
        return family.children(recursive=True)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=30)


def actors_among(processes: list[psutil.Process]) -> Counter[str]:
    """How many Ray actors of each class."""
    titles = [" ".join(process.cmdline()) for process in processes if process.is_running()]
    return Counter(match[1] for title in titles if (match := ACTOR.match(title)))


def lines_of(directory: Path) -> int:
    path = directory / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def interrupted_run(inputs: Path, output: Path, moment: Callable[[Path], bool]) -> Path:
    """Kills a run at `moment`, then lets the same command finish it."""
    values = small_run.recipe(inputs, output)
    recipe_file = small_run.write(values, output)
    directory = output / values["name"]
    started = kill_when(small_run.start(recipe_file), lambda: moment(directory))
    printed = small_run.train(recipe_file)
    assert "continuing after step 2" in printed
    # Ray's own agents look for their parent only now and then; everything else goes at once.
    _, alive = psutil.wait_procs(started, timeout=DEADLINE_SECONDS)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE], "orphaned processes"
    return directory


@pytest.mark.long
def test_killed_in_a_step_it_continues_with_the_same_numbers(
    inputs: Path, finished: tuple[Path, str], tmp_path: Path
) -> None:
    # Step 3 is under way once the lines of steps 0 to 2 are there and the checkpoint of step 2 is complete.
    directory = interrupted_run(
        inputs, tmp_path, lambda run: lines_of(run) >= 3 and (run / "checkpoints" / "step_000002").exists()
    )
    assert small_run.stable(small_run.metrics(directory)) == small_run.stable(small_run.metrics(finished[0]))


@pytest.mark.long
def test_killed_between_steps_it_continues_with_the_same_numbers(
    inputs: Path, finished: tuple[Path, str], tmp_path: Path
) -> None:
    directory = interrupted_run(inputs, tmp_path, lambda run: lines_of(run) >= 4)
    assert small_run.stable(small_run.metrics(directory)) == small_run.stable(small_run.metrics(finished[0]))


@pytest.mark.long
def test_killed_in_a_save_it_continues_from_the_checkpoint_before(
    inputs: Path, finished: tuple[Path, str], tmp_path: Path
) -> None:
    directory = interrupted_run(
        inputs, tmp_path, lambda run: (run / "checkpoints" / ".saving_step_000004" / "rank").exists()
    )
    assert small_run.stable(small_run.metrics(directory)) == small_run.stable(small_run.metrics(finished[0]))


def test_a_run_has_one_actor_for_each_rank_and_engine(inputs: Path, tmp_path: Path) -> None:
    recipe_file = small_run.write(small_run.recipe(inputs, tmp_path), tmp_path)
    actors: list[Counter[str]] = []

    def first_step_is_done() -> bool:
        if lines_of(tmp_path / "small") < 2:
            return False
        actors.append(actors_among(psutil.Process(process.pid).children(recursive=True)))
        return True

    process = small_run.start(recipe_file)
    kill_when(process, first_step_is_done)
    assert actors == [{"RankActor": 2, "EngineActor": 1}]


@pytest.mark.long
def test_a_run_continues_in_another_layout(inputs: Path, finished: tuple[Path, str], tmp_path: Path) -> None:
    values = small_run.recipe(inputs, tmp_path)
    recipe_file = small_run.write(values, tmp_path)
    small_run.train(recipe_file, "train.total_steps=2")
    printed = small_run.train(recipe_file, "train.layout.tensor=1", "train.layout.pipeline=2")
    assert "continuing after step 2" in printed
    ours, theirs = small_run.metrics(tmp_path / "small")[3], small_run.metrics(finished[0])[3]
    assert ours["reward/mean"] == pytest.approx(theirs["reward/mean"], abs=1e-6)
    assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)

"""A run that is told to stop saves what is done, ends with a code of its own, and continues with the same numbers."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from megagrpo.errors import EXIT_STOPPED
from tests.loop import small_run
from tests.loop.test_resume import lines_of
from tests.loop.test_sft import finished_sft as finished_sft
from tests.loop.test_sft import recipe as sft_recipe

DEADLINE_SECONDS = 120.0
STOP_SECONDS = 45.0
"""Longest from the signal to the end of the process: an engine that does not answer, a save, and Ray's own end."""
QUICK = ["track.mlflow=null", "checkpoint.every_steps=100"]


def stop_when(process: subprocess.Popen[str], moment: Callable[[], bool], number: signal.Signals) -> str:
    """Sends the signal as soon as `moment` is true; what the run printed. Fails unless it ends as one that stopped."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    try:
        while not moment():
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline, "the moment to stop never came"
            time.sleep(0.005)
        os.kill(process.pid, number)
        output, _ = process.communicate(timeout=STOP_SECONDS)
    finally:
        process.kill()
    assert process.returncode == EXIT_STOPPED, output
    assert f"stopped by {number.name}" in output
    return output


def ranks_work(process: subprocess.Popen[str]) -> bool:
    """Whether a training rank executes a call: then the step has all of its responses and scores."""
    titles = []
    for child in psutil.Process(process.pid).children(recursive=True):
        try:
            titles.append(" ".join(child.cmdline()))
        except psutil.Error:
            continue
    return any(title.startswith("ray::RankActor.call") for title in titles)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_stopped_while_it_scores_updates_and_evaluates_it_continues_with_the_same_numbers(
    inputs: Path, finished: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = small_run.recipe(inputs, tmp_path)
    here = Path(__file__).parent
    values["reward"]["functions"] = [{"function": f"{here / 'waiting_reward.py'}:share_of_digits"}]
    values["reward"]["timeout_seconds"] = DEADLINE_SECONDS
    recipe_file = small_run.write(values, tmp_path)
    run, hold = tmp_path / "small", tmp_path / "hold"
    monkeypatch.setenv("MEGAGRPO_TEST_HOLD", str(hold))

    def scores_step_2() -> bool:
        if lines_of(run) == 2:
            hold.touch()
        return hold.with_suffix(".reached").exists()

    printed = stop_when(small_run.start(recipe_file, *QUICK), scores_step_2, signal.SIGTERM)
    hold.unlink()
    done = lines_of(run) - 1
    assert f"step_{done:06d}" in printed, "the steps before are saved, though no checkpoint was due"

    process = small_run.start(recipe_file, *QUICK)
    printed = stop_when(process, lambda: lines_of(run) > done + 1 and ranks_work(process), signal.SIGUSR1)
    assert f"continuing after step {done}" in printed
    assert f"step_{done + 2:06d}" in printed, "an update that has begun is finished and saved"

    assert f"continuing after step {done + 2}" in small_run.train(recipe_file, *QUICK)
    assert small_run.stable(small_run.metrics(run)) == small_run.stable(small_run.metrics(finished[0]))


@pytest.mark.long
@pytest.mark.timeout(600)
def test_fine_tuning_stopped_twice_continues_with_the_same_numbers(
    inputs: Path, finished_sft: Path, tmp_path: Path
) -> None:
    recipe_file = small_run.write(sft_recipe(inputs, tmp_path), tmp_path)
    run = tmp_path / "small_sft"
    for lines, number in ((2, signal.SIGTERM), (4, signal.SIGUSR1)):
        stop_when(
            small_run.start(recipe_file, *QUICK, command="sft"), lambda lines=lines: lines_of(run) >= lines, number
        )
    assert "continuing after step" in small_run.train(recipe_file, *QUICK, command="sft")
    assert small_run.stable(small_run.metrics(run)) == small_run.stable(small_run.metrics(finished_sft))

"""A run that is told to stop saves what is done, ends with a code of its own, and continues with the same numbers."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from megagrpo.errors import EXIT_STOPPED
from tests.loop import small_run
from tests.loop.conftest import Finished
from tests.loop.test_resume import lines_of

QUICK = ["track.mlflow=null", "checkpoint.every_steps=100"]


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + small_run.RUN_SECONDS
    while not path.exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, f"no {path}"
        time.sleep(0.02)


@pytest.mark.long
def test_stopped_while_it_scores_and_updates_a_run_continues_with_the_same_numbers(
    inputs: Path, finished: Finished, tmp_path: Path, ray: Mapping[str, str]
) -> None:
    values = small_run.recipe(inputs, tmp_path)
    values["reward"]["functions"] = [{"function": f"{Path(__file__).parent / 'waiting_reward.py'}:share_of_digits"}]
    values["reward"]["timeout_seconds"] = small_run.RUN_SECONDS
    recipe = small_run.write(values, tmp_path)
    run, hold = tmp_path / "small", tmp_path / "hold"
    hold.write_text(str(run / "metrics.jsonl"))
    held = {"MEGAGRPO_TEST_HOLD": str(hold)}

    process = small_run.start(recipe, *QUICK, environment=small_run.own_environment() | held)
    wait_for(hold.with_suffix(".reached"), process)
    process.send_signal(signal.SIGTERM)
    printed = small_run.end(process, EXIT_STOPPED)
    assert "stopped by SIGTERM" in printed
    assert "step_000001" in printed, "the step before is saved, though no checkpoint was due"
    hold.unlink()

    joined = {**ray, **held}
    in_update = ("tests.loop.signalled", "SIGUSR1", "update", "1")
    process = small_run.start(recipe, *QUICK, through=in_update, environment=joined)
    printed = small_run.end(process, EXIT_STOPPED)
    assert "continuing after step 1" in printed
    assert "stopped by SIGUSR1" in printed
    assert "step_000002" in printed, "an update that has begun is finished and saved"
    assert lines_of(run) == 2, "its metrics wait for the evaluation that is due"

    assert "continuing after step 2" in small_run.train(recipe, *QUICK, environment=joined)
    assert small_run.stable(small_run.metrics(run)) == small_run.stable(small_run.metrics(finished.directory))

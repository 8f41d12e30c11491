"""A run that is killed continues with the same command, and with the same numbers."""

from __future__ import annotations

import shutil
import signal
import time
import uuid
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from tests.loop import small_run
from tests.loop.conftest import Finished

ORPHANS_SECONDS = 300.0
"""Ray's own agents look for their parent only now and then; everything else goes at once."""
MARK = "MEGAGRPO_TEST_RUN"


def lines_of(directory: Path) -> int:
    return (directory / "metrics.jsonl").read_text().count("\n")


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


def test_a_run_has_one_actor_for_each_rank_and_engine(finished: Finished) -> None:
    assert Counter(finished.actors.values()) == {"RankActor": 2, "EngineActor": 1}


@pytest.mark.long
def test_killed_in_an_update_and_in_a_save_a_run_continues_with_the_same_numbers(
    inputs: Path, finished: Finished, tmp_path: Path, ray: Mapping[str, str]
) -> None:
    recipe = small_run.write(small_run.recipe(inputs, tmp_path), tmp_path)
    run, mark = tmp_path / "small", uuid.uuid4().hex

    def killed(call: str, nth: int, environment: Mapping[str, str]) -> str:
        through = ("tests.loop.signalled", "SIGKILL", call, str(nth))
        return small_run.end(small_run.start(recipe, through=through, environment=environment), -signal.SIGKILL)

    killed("update", 3, small_run.own_environment() | {MARK: mark})
    assert lines_of(run) == 3, "steps 0 to 2"

    assert "continuing after step 2" in killed("save", 1, ray)
    assert lines_of(run) == 5, "a step is logged before it is saved"
    assert (run / "checkpoints" / ".saving_step_000004" / "rank").exists()

    assert "continuing after step 2" in small_run.train(recipe, environment=ray)
    assert small_run.stable(small_run.metrics(run)) == small_run.stable(small_run.metrics(finished.directory))
    deadline = time.monotonic() + ORPHANS_SECONDS
    while orphans := processes_of(mark):
        assert time.monotonic() < deadline, orphans
        time.sleep(0.5)


@pytest.mark.long
def test_a_run_continues_in_another_layout(
    inputs: Path, finished: Finished, tmp_path: Path, ray: Mapping[str, str]
) -> None:
    recipe = small_run.write(small_run.recipe(inputs, tmp_path), tmp_path)
    run = shutil.copytree(finished.directory, tmp_path / "small")
    shutil.rmtree(run / "checkpoints" / "step_000004")
    layout = ("train.layout.tensor=1", "train.layout.pipeline=2")
    assert "continuing after step 2" in small_run.train(recipe, *layout, environment=ray)
    ours, theirs = small_run.metrics(run)[3], small_run.metrics(finished.directory)[3]
    assert ours["grad_norm"] != theirs["grad_norm"], "the step was made anew"
    assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
    assert ours["reward/mean"] == pytest.approx(theirs["reward/mean"], abs=1e-6)

"""Saves that fail: said once, or raised, and nothing of the checkpoints before is touched. The user's command on an
exported model.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from megagrpo.checkpoint.store import CheckpointStore, SavedFile, describe
from megagrpo.errors import DIVERGED_FIX, CheckpointError, Problem, RankError
from megagrpo.trainer.saving import Exports, Saving
from tests.loop import small_run
from tests.tiny_run import recipe_with
from tests.unit.test_checkpoint_store import save, state


class RanksWithFullDisk:
    """Ranks whose disk is full from their second save on."""

    def __init__(self) -> None:
        self.saves = 0

    def call(self, method: str) -> None:
        """The copy succeeds."""

    def write_snapshot(self, directory: Path) -> list[SavedFile]:
        self.saves += 1
        if self.saves > 1:
            raise CheckpointError(Problem(f"save {self.saves}", "no space left on device"))
        (directory / "weights").write_text("weights")
        return [describe(directory, directory / "weights")]


def test_a_save_that_fails_on_the_way_is_said_once_and_the_last_one_is_raised_alone(tmp_path: Path) -> None:
    said: list[str] = []
    store, ranks = CheckpointStore(tmp_path, keep_last=3), RanksWithFullDisk()
    with Saving(store, said.append) as saving:
        for step in (1, 2):
            saving.begin(ranks, state(step))  # type: ignore[arg-type]
            assert saving.wait() == 1
            saving.confirm()
            saving.confirm()
        assert len(said) == 1
        assert "save 2" in said[0]
        saving.begin(ranks, state(3))  # type: ignore[arg-type]
        with pytest.raises(CheckpointError, match="save 3"):
            saving.finish()
    assert len(said) == 1, "the command says the last one, as the run's error"
    newest = store.newest()
    assert newest is not None
    assert newest.name == "step_000001"


def test_the_error_of_a_run_that_has_diverged_says_what_to_type_to_go_on_from_its_last_finite_weights(
    tmp_path: Path,
) -> None:
    def fix_with(saving: Saving, fix: str) -> str:
        with pytest.raises(RankError) as caught, saving.going_on_from_finite_weights(0.5):
            raise RankError([Problem("update", fix=fix), Problem("also")])
        return caught.value.problems[0].fix

    directory, command = tmp_path / "check points", "the same command with train.optimizer.lr=0.25; it begins from"
    store = CheckpointStore(directory, keep_last=1)
    with Saving(store, print) as saving:
        assert f". To go on: {command} the model" in fix_with(saving, DIVERGED_FIX)
        save(store, 1)
        store.confirm()
        assert f". To go on: {command} {directory / 'step_000001'}," in fix_with(saving, DIVERGED_FIX)
        save(store, 2)
        removing = f". To go on: rm -r '{directory / 'step_000002'}', then {command} {directory / 'step_000001'},"
        assert removing in fix_with(saving, DIVERGED_FIX)
        assert fix_with(saving, "another") == "another"
    unconfirmed = CheckpointStore(tmp_path / "older", keep_last=3)
    with Saving(unconfirmed, print) as saving:
        for step in (1, 2, 3):
            save(unconfirmed, step)
        last, before = (shlex.quote(str(tmp_path / "older" / f"step_00000{step}")) for step in (3, 2))
        assert fix_with(saving, DIVERGED_FIX).endswith(f". To go on: rm -r {last}, then {command} {before}")


# --- the command on an exported model ---------------------------------------------------------------------------------

TELL = """
import os, sys, time
print(sys.argv[1], os.getpgid(0) == os.getpid(), "MY_TOKEN" in os.environ, os.environ["PLAIN"], flush=True)
time.sleep(float(sys.argv[2]))
sys.exit(3)
"""


def test_a_command_has_a_group_a_log_and_no_secrets_and_its_failure_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "x")
    monkeypatch.setenv("PLAIN", "y")
    said: list[str] = []
    tokenizer: Any = None
    for name, seconds in (("step_000002", "0"), ("hugging_face", "600")):
        recipe = recipe_with(f"track.directory={tmp_path}")
        command = [sys.executable, "-c", TELL, "{directory}", seconds]
        checkpoint = recipe.checkpoint.model_copy(update={"after_export": command})
        checked: Any = SimpleNamespace(recipe=recipe.model_copy(update={"checkpoint": checkpoint}))
        exports = Exports(checked, tokenizer, said.append)
        exports.start_command(tmp_path / name)
        log = tmp_path / recipe.name / "logs" / f"after_export_{name}.log"
        small_run.wait_until(lambda log=log: log.read_text().endswith("\n"), "its output")
        assert log.read_text() == f"{tmp_path / name} True False y\n"
        while not said:
            exports.report()
        exports.close()
    assert len(said) == 2
    assert "ended with 3" in said[0]
    pid = int(said[1].partition("still runs as process ")[2].partition(",")[0])
    assert psutil.Process(pid).is_running(), "the run leaves it alone"
    os.killpg(pid, signal.SIGKILL)


def test_a_command_that_cannot_be_started_is_reported(tmp_path: Path) -> None:
    said: list[str] = []
    recipe = recipe_with(f"track.directory={tmp_path}", "checkpoint.after_export=[no-such-program]")
    checked: Any = SimpleNamespace(recipe=recipe)
    tokenizer: Any = None
    Exports(checked, tokenizer, said.append).start_command(tmp_path)
    assert "could not be started" in said[0]

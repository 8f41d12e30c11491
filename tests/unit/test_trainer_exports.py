"""The user's command on an exported model: what it is given, where its output goes, and what becomes of it."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from megagrpo.trainer.exports import Exports
from tests.loop import small_run
from tests.tiny_run import recipe_with

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

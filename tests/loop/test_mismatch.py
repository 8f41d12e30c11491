"""Whole runs whose trainer and engine agree, and one with an engine that lies about a token, and their reports."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megagrpo.errors import EXIT_RUN_FAILED
from tests.loop import small_run
from tests.loop.altered_logprob import LOWER, POSITION
from tests.loop.conftest import Finished

LIMIT = ("rollout.mismatch.above=1.0", "rollout.mismatch.metric=max")
SHORT = ("eval.files=[]", "checkpoint.every_steps=100", "train.total_steps=2", "checkpoint.export_hugging_face=false")


def run(module: str, *arguments: str, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True,
        text=True,
        timeout=small_run.RUN_SECONDS,
        check=False,
        env=environment or small_run.own_environment(),
    )


def lines_of(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "mismatch.jsonl").read_text(encoding="utf-8").splitlines()]


def test_a_run_writes_the_worst_tokens_of_every_step_and_says_nothing(finished: Finished) -> None:
    directory, printed = finished.directory, finished.printed
    assert "logprob_difference" not in printed
    metrics = small_run.metrics(directory)
    lines = lines_of(directory)
    assert [line["step"] for line in lines] == list(range(1, small_run.STEPS + 1))
    for line in lines:
        assert line["max"] == metrics[line["step"]]["logprob_difference/max"]
        assert 0 <= line["mean"] <= line["p99"] <= line["max"] < 1e-4
        assert line["effective_share"] == pytest.approx(1, abs=1e-6)
        assert len(line["worst"]) == 8
        worst = line["worst"][0]
        assert abs(worst["train_logprob"] - worst["rollout_logprob"]) == pytest.approx(line["max"], abs=1e-9)
        assert {token["weight_version"] for token in line["worst"]} == {line["step"] - 1}
        assert all(token["text"] for token in line["worst"])
    assert f"{lines[-1]['tokens']}" in run("megagrpo.cli", "report", str(directory)).stdout


@pytest.fixture(scope="module")
def stopped(inputs: Path, tmp_path_factory: pytest.TempPathFactory, ray: Mapping[str, str]) -> tuple[Path, Any]:
    """Recipe of a run that stopped at its first step, and what it printed."""
    output = tmp_path_factory.mktemp("stopped")
    recipe = small_run.write(small_run.recipe(inputs, output), output)
    arguments = ("tests.loop.altered_logprob", str(recipe), *SHORT, *LIMIT, "rollout.mismatch.then=stop")
    return recipe, run(*arguments, environment=ray)


@pytest.mark.long
def test_an_altered_logprob_ends_the_run_with_its_token_once_the_step_is_saved(stopped: tuple[Path, Any]) -> None:
    recipe, done = stopped
    assert done.returncode == EXIT_RUN_FAILED, done.stdout + done.stderr
    altered = re.search(r"altered: (\d+) at 2 of sample (\d+) of prompt (\S+)", done.stdout)
    assert altered is not None
    (line,) = lines_of(recipe.parent / "small")
    worst, second = line["worst"][:2]
    assert (worst["token"], worst["sample"], worst["prompt_id"]) == (int(altered[1]), int(altered[2]), altered[3])
    assert worst["position"] == POSITION
    assert worst["train_logprob"] - worst["rollout_logprob"] == pytest.approx(LOWER, abs=1e-4)
    assert abs(second["train_logprob"] - second["rollout_logprob"]) < 1e-4
    assert "step 1: logprob_difference/max is 3" in done.stderr
    assert f"the worst is {worst['text']!r}" in done.stderr
    assert f"position 2 of sample {altered[2]} of prompt {altered[3]}" in done.stderr
    assert "Traceback" not in done.stderr

    directory = recipe.parent / "small"
    assert (directory / "checkpoints" / "step_000001" / "MANIFEST.json").exists()
    assert sorted(small_run.metrics(directory)) == [1]
    shown = run("megagrpo.cli", "report", str(directory)).stdout
    assert re.search(rf"^ +1 +3 .* {re.escape(altered[3])} +{altered[2]} +2 .*【", shown, re.MULTILINE), shown


@pytest.mark.long
def test_a_run_that_stopped_goes_on_once_its_recipe_only_warns(
    stopped: tuple[Path, Any], ray: Mapping[str, str]
) -> None:
    done = run("tests.loop.altered_logprob", str(stopped[0]), *SHORT, *LIMIT, environment=ray)
    assert done.returncode == 0, done.stderr
    assert "continuing after step 1" in done.stdout
    assert "warning: step 2: logprob_difference/max is 3" in done.stdout
    assert sorted(small_run.metrics(stopped[0].parent / "small")) == [1, 2]
    assert [line["step"] for line in lines_of(stopped[0].parent / "small")] == [1, 2]

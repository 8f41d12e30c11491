"""A whole run with an engine that lies about a token, and its report."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from megagrpo.errors import EXIT_RUN_FAILED
from tests.loop import small_run
from tests.loop.altered_runs import LOWER, POSITION

LIMIT = "rollout.mismatch={above: 1.0, metric: max, then: stop}"
SHORT = ("eval.sets={}", "checkpoint.every_steps=100", "train.total_steps=2", "checkpoint.export_hugging_face=false")


@pytest.mark.long
def test_an_altered_logprob_ends_the_run_with_its_token_once_the_step_is_saved(
    inputs: Path, tmp_path: Path, ray: Mapping[str, str]
) -> None:
    recipe, directory = small_run.write(small_run.recipe(inputs, tmp_path), tmp_path), tmp_path / "small"
    lying = small_run.start(recipe, *SHORT, LIMIT, through=("tests.loop.altered_runs", "lie"), environment=ray)
    printed = small_run.end(lying, EXIT_RUN_FAILED)
    altered = re.search(r"altered: (\d+) at 2 of sample (\d+) of prompt (\S+)", printed)
    assert altered is not None
    (line,) = map(json.loads, (directory / "mismatch.jsonl").read_text(encoding="utf-8").splitlines())
    worst, second = line["worst"][:2]
    assert (worst["token"], worst["sample"], worst["prompt_id"]) == (int(altered[1]), int(altered[2]), altered[3])
    assert worst["position"] == POSITION
    assert worst["train_logprob"] - worst["rollout_logprob"] == pytest.approx(LOWER, abs=1e-4)
    assert abs(second["train_logprob"] - second["rollout_logprob"]) < 1e-4
    assert "step 1: logprob_difference/max is 3" in printed
    assert f"the worst is {worst['text']!r}" in printed
    assert f"position 2 of sample {altered[2]} of prompt {altered[3]}" in printed
    assert "Traceback" not in printed

    assert (directory / "checkpoints" / "step_000001" / "MANIFEST.json").exists()
    assert sorted(small_run.metrics(directory)) == [1]
    shown = small_run.train(directory, "--mismatch", command="report")
    assert re.search(rf"^ +1 +3 .* {re.escape(altered[3])} +{altered[2]} +2 .*【", shown, re.MULTILINE), shown


@pytest.mark.soak
def test_a_rule_that_holds_ends_the_run_once_the_step_is_saved(
    inputs: Path, tmp_path: Path, ray: Mapping[str, str]
) -> None:
    """An untrained model's responses reach the limit."""
    recipe, directory = small_run.write(small_run.recipe(inputs, tmp_path), tmp_path), tmp_path / "small"
    lengths = ("train.total_steps=6", "rollout.alerts={truncated: stop}")
    printed = small_run.end(small_run.start(recipe, *SHORT[:2], *lengths, environment=ray), EXIT_RUN_FAILED)
    assert "step 5: many responses are cut off" in printed
    assert "rollout.alerts.truncated: warn" in printed
    assert (directory / "checkpoints" / "step_000005" / "MANIFEST.json").exists()
    assert [entry["alerts"] for entry in small_run.metrics(directory).values()] == [0, 0, 0, 0, 1]

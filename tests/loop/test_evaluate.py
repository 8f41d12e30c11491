"""`megagrpo eval` on what a run leaves: its model and its checkpoint answer as they did in the run."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megagrpo.evaluation.responses import Response, read_responses, to_line
from megagrpo.report.run import read_run
from megagrpo.report.samples import sample_data
from tests.loop import small_run
from tests.loop.conftest import Finished


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("evaluations")


def evaluate(ray: Mapping[str, str], finished: Finished, output: Path, *words: Path | str) -> str:
    """words: models, and flags."""
    first, *others = map(str, words)
    recipe = str(finished.directory / "recipe.yaml")
    how: Any = {"command": "eval", "environment": ray}
    if "--json" in words:
        how["errors"] = subprocess.DEVNULL  # libraries warn there
    return small_run.train(Path(first), *others, "--recipe", recipe, "--output", str(output), **how)


def in_order(path: Path) -> list[Response]:
    return sorted(read_responses(path), key=lambda one: (one.set, one.prompt_id, one.index))


def test_a_runs_model_and_its_checkpoint_answer_as_in_its_last_evaluation(
    finished: Finished, output: Path, ray: Mapping[str, str]
) -> None:
    printed = evaluate(ray, finished, output, finished.directory / "hugging_face", finished.directory)
    in_run = in_order(finished.directory / "evaluations" / f"step_{small_run.STEPS:06d}.jsonl")
    logs = sorted(output.glob("*/responses.jsonl"))
    assert len(logs) == 2
    for log in logs:
        assert in_order(log) == in_run
        found = json.loads((log.parent / "results.json").read_text())["sets"]["sums"]
        assert found["mean@1"] == small_run.metrics(finished.directory)[small_run.STEPS]["eval/sums/mean@1"]
        assert not (log.parent / "model").exists(), "what the checkpoint was converted into is removed"
    compared = json.loads((output / "comparison.json").read_text())["sets"]["sums"]
    assert {(one["difference"], one["p_value"]) for one in compared} == {(0.0, 1.0)}
    assert "mean@1" in printed
    shown, _ = sample_data([read_run(output)])
    assert shown["rows"] == 2 * len(in_run), "the page of this directory has the responses of both"


def test_an_evaluation_that_was_killed_goes_on_with_what_it_lacks(
    finished: Finished, output: Path, ray: Mapping[str, str]
) -> None:
    model = finished.directory / "hugging_face"
    (log,) = output.glob("*hugging_face*/responses.jsonl")
    whole = in_order(log)
    lines = log.read_bytes().splitlines(keepends=True)
    marked = replace(next(read_responses(log)), notes={"made": "before the kill"})
    log.write_bytes(b"".join([to_line(marked), *lines[1:3], lines[3][:-30]]))
    events = [json.loads(line) for line in evaluate(ray, finished, output, model, "--json").splitlines()]
    assert any(f"{len(whole)} prompts, 3 of them done before" in event.get("text", "") for event in events)
    results = json.loads((log.parent / "results.json").read_text())
    assert events[-2] == {"event": "result", "model": str(model), "sets": results["sets"]}
    assert events[-1] == {"event": "end", "state": "finished", "places": {"output": str(output)}}
    assert [replace(one, notes={}) for one in in_order(log)] == [replace(one, notes={}) for one in whole]
    assert marked in in_order(log), "what was there is kept"

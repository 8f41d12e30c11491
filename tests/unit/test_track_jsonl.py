"""metrics.jsonl and rollouts.jsonl, through interruptions."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megagrpo.track.jsonl import JsonlMetrics, RolloutTraces
from megagrpo.track.sink import RunStart
from megagrpo.types import Group, Prompt, Sample, Score
from tests.track_recipe import make_recipe


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def metrics_of(directory: Path, resumed_step: int, steps: range) -> JsonlMetrics:
    sink = JsonlMetrics()
    sink.start(RunStart(make_recipe(directory), directory, 10, resumed_step))
    for step in steps:
        sink.log(step, {"reward/mean": step / 10})
    return sink


def test_a_resumed_run_has_one_line_per_step(tmp_path: Path) -> None:
    metrics_of(tmp_path, 0, range(6))  # killed after step 5; its checkpoint is of step 3
    metrics_of(tmp_path, 3, range(4, 8)).finish("finished")
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == list(range(8))


def test_a_line_is_there_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    metrics_of(tmp_path, 0, range(1, 3))
    assert [line["reward/mean"] for line in lines(tmp_path / "metrics.jsonl")] == [0.1, 0.2]


def test_a_line_cut_off_by_a_kill_is_dropped(tmp_path: Path) -> None:
    metrics_of(tmp_path, 0, range(1, 4))
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 3, "rew')
    metrics_of(tmp_path, 3, range(4, 5))
    assert [line["step"] for line in lines(path)] == [1, 2, 3, 4]


def test_a_run_that_starts_anew_starts_an_empty_file(tmp_path: Path) -> None:
    metrics_of(tmp_path, 0, range(4))
    metrics_of(tmp_path, 0, range(2))
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [0, 1]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_json_cannot_say_is_null(tmp_path: Path, value: float) -> None:
    metrics_of(tmp_path, 0, range(0)).log(1, {"grad_norm": value, "lr": 1.0})
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()
    (line,) = lines(tmp_path / "metrics.jsonl")
    assert (line["grad_norm"], line["lr"]) == (None, 1.0)


def test_traces_hold_the_first_groups_of_a_step(tmp_path: Path) -> None:
    sample = Sample(
        "p", 0, np.array([5, 1], np.int32), np.array([-0.5, -0.25], np.float32), np.zeros(2), "stop", "é 82"
    )
    group = Group(
        Prompt("p", (3, 4), "adder", "82", "sums"),
        (sample, sample),
        (Score(1.0, {"gsm8k": 1.0}), Score(None, error="x")),
    )
    traces = RolloutTraces(RunStart(make_recipe(tmp_path, rollouts_per_step=1), tmp_path, 10))
    traces.write(7, [group, group])
    (line,) = lines(tmp_path / "rollouts.jsonl")
    assert (line["step"], line["prompt_id"], line["ground_truth"], line["prompt_tokens"]) == (7, "p", "82", [3, 4])
    assert (line["data_source"], line["ability"]) == ("adder", "sums")
    first, second = line["samples"]
    assert (first["text"], first["tokens"], first["logprob"], first["score"]) == ("é 82", 2, -0.75, 1.0)
    assert (second["score"], second["error"]) == (None, "x")

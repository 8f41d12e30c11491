"""A step of a whole run in a profiler."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.loop import small_run

PROFILE = ("train.total_steps=2", "train.profile={steps: [2], ranks: [1]}", "eval.sets={}")


@pytest.mark.long
def test_a_profiled_step_has_a_timeline_of_all_processes_and_the_operations_of_the_chosen_rank(
    inputs: Path, tmp_path: Path, ray: Mapping[str, str]
) -> None:
    recipe, run = small_run.write(small_run.recipe(inputs, tmp_path), tmp_path), tmp_path / "small"
    printed = small_run.train(recipe, *PROFILE, "checkpoint.export_hugging_face=false", environment=ray)
    directory = run / "profile" / "step_000002"
    assert str(directory) in printed
    assert {path.name for path in directory.iterdir()} == {"timeline.json", "rank_1.trace.json.gz"}

    events = json.loads((directory / "timeline.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    done: dict[str, list[str]] = {name: [] for name in names.values()}
    for event in events:
        if event["ph"] == "X":
            done[names[event["pid"]]].append(event["name"])
    assert set(done) == {"driver", "engine 0", "reward workers", "train rank 0", "train rank 1"}
    assert {"step", "rollout", "reward", "logprobs", "update", "weight_sync"} <= set(done["driver"])
    samples = [what for what in done["engine 0"] if what.startswith("sample ")]
    assert len(samples) == len(set(samples)) == 16
    assert done["reward workers"] == ["share_of_digests"] * 16 or len(done["reward workers"]) == 16
    assert {"load_batch", "update", "weight sync to version 2"} <= set(done["train rank 0"])
    assert {"weight sync to version 2", "weight sync: commit of version 2"} <= set(done["engine 0"])
    step = next(event for event in events if event["name"] == "step")
    seconds = small_run.metrics(run)[2]["seconds/step"]
    assert step["dur"] / 1e6 == pytest.approx(seconds, rel=0.05, abs=0.01)

    with gzip.open(directory / "rank_1.trace.json.gz", "rt") as file:
        operations = {event.get("name", "") for event in json.load(file)["traceEvents"]}
    assert {"aten::mm", "aten::embedding", "MulBackward0"} <= operations  # the backward pass is in another thread

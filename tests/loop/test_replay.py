"""A step is trained again from its saved batch, and halves of a run from the other's output, with the same numbers."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megagrpo.report.run import read_run
from megagrpo.report.samples import sample_data
from megagrpo.track.rollout_files import TRAIN, read_rollouts
from megagrpo.trainer.batches import read_batch, saved_steps
from tests.loop import small_run
from tests.loop.conftest import Finished
from tests.unit.test_checkpoint_groups import comparable


def test_a_replayed_step_and_the_one_before_it_give_the_numbers_of_the_run(
    finished: Finished, tmp_path: Path, ray: Mapping[str, str]
) -> None:
    run = shutil.copytree(finished.directory, tmp_path / "elsewhere")
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path != run}
    printed = small_run.train(run, "--step", "4", command="replay", environment=ray)
    lines = printed.splitlines()  # those of a slow machine's progress may be among them
    assert any(line.endswith(f"from {run / 'checkpoints' / 'step_000002'}") for line in lines)
    assert "trained step 3" in lines
    logged = small_run.metrics(run)[4]
    of_the_run = {"step", "alerts", "restarts", "weights/sync_bytes"}  # a step alone has none
    compared = [
        name for name in logged if not name.startswith((*small_run.VOLATILE, "eval/")) and name not in of_the_run
    ]
    assert f"all {len(compared)} metrics are equal, bit for bit" in printed
    assert all(f"\n{name} " in printed for name in compared)
    assert {path: path.stat().st_mtime_ns for path in before} == before, "nothing of the run is changed"
    assert {path.name for path in run.iterdir() if path not in before} <= {"replay"}


@pytest.mark.soak
def test_in_another_layout_a_replay_shows_what_differs(finished: Finished, ray: Mapping[str, str]) -> None:
    layout = ("train.layout.tensor=1", "train.layout.pipeline=2")
    process = small_run.start(finished.directory, "--step", "1", *layout, command="replay", environment=ray)
    printed = small_run.end(process, code=1)
    assert f"step 1 of {finished.directory}, from " in printed
    (line,) = [line for line in printed.splitlines() if line.startswith("grad_norm")]
    _, logged, again, difference = line.split()
    assert float(again) == pytest.approx(float(logged), rel=1e-3)
    assert 0 < abs(float(difference)) < 1e-3
    assert "metrics differ" in printed


def of_training(directory: Path) -> list[dict[str, Any]]:
    """Rows of the run's rollouts, without those of evaluations."""
    return [row for row in read_rollouts(directory).to_pylist() if row["set"] == TRAIN]


@pytest.mark.long
def test_each_half_of_a_run_gives_the_same_with_the_others_saved_output(
    inputs: Path, finished: Finished, tmp_path: Path, ray: Mapping[str, str]
) -> None:
    recipe = small_run.write(small_run.recipe(inputs, tmp_path), tmp_path)
    half = partial(small_run.train, recipe, environment=ray)
    printed, _ = small_run.side_by_side(
        partial(half, "--train-only", str(finished.directory), "name=train_only"),
        partial(half, "--rollout-only", "name=rollout_only", "train.total_steps=2"),
    )
    assert "and no engines" in printed
    trained, whole = (
        {
            step: {name: value for name, value in entry.items() if not name.startswith(("eval/", "weights/sync_bytes"))}
            for step, entry in small_run.stable(small_run.metrics(directory)).items()
            if step
        }
        for directory in (tmp_path / "train_only", finished.directory)
    )
    assert trained == whole
    looked_at, by_whole = (of_training(directory) for directory in (tmp_path / "train_only", finished.directory))
    assert looked_at == by_whole
    assert (tmp_path / "train_only" / "hugging_face").is_dir()

    samples = tmp_path / "rollout_only"
    assert saved_steps(samples) == [1, 2]
    first, theirs = (read_batch(directory, 1).sampled.all for directory in (samples, finished.directory))
    assert comparable(first) == comparable(theirs)
    versions = {v for g in read_batch(samples, 2).sampled.all for s in g.samples for v in s.versions.tolist()}
    assert versions == {0}, "nothing was trained"
    assert not (samples / "checkpoints").exists()
    first_rows, second_rows = ([row for row in of_training(samples) if row["step"] == step] for step in (1, 2))
    untrained = dict.fromkeys(("advantage", "train_logprobs", "entropies", "token_advantages"))
    assert first_rows == [row | untrained for row in by_whole if row["step"] == 1]
    assert [row["age"] for row in second_rows] == [0] * len(first_rows)
    shown, _ = sample_data([read_run(samples)])
    assert shown["rows"] == len(first_rows) + len(second_rows)

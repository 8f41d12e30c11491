"""Runs under each schedule: their numbers, what they train on, and that they continue with the same numbers."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megagrpo.errors import EXIT_STOPPED
from megagrpo.trainer.batches import read_batch
from tests.loop import small_run
from tests.loop.conftest import Finished
from tests.terminal import Terminal, plain

pytestmark = [pytest.mark.long, pytest.mark.timeout(2 * small_run.RUN_SECONDS)]
Environment = Mapping[str, str]


def write(inputs: Path, output: Path, name: str, schedule: dict[str, Any]) -> Path:
    values = small_run.recipe(inputs, output, name) | {"schedule": schedule}
    values["checkpoint"]["keep_batches"] = small_run.STEPS
    if schedule["kind"] != "sync":
        values["cluster"]["placement"] = "disaggregated"
    return small_run.write(values, output)


def numbers(run: Path) -> dict[int, dict[str, float]]:
    """Metrics without what schedules alone have."""
    return {
        step: {name: value for name, value in entry.items() if not name.startswith("staleness/")}
        for step, entry in small_run.stable(small_run.metrics(run)).items()
    }


def test_without_staleness_an_asynchronous_run_has_the_numbers_of_a_synchronous_one(
    inputs: Path, finished: Finished, tmp_path: Path, ray: Environment
) -> None:
    small_run.train(write(inputs, tmp_path, "exact", {"kind": "async", "max_staleness": 0}), environment=ray)
    assert numbers(tmp_path / "exact") == numbers(finished.directory)


@pytest.mark.parametrize(
    "schedule",
    [
        {"kind": "async", "max_staleness": 2},
        pytest.param({"kind": "sync", "carry_over": 4, "max_staleness": 2}, marks=pytest.mark.soak),
    ],
    ids=["async", "carry_over"],
)
def test_every_prompt_is_trained_once_within_its_staleness_also_if_the_run_is_interrupted(
    schedule: dict[str, Any], inputs: Path, finished: Finished, tmp_path: Path, ray: Environment
) -> None:
    recipe = write(inputs, tmp_path, "run", schedule)
    through = ("tests.loop.altered_runs", "signal", "SIGTERM", "update", "3")
    printed = small_run.end(small_run.start(recipe, through=through, environment=ray), EXIT_STOPPED)
    assert "stopped by SIGTERM" in printed
    assert "continuing after step" in small_run.train(recipe, environment=ray)
    steps = range(1, small_run.STEPS + 1)
    batches = {step: read_batch(tmp_path / "run", step).sampled for step in steps}
    wanted = [group.prompt.id for step in steps for group in read_batch(finished.directory, step).sampled.groups]
    got = [group.prompt.id for step in steps for group in batches[step].groups]
    assert sorted(got) == sorted(wanted)
    ages = {
        step - 1 - int(version)
        for step, sampled in batches.items()
        for group in sampled.groups
        for sample in group.samples
        for version in sample.versions
    }
    assert min(ages) == 0
    assert 1 <= max(ages) <= 2
    entries = small_run.metrics(tmp_path / "run")
    assert max(entries[step]["staleness/max"] for step in steps) == max(ages)


@pytest.mark.soak
def test_one_step_off_samples_while_the_step_before_trains_and_continues_with_the_same_numbers(
    inputs: Path, tmp_path: Path, ray: Environment
) -> None:
    whole, parted = (write(inputs, tmp_path, name, {"kind": "one_step_off"}) for name in ("whole", "parted"))
    through = ("tests.loop.altered_runs", "signal", "SIGTERM", "update", "3")
    small_run.side_by_side(
        partial(small_run.train, whole, environment=ray),
        lambda: small_run.end(small_run.start(parted, through=through, environment=ray), EXIT_STOPPED),
    )
    assert "continuing after step" in small_run.train(parted, environment=ray)
    assert numbers(tmp_path / "parted") == numbers(tmp_path / "whole")
    entries = small_run.metrics(tmp_path / "whole")
    assert [entries[step]["staleness/mean"] for step in range(1, small_run.STEPS + 1)] == [0.0, 1.0, 1.0, 1.0]


def test_over_sampling_trains_on_what_is_complete_first_and_reports_what_it_throws_away(
    inputs: Path, finished: Finished, tmp_path: Path, ray: Environment
) -> None:
    recipe = write(inputs, tmp_path, "cut", {"kind": "sync", "oversample": 3})
    command = [sys.executable, "-m", "megagrpo.cli", "train", str(recipe), "track.console=auto"]
    terminal = Terminal(command, ray)
    drawn = plain(terminal.end())
    for shown in ("cut · starting", "loading libraries", "cut · step 4/4", "finished after", f"train {tmp_path}/cut/"):
        assert shown in drawn, drawn
    assert terminal.drawn.count("\x1b[?25h") == terminal.drawn.count("\x1b[?25l"), "the cursor is there again"
    entries = small_run.metrics(tmp_path / "cut")
    for step in range(1, small_run.STEPS + 1):
        groups = read_batch(tmp_path / "cut", step).sampled.groups
        lengths = [len(sample.tokens) for group in groups for sample in group.samples]
        assert len(groups) == 4
        assert entries[step]["cut/samples"] == 3 * 4
        assert 0.0 <= entries[step]["cut/tokens_share"] < 1.0
        assert entries[step]["cut/trained_tokens_mean"] == pytest.approx(sum(lengths) / len(lengths))
        assert entries[step]["staleness/max"] == 0.0
    assert not [name for entry in small_run.metrics(finished.directory).values() for name in entry if "cut/" in name]

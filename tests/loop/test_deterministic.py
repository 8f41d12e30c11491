"""A deterministic recipe gives the same numbers twice, and a replay of a schedule those of its run."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.loop import small_run

pytestmark = [pytest.mark.long, pytest.mark.timeout(2 * small_run.RUN_SECONDS)]
Environment = Mapping[str, str]


def write(inputs: Path, output: Path, name: str, **changes: Any) -> Path:
    """Two engines, so that which one samples a response, and beside which others, is a matter of speed."""
    values = small_run.recipe(inputs, output, name) | changes
    values["cluster"]["placement"] = "disaggregated"
    values["rollout"]["engines"] = 2
    return small_run.write(values, output)


def numbers(run: Path) -> dict[int, dict[str, float]]:
    return {
        step: {name: value for name, value in entry.items() if name != "staleness/oldest_seconds"}
        for step, entry in small_run.stable(small_run.metrics(run)).items()
    }


def weights(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((run / "hugging_face").glob("*.safetensors"))}


@pytest.mark.soak
def test_two_runs_of_a_deterministic_recipe_have_the_same_metrics_and_weights(
    inputs: Path, tmp_path: Path, ray: Environment
) -> None:
    recipes = [
        write(inputs, tmp_path, name, deterministic=True, schedule={"kind": "async", "max_staleness": 0})
        for name in ("once", "twice")
    ]
    small_run.side_by_side(*(partial(small_run.train, recipe, environment=ray) for recipe in recipes))
    once, twice = tmp_path / "once", tmp_path / "twice"
    assert numbers(once) == numbers(twice)
    assert weights(once) == weights(twice) != {}


@pytest.mark.soak
def test_a_replayed_schedule_gives_the_numbers_of_its_run(inputs: Path, tmp_path: Path, ray: Environment) -> None:
    """Engines sample more slowly than the ranks train, so that updates find them at work: not always on a busy machine,
    which tries again."""
    values = {"deterministic": "replayable", "schedule": {"kind": "async", "max_staleness": 2}}
    recipe = write(inputs, tmp_path, "run", **values)
    longer = ("rollout.response_tokens_max=32", "rollout.samples_per_prompt=8", "rollout.engines=1")
    for name in ("first", "second", "third", "fourth"):
        small_run.train(recipe, *longer, f"name={name}", environment=ray)
        run, again = tmp_path / name, tmp_path / "again"
        mixed = max(entry.get("staleness/mixed_share", 0) for entry in small_run.metrics(run).values())
        if mixed:
            break
    assert mixed > 0
    printed = small_run.train(recipe, *longer, "--replay-schedule", str(run), "name=again", environment=ray)
    assert "other lengths" not in printed
    assert numbers(again) == numbers(run)
    assert weights(again) == weights(run) != {}
    assert (again / "schedule.jsonl").read_bytes() == (run / "schedule.jsonl").read_bytes()

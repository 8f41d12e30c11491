"""The demo's recipes, run from the model of its warm start."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.loop import small_run

RECIPES = small_run.REPOSITORY / "yaml_recipes"
GOAL = 0.9
ENOUGH = 0.93
UNTIL_LEARNT = ("track.mlflow=null", f"eval.early_stopping={{target: {ENOUGH}}}")
LAYOUTS: dict[str, tuple[str, ...]] = {
    "tensor": (),  # the recipes' own
    "pipeline": ("train.layout.tensor=1", "train.layout.pipeline=2"),
    "data": ("train.layout.tensor=1", "train.layout.data=2"),
}

Metrics = dict[int, dict[str, float]]


def train(environment: Mapping[str, str], output: Path, name: str, *overrides: str, **how: tuple[str, ...]) -> Metrics:
    """Metrics by step of yaml_recipes/`name`.yaml."""
    directory = f"track.directory={output}"
    small_run.train(RECIPES / f"{name}.yaml", directory, *overrides, environment=environment, **how)
    return small_run.metrics(output / name)


def solved(metrics: Metrics) -> dict[int, float]:
    """Share of the held-out sums, by step, where it was measured."""
    found = {step: entry["eval/mean@1"] for step, entry in metrics.items() if "eval/mean@1" in entry}
    print("solved", found)
    return found

"""Assumptions taken from a run: with them a plan predicts the seconds that the run's phases took."""

from __future__ import annotations

from pathlib import Path

from megagrpo.plan.assumptions import Assumptions
from megagrpo.plan.machines import Machines
from megagrpo.recipe.schema import AnyRecipe
from megagrpo.weights.families.architecture import Architecture


def calibrated(
    assumptions: Assumptions,
    recipe: AnyRecipe,
    architecture: Architecture,
    machines: Machines | None,
    run_directory: Path,
) -> Assumptions:
    """Lengths and phases as in the run's metrics.jsonl: medians over its steps, without the first if there are more.

    `machines` None: the run was on CPUs (A_CPU). Raises ReportError if the directory has no metrics of steps.
    """
    raise NotImplementedError

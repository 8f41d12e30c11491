"""How long a step takes: its phases, and what each is made of. docs/plan.md explains the model."""

from __future__ import annotations

from megagrpo.plan.assumptions import Assumptions
from megagrpo.plan.figures import StepTime
from megagrpo.plan.machines import Machines
from megagrpo.recipe.schema import AnyRecipe
from megagrpo.weights.families.architecture import Architecture


def step_time(recipe: AnyRecipe, architecture: Architecture, machines: Machines, assumptions: Assumptions) -> StepTime:
    """Expected seconds of one step, by phase. A sixth phase, driver, is what metrics have between the others.

    For a recipe on CPUs pass `A_CPU`, and believe the result only with calibrated assumptions.
    """
    raise NotImplementedError

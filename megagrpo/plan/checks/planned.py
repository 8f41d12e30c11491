"""What advice is about: a recipe, its machines and what it comes to on them."""

from __future__ import annotations

from dataclasses import dataclass

from megagrpo.plan.assumptions import Assumptions
from megagrpo.plan.estimate import Estimate
from megagrpo.plan.machines import Machines
from megagrpo.recipe.schema import AnyRecipe, Recipe, SftRecipe
from megagrpo.weights.families.architecture import Architecture


@dataclass(frozen=True)
class Planned:
    """`machines` and `estimate` are None where the kind of GPU is not known."""

    recipe: AnyRecipe
    architecture: Architecture
    machines: Machines | None
    estimate: Estimate | None
    assumptions: Assumptions


def samples_per_step(recipe: Recipe) -> int:
    return recipe.rollout.prompts_per_step * recipe.rollout.samples_per_prompt


def minibatch_sequences(recipe: AnyRecipe) -> int:
    """Sequences of one optimizer step, over all data ranks."""
    if isinstance(recipe, SftRecipe):
        return recipe.data.examples_per_step
    return samples_per_step(recipe) // recipe.algorithm.minibatches

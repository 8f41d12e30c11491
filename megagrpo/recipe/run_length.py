"""How many steps a run has. Pure."""

from __future__ import annotations

import math

from megagrpo.recipe.schema import AnyRecipe, SftRecipe


def total_steps(recipe: AnyRecipe, rows: int) -> int:
    """Steps of the run, rounded up to whole ones; `rows` are the prompts, or examples, of one epoch."""
    train = recipe.train
    if train.total_steps is not None:
        return train.total_steps
    if train.total_epochs is not None:
        return math.ceil(train.total_epochs * rows / _rows_per_step(recipe))
    if not isinstance(recipe, SftRecipe) and train.total_episodes is not None:
        return math.ceil(train.total_episodes / (_rows_per_step(recipe) * recipe.rollout.samples_per_prompt))
    raise ValueError("total_steps, total_epochs or total_episodes is given: the rules of recipe/ check that")


def _rows_per_step(recipe: AnyRecipe) -> int:
    return recipe.data.examples_per_step if isinstance(recipe, SftRecipe) else recipe.rollout.prompts_per_step

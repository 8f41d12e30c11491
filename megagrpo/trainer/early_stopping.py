"""The rule that ends a run by its evaluations. Its state between them is part of the run's, and of each checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isnan
from typing import Any

from megagrpo.checkpoint.trainer_state import TrainerState
from megagrpo.data.cursor import Cursor
from megagrpo.errors import Problem, RecipeError
from megagrpo.recipe.schema import AnyRecipe, EarlyStoppingConfig, Recipe


def early_stopping(recipe: AnyRecipe) -> EarlyStoppingConfig | None:
    """Returns the recipe's rule; None if it has none."""
    return recipe.eval.early_stopping if isinstance(recipe, Recipe) else None


def after_evaluation(state: TrainerState, rule: EarlyStoppingConfig, metrics: Mapping[str, float]) -> TrainerState:
    """Returns the state after one more evaluation of the rule's set. A nan metric (every reward failed) is no new best.

    Raises RecipeError if the evaluation lacks the rule's metric.
    """
    if rule.metric not in metrics:
        needed = "one of " + ", ".join(sorted(metrics))
        raise RecipeError(Problem("eval.early_stopping.metric", given=rule.metric, needed=needed))
    value, best = metrics[rule.metric], state.best_evaluation
    if not isnan(value) and (best is None or value > best):
        return replace(state, best_evaluation=value, evaluations_without_best=0)
    return replace(state, evaluations_without_best=state.evaluations_without_best + 1)


def reason_to_stop(recipe: AnyRecipe, state: TrainerState, cursor: Cursor[Any]) -> str | None:
    """Returns the reason to end the run before its length, or None. A run that solves all of its prompts ends without
    an error: its model is evaluated, saved and exported like any other.
    """
    if cursor.exhausted:
        return "every prompt is set aside (data.no_resampling_pass_rate)"
    rule = early_stopping(recipe)
    return rule_met(rule, state) if rule else None


def rule_met(rule: EarlyStoppingConfig, state: TrainerState) -> str | None:
    """Returns the rule's reason to end the run now; None if it should continue."""
    best, without = state.best_evaluation, state.evaluations_without_best
    if rule.target is not None and best is not None and best >= rule.target:
        return f"{rule.metric} reached {best:g}, the target being {rule.target:g}"
    if rule.patience is not None and without >= rule.patience:
        return f"{rule.metric} has had no new best in {without} evaluations"
    return None

"""The rule that ends a run by its evaluations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isnan
from typing import Any

from megagrpo.checkpoint.trainer_state import TrainerState
from megagrpo.data.cursor import Cursor
from megagrpo.errors import Problem, RecipeError
from megagrpo.recipe import schema


@dataclass(frozen=True)
class EarlyStopping:
    """The rule, and its state between evaluations of its set (saved with each checkpoint)."""

    rule: schema.EarlyStoppingConfig
    best: float | None = None
    evaluations_without_best: int = 0

    @property
    def watched_set(self) -> str:
        return self.rule.metric.partition("/")[0]

    def after(self, metrics: Mapping[str, float]) -> EarlyStopping:
        """Returns the state after one more evaluation. A nan metric (every reward failed) is no new best.

        Raises RecipeError if the evaluation lacks the rule's metric.
        """
        if self.rule.metric not in metrics:
            needed = "one of " + ", ".join(sorted(metrics))
            raise RecipeError(Problem("eval.early_stopping.metric", given=self.rule.metric, needed=needed))
        value = metrics[self.rule.metric]
        if not isnan(value) and (self.best is None or value > self.best):
            return replace(self, best=value, evaluations_without_best=0)
        return replace(self, evaluations_without_best=self.evaluations_without_best + 1)

    def reason_to_stop(self) -> str | None:
        """Returns the reason to end the run now; None if it should continue."""
        rule = self.rule
        if rule.target is not None and self.best is not None and self.best >= rule.target:
            return f"{rule.metric} reached {self.best:g}, the target being {rule.target:g}"
        if rule.patience is not None and self.evaluations_without_best >= rule.patience:
            return f"{rule.metric} has had no new best in {self.evaluations_without_best} evaluations"
        return None


def early_stopping(recipe: schema.AnyRecipe, state: TrainerState) -> EarlyStopping | None:
    """Returns the recipe's rule in this state; None if it has none."""
    rule = recipe.eval.early_stopping if isinstance(recipe, schema.Recipe) else None
    return EarlyStopping(rule, state.best_evaluation, state.evaluations_without_best) if rule else None


def reason_to_stop(recipe: schema.AnyRecipe, state: TrainerState, cursor: Cursor[Any]) -> str | None:
    """Returns the reason to end the run before its length, or None. A run that solves all of its prompts ends without
    an error: its model is evaluated, saved and exported like any other.
    """
    if cursor.exhausted:
        return "every prompt is set aside (data.no_resampling_pass_rate)"
    early = early_stopping(recipe, state)
    return early.reason_to_stop() if early else None

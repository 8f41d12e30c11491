"""Rules, applied while a run trains, that warn or end it: those of report/rules.py, and eval.early_stopping."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isnan
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megagrpo.checkpoint.trainer_state import TrainerState
from megagrpo.data.cursor import Cursor
from megagrpo.errors import AlertError, Problem, RecipeError
from megagrpo.recipe.schema import AnyRecipe, EarlyStoppingConfig, Recipe
from megagrpo.recipe.schema.rollout import AlertName
from megagrpo.report.rules import RULES, WITH_INTERVAL
from megagrpo.report.run import read_run

READ = {name for rule in RULES.values() for name in rule.reads}


@dataclass(frozen=True)
class Raised:
    """The rules' result for a step. holding: number of rules that hold; lines: warnings of rules that newly hold;
    failure: the error of rules that end the run."""

    holding: int
    lines: tuple[str, ...] = ()
    failure: AlertError | None = None


class Alerts:
    """The metrics that rules read, of all steps so far."""

    def __init__(self, actions: Mapping[AlertName, Literal["warn", "stop", "off"]], directory: Path) -> None:
        """Reads the metrics that the run in `directory` has already logged in metrics.jsonl."""
        self._rules = {name: rule for name, rule in RULES.items() if actions.get(name) != "off"}
        self._stop = {name for name, action in actions.items() if action == "stop"}
        self._holding = set[AlertName]()
        before = read_run(directory)
        self._steps = before.steps
        self._series = {name: values for name, values in before.metrics.items() if _is_read(name)}

    def check(self, step: int, metrics: Mapping[str, float]) -> Raised:
        """Appends the step's metrics, evaluation included, and applies the rules. First drops the metrics of this step
        and of later ones, which a run repeats after a rewind."""
        count = int(np.searchsorted(self._steps, step))
        self._steps, nothing = np.append(self._steps[:count], step), np.full(count, np.nan)
        self._series = {
            name: np.append(self._series.get(name, nothing)[:count], metrics.get(name, np.nan))
            for name in {*self._series, *filter(_is_read, metrics)}
        }
        series = self._series
        holding = {name for name, rule in self._rules.items() if series and rule.holds(series)[-1]}
        begun, self._holding = sorted(holding - self._holding), holding
        lines = tuple(
            f"warning: step {step}: {RULES[name].title} ({name}). {RULES[name].meaning} {RULES[name].remedy}"
            for name in begun
            if name not in self._stop
        )
        ends = sorted(holding & self._stop)
        problems = [
            Problem(
                f"step {step}: {RULES[name].title}",
                RULES[name].meaning,
                "a run for which this rule does not hold",
                f"{RULES[name].remedy} To continue anyway: rollout.alerts.{name}: warn",
            )
            for name in ends
        ]
        return Raised(len(holding), lines, AlertError(problems) if problems else None)


def _is_read(metric: str) -> bool:
    return metric in READ or WITH_INTERVAL.fullmatch(metric) is not None


# --- early stopping ---------------------------------------------------------------------------------------------------


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

"""The rule that ends a run by its evaluations."""

import pytest

from megagrpo.checkpoint.trainer_state import TrainerState
from megagrpo.errors import RecipeError
from megagrpo.recipe import schema
from megagrpo.trainer.alerts import after_evaluation, rule_met


def stop_after(rule: schema.EarlyStoppingConfig, values: list[float]) -> tuple[int | None, TrainerState]:
    state = TrainerState(0, 0, {}, {})
    for i, value in enumerate(values):
        state = after_evaluation(state, rule, {"sums/mean@1": value})
        if rule_met(rule, state):
            return i, state
    return None, state


def test_a_run_stops_when_the_target_is_reached() -> None:
    rule = schema.EarlyStoppingConfig(metric="sums/mean@1", target=0.9)
    assert stop_after(rule, [0.5, 0.89, 0.9, 1.0])[0] == 2
    assert stop_after(rule, [0.5, float("nan")])[0] is None


def test_a_run_stops_after_patience_evaluations_without_a_new_best() -> None:
    rule = schema.EarlyStoppingConfig(metric="sums/mean@1", patience=2)
    assert stop_after(rule, [0.5, 0.4, 0.6, 0.6, float("nan"), 1.0])[0] == 4
    state = stop_after(rule, [0.5, 0.4, 0.6, 0.6, 0.7])[1]
    assert (state.best_evaluation, state.evaluations_without_best) == (0.7, 0)


def test_a_metric_that_does_not_exist_is_an_error_that_names_those_that_do() -> None:
    rule = schema.EarlyStoppingConfig(metric="sums/mean@8", target=1)
    with pytest.raises(RecipeError, match="sums/pass@1"):
        after_evaluation(TrainerState(0, 0, {}, {}), rule, {"sums/mean@1": 0.5, "sums/pass@1": 0.5})

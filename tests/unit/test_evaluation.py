"""Evaluation metrics against brute force, answers that vote, and early stopping."""

from itertools import combinations
from math import isnan
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megagrpo.errors import RecipeError
from megagrpo.recipe import schema
from megagrpo.recipe.schema.eval import evaluation_metric_names
from megagrpo.trainer.evaluation import EarlyStopping, any_answer, best_of, evaluation_metrics, majority, reading_of
from megagrpo.types import Group, Prompt, Sample, Score

SCORES = st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0]), min_size=1, max_size=7)


def group(values: list[float | None], *, texts: list[str] | None = None, source: str = "s", lengths: int = 3) -> Group:
    tokens = np.zeros(lengths, np.int32)
    samples = tuple(
        Sample("p", i, tokens, tokens, tokens, "length" if i == 0 else "stop", (texts or ["x"] * len(values))[i])
        for i in range(len(values))
    )
    scores = tuple(Score(value, error="" if value is not None else "timed out") for value in values)
    return Group(Prompt("p", (1,), source, ""), samples, scores)


@given(SCORES, st.data())
def test_pass_at_k_is_the_mean_best_of_all_subsets(scores: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(scores)))
    assert best_of(scores, k) == pytest.approx(fmean(max(subset) for subset in combinations(scores, k)))


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([0.0, 1.0])), min_size=1, max_size=6))
def test_majority_is_the_mean_over_uniform_tie_breaks(votes: list[tuple[str, float]]) -> None:
    answers = [answer for answer, _ in votes]
    most = max(answers.count(answer) for answer in answers)
    winners = sorted({answer for answer in answers if answers.count(answer) == most})
    expected = fmean(fmean(score for answer, score in votes if answer == winner) for winner in winners)
    assert majority([score for _, score in votes], answers) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("3 + 4 = 7\n#### 7", "7"),
        ("#### 1\nno, #### 1,250.00 \nthat is 9 more", "1250"),
        (r"so \boxed{\frac{1}{2}} of 8", r"\frac{1}{2}"),
        (r"\boxed{3,000} of 8", "3000"),
        (r"between \boxed{4 and 5", "5"),
        ("first 12, then -3.50", "-3.5"),
        ("$1,000", "1000"),
        ("it is 100", "100"),
        ("-0", "0"),
        ("  Paris. ", "Paris."),
        ("#### unknown", "#### unknown"),
        ("", ""),
    ],
)
def test_answers_are_found_and_numbers_compared_by_value(text: str, answer: str) -> None:
    assert any_answer(text) == answer


def test_answers_are_read_as_the_reward_reads_them() -> None:
    text = r"#### 5 and \boxed{6}, that is 7"
    given = {name: schema.RewardFunctionConfig(function=name) for name in ("format", "gsm8k", "math", "mine.py:mine")}
    readings = {name: reading_of([given["format"], function])(text) for name, function in given.items()}
    flexible = schema.RewardFunctionConfig(function="gsm8k", arguments={"method": "flexible"})
    assert readings == {"format": "5", "gsm8k": "5", "math": "6", "mine.py:mine": "5"}
    assert reading_of([flexible])(text) == "7"


def test_metrics_are_means_over_prompts() -> None:
    groups = [
        group([1.0, 0.0, 0.0, 1.0], texts=["7", "8", "9", "#### 7"]),
        group([0.0, 0.0, 0.0, 1.0], texts=["1", "1", "2", "3"], lengths=7),
    ]
    metrics = evaluation_metrics(groups, 4, any_answer)
    assert metrics == {
        "mean@4": pytest.approx(3 / 8),
        "pass@1": pytest.approx(3 / 8),
        "pass@2": pytest.approx((5 / 6 + 1 / 2) / 2),
        "pass@4": 1.0,
        "maj@4": 0.5,
        "reward/errors": 0.0,
        "response_tokens/mean": 5.0,
        "response_tokens/truncated_share": 0.25,
    }


def test_the_largest_k_is_the_number_of_samples_as_the_recipe_expects() -> None:
    assert evaluation_metric_names(6) == ["mean@6", "pass@1", "pass@2", "pass@4", "pass@6", "maj@6"]
    for samples in (1, 2, 6, 8):
        given = [name for name in evaluation_metrics([group([1.0] * samples)], samples, any_answer) if "@" in name]
        assert given == evaluation_metric_names(samples)


def test_data_sources_are_told_apart_when_there_are_several() -> None:
    metrics = evaluation_metrics(
        [group([1.0], source="a"), group([0.0], source="b"), group([1.0], source="b")], 1, any_answer
    )
    assert metrics["mean@1"] == pytest.approx(2 / 3)
    assert (metrics["a/mean@1"], metrics["b/mean@1"], metrics["b/maj@1"]) == (1.0, 0.5, 0.5)
    assert "s/mean@1" not in evaluation_metrics([group([1.0])], 1, any_answer)


def test_failed_rewards_are_counted_and_masked_never_zero() -> None:
    metrics = evaluation_metrics([group([1.0, None], texts=["7", "8"]), group([None, None])], 2, any_answer)
    assert (metrics["mean@2"], metrics["pass@1"], metrics["maj@2"]) == (1.0, 1.0, 1.0)
    assert isnan(metrics["pass@2"])
    assert metrics["reward/errors"] == 3


def stop_after(rule: schema.EarlyStoppingConfig, values: list[float]) -> tuple[int | None, EarlyStopping]:
    state = EarlyStopping(rule)
    for i, value in enumerate(values):
        state = state.after({"mean@1": value})
        if state.reason_to_stop():
            return i, state
    return None, state


def test_a_run_stops_when_the_target_is_reached() -> None:
    rule = schema.EarlyStoppingConfig(target=0.9)
    assert stop_after(rule, [0.5, 0.89, 0.9, 1.0])[0] == 2
    assert stop_after(rule, [0.5, float("nan")])[0] is None


def test_a_run_stops_after_patience_evaluations_without_a_new_best() -> None:
    rule = schema.EarlyStoppingConfig(patience=2)
    assert stop_after(rule, [0.5, 0.4, 0.6, 0.6, float("nan"), 1.0])[0] == 4
    assert stop_after(rule, [0.5, 0.4, 0.6, 0.6, 0.7])[1] == EarlyStopping(rule, best=0.7, evaluations_without_best=0)


def test_a_metric_that_does_not_exist_is_an_error_that_names_those_that_do() -> None:
    with pytest.raises(RecipeError, match="pass@1"):
        EarlyStopping(schema.EarlyStoppingConfig(metric="mean@8")).after(
            evaluation_metrics([group([1.0])], 1, any_answer)
        )

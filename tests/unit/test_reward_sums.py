"""A sample's outcomes as one score: weighted sums, gates, penalties, masks, and what counts as solved."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megagrpo.recipe import schema
from megagrpo.reward.functions import Outcome, function_specs
from megagrpo.reward.scorer import REACHED_LIMIT, overlong_penalty, shaped_score, solved_from, weighted_score
from megagrpo.trainer.step_metrics import rollout_metrics
from megagrpo.types import Group, Prompt, Score
from tests.unit.test_reward_scorer import reward_of, sample_of

LIMIT = 100


def format_function(**options):
    return {"function": "format", "arguments": {"pattern": "x"}, **options}


def scored(reward, *scores):
    outcomes = [score if isinstance(score, Outcome) else Outcome(score) for score in scores]
    specs = function_specs(reward)
    return weighted_score(specs, outcomes, solved_from(reward.solved_at, specs))


def shaped(reward, value, tokens=10, finish="stop"):
    return shaped_score(scored(reward, value), sample_of(tokens, finish), reward, LIMIT)


# --- gates ------------------------------------------------------------------------------------------------------------

NUMBERS = st.sampled_from([-3.0, -1.0, 0.0, 0.1, 0.5, 1.0, 2.0])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(NUMBERS, NUMBERS, st.booleans()), min_size=1, max_size=4), NUMBERS)
def test_what_waits_counts_where_the_weighted_sum_of_the_others_is_not_0(functions, solved_at):
    # open-instruct compares a scaled score with 1: with a scale of 2 every reward is 0.
    counts = {True: "when_others_score", False: "always"}
    reward = reward_of(*(format_function(weight=w, counts=counts[waits]) for w, _, waits in functions))
    always = sum(weight * score for weight, score, waits in functions if not waits)
    counted = tuple(0.0 if waits and always == 0 else score for _, score, waits in functions)
    found = scored(reward.model_copy(update={"solved_at": solved_at}), *(score for _, score, _ in functions))
    assert found.counted == counted
    assert found.value == pytest.approx(sum(w * score for (w, _, _), score in zip(functions, counted, strict=True)))
    assert found.solved == (found.value >= solved_at)
    assert list(found.parts.values()) == [score for _, score, _ in functions]


@pytest.mark.parametrize(
    ("functions", "gated"),
    [
        ([{"function": "gsm8k"}, format_function()], (False, True)),
        ([format_function(), {"function": "math"}, format_function()], (True, False, True)),
        ([{"function": "gsm8k"}, format_function(counts="always")], (False, False)),
        ([format_function()], (False,)),
        ([format_function(), format_function(counts="always")], (True, False)),
        ([{"function": "gsm8k", "counts": "when_others_score"}, format_function()], (True, False)),
        ([{"function": "a.py:f", "counts": "when_others_score"}, {"function": "gsm8k"}], (True, False)),
        ([{"function": "a.py:format"}, {"function": "gsm8k"}], (False, False)),
    ],
)
def test_format_beside_others_waits_for_them_unless_told_otherwise(functions, gated):
    assert tuple(spec.gated for spec in function_specs(reward_of(*functions))) == gated


def test_a_function_that_fails_masks_the_sample_even_behind_a_shut_gate():
    score = scored(reward_of({"function": "gsm8k"}, format_function()), 0.0, Outcome(None, error="took too long"))
    assert score == Score(None, {"gsm8k": 0.0}, error="format: took too long")


def test_a_sum_that_is_not_finite_is_an_error():
    score = scored(reward_of({"function": "gsm8k", "weight": 1e9}), 1e300)
    assert (score.value, score.error) == (None, "the weighted sum is inf")


def test_unless_told_otherwise_only_full_marks_of_every_function_are_solved():
    reward = reward_of(format_function(counts="always", weight=0.2), {"function": "gsm8k"}, {"function": "math"})
    assert [scored(reward, *marks).solved for marks in [(1, 1, 1), (1, 1, 0), (0, 1, 1)]] == [True, False, False]
    three_tenths = reward_of(*({"function": "gsm8k", "weight": weight} for weight in (0.1, 0.2)))
    assert scored(three_tenths, 1, 1).solved


def test_scores_that_differ_by_rounding_are_equal():
    twice = reward_of({"function": "gsm8k", "weight": 0.1}, {"function": "gsm8k", "weight": 0.2})
    assert scored(twice, 1.0, 1.0).value == 0.3 == scored(reward_of(), 0.1 + 0.2).value
    assert scored(reward_of(), 0.1 + 0.2).counted == (0.3,)


# --- penalties and masks ----------------------------------------------------------------------------------------------


OVERLONG = {"overlong": {"buffer_tokens": 20, "penalty": 2.0}}


@pytest.mark.parametrize(
    ("options", "tokens", "finish", "value"),
    [
        *((OVERLONG, tokens, "stop", 1.0) for tokens in (0, 80)),
        *((OVERLONG, tokens, "stop", value) for tokens, value in ((81, 0.9), (90, 0.0), (95, -0.5))),
        *((OVERLONG, tokens, "stop", -1.0) for tokens in (100, 140)),
        ({"non_stop_score": -0.5}, 100, "length", -0.5),
        ({"non_stop_score": -0.5}, 100, "stop", 1.0),
        ({"non_stop_score": -0.5} | OVERLONG, 100, "length", -2.5),
        ({"truncated": "mask"}, 100, "length", None),
        ({"truncated": "mask"}, 100, "stop", 1.0),
        ({}, 100, "length", 1.0),
    ],
)
def test_training_makes_of_a_right_response_what_the_recipe_says_and_it_stays_solved(options, tokens, finish, value):
    score = shaped(reward_of(**options), 1.0, tokens, finish)
    masked = value is None
    assert score.value == (None if masked else pytest.approx(value))
    assert (score.masked, score.error, score.solved) == (REACHED_LIMIT if masked else "", "", True)
    assert score.counted == (() if masked else (1.0,))
    penalty = {"overlong": overlong_penalty(tokens, schema.OverlongConfig(**OVERLONG["overlong"]), LIMIT)}
    assert score.parts == {"gsm8k": 1.0} | (penalty if "overlong" in options else {})


def test_a_failed_score_is_not_shaped():
    failed = Score(None, error="gsm8k: x")
    assert shaped_score(failed, sample_of(100, "length"), reward_of(truncated="mask", **OVERLONG), LIMIT) == failed


def test_metrics_count_masked_samples_apart_from_errors():
    masked = Score(None, masked=REACHED_LIMIT, solved=True)
    scores = (Score(1.0, solved=True), masked, Score(None, error="x"), Score(0.0))
    metrics = rollout_metrics([Group(Prompt("a:0", (1,), "sums", "7"), (sample_of(),) * 4, scores)])
    assert (metrics["reward/errors"], metrics["reward/truncated_masked"], metrics["reward/solved_share"]) == (1, 1, 0.5)
    assert metrics["reward/mean"] == 0.5

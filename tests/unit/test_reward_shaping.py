"""Gates, penalties and masks, with figures worked out by hand; and where others are defective."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megagrpo.recipe import schema
from megagrpo.reward.functions import Outcome, function_specs
from megagrpo.reward.scorer import (
    REACHED_LIMIT,
    gated_functions,
    overlong_penalty,
    shaped_score,
    weighted_score,
)
from megagrpo.trainer.step_metrics import rollout_metrics
from megagrpo.types import Group, Prompt, Sample, Score

LIMIT = 100


def reward_of(*functions, **options):
    return schema.RewardConfig.model_validate({"functions": list(functions) or [{"function": "gsm8k"}], **options})


def format_function(**options):
    return {"function": "format", "arguments": {"pattern": "x"}, **options}


def sample_of(tokens=10, finish="stop"):
    return Sample("a:0", 0, np.zeros(tokens, np.int32), np.zeros(tokens), np.zeros(tokens), finish, "")


def scored(reward, *scores):
    outcomes = [score if isinstance(score, Outcome) else Outcome(score) for score in scores]
    return weighted_score(function_specs(reward), gated_functions(reward.functions), outcomes, reward.solved_at)


def shaped(reward, value, tokens=10, finish="stop"):
    return shaped_score(scored(reward, value), sample_of(tokens, finish), reward, LIMIT)


# Gates.


@pytest.mark.parametrize("weight", [1.0, 2.0, 0.1, -3.0])
def test_format_counts_only_where_the_task_gave_something_whatever_its_scale(weight):
    # open-instruct compares a scaled score with 1: with a scale of 2 every reward is 0.
    reward = reward_of({"function": "gsm8k", "weight": weight}, format_function(weight=0.5))
    right, wrong = scored(reward, 1.0, 1.0), scored(reward, 0.0, 1.0)
    assert (right.value, right.counted) == (weight + 0.5, (1.0, 1.0))
    assert (wrong.value, wrong.counted, wrong.parts["format"]) == (0.0, (0.0, 0.0), 1.0)


def test_the_task_score_counts_without_the_format():
    # In open-instruct it is the other way round: without the format a right answer earns nothing.
    assert scored(reward_of({"function": "gsm8k"}, format_function()), 1.0, 0.0).value == 1.0


def test_a_gate_asks_for_the_weighted_sum_of_all_that_always_count():
    task, cost = {"function": "gsm8k", "weight": 1.0}, {"function": "a.py:cost", "weight": -2.0}
    score = scored(reward_of(task, cost, format_function()), 2.0, 1.0, 1.0)
    assert (score.value, score.counted) == (0.0, (2.0, 1.0, 0.0))


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
    assert gated_functions(reward_of(*functions).functions) == gated


def test_a_function_that_fails_masks_the_sample_even_behind_a_shut_gate():
    score = scored(reward_of({"function": "gsm8k"}, format_function()), 0.0, Outcome(None, error="took too long"))
    assert (score.value, score.error, score.parts, score.solved) == (
        None,
        "format: took too long",
        {"gsm8k": 0.0},
        False,
    )


def test_a_sum_that_is_not_finite_is_an_error():
    score = scored(reward_of({"function": "gsm8k", "weight": 1e308}), 100.0)
    assert (score.value, score.error) == (None, "the weighted sum is inf")


@pytest.mark.parametrize(("solved_at", "solved"), [(1.0, True), (1.5, True), (1.6, False)])
def test_solved_is_of_the_weighted_sum(solved_at, solved):
    reward = reward_of({"function": "gsm8k"}, format_function(weight=0.5), solved_at=solved_at)
    assert scored(reward, 1.0, 1.0).solved == solved


# Penalties and masks.


@pytest.mark.parametrize(
    ("tokens", "penalty"), [(0, 0.0), (80, 0.0), (81, -0.1), (90, -1.0), (95, -1.5), (100, -2.0), (140, -2.0)]
)
def test_the_penalty_for_length_grows_over_the_buffer(tokens, penalty):
    overlong = schema.OverlongConfig(buffer_tokens=20, penalty=2.0)
    assert overlong_penalty(tokens, overlong, LIMIT) == pytest.approx(penalty)
    score = shaped(reward_of(overlong={"buffer_tokens": 20, "penalty": 2.0}), 1.0, tokens)
    assert (score.value, score.parts["overlong"]) == (pytest.approx(1 + penalty), pytest.approx(penalty))
    assert score.solved


@given(st.integers(0, 100_000), st.integers(1, LIMIT), st.sampled_from([0.25, 1.0, 8.0]))
def test_the_penalty_for_length_is_never_a_bonus_and_never_more_than_it_says(tokens, buffer, penalty):
    # open-instruct's rewards for length fall without end: -0.19 at 40,000 tokens.
    found = overlong_penalty(tokens, schema.OverlongConfig(buffer_tokens=buffer, penalty=penalty), LIMIT)
    assert -penalty <= found <= 0
    assert overlong_penalty(tokens + 1, schema.OverlongConfig(buffer_tokens=buffer, penalty=penalty), LIMIT) <= found


def test_a_response_without_a_stop_has_its_own_score_and_is_still_solved():
    reward = reward_of(non_stop_score=-0.5)
    truncated, whole = shaped(reward, 1.0, 100, "length"), shaped(reward, 1.0, 100, "stop")
    assert (truncated.value, truncated.solved, truncated.parts) == (-0.5, True, {"gsm8k": 1.0})
    assert (whole.value, whole.solved) == (1.0, True)


def test_the_penalty_for_length_comes_on_top_of_the_score_for_not_stopping():
    reward = reward_of(non_stop_score=-0.5, overlong={"buffer_tokens": 10})
    assert shaped(reward, 1.0, 100, "length").value == -1.5


def test_masking_truncated_responses_is_no_error():
    reward = reward_of(truncated="mask")
    masked, whole = shaped(reward, 1.0, 100, "length"), shaped(reward, 1.0, 100)
    assert (masked.value, masked.masked, masked.error, masked.solved) == (None, REACHED_LIMIT, "", True)
    assert (whole.value, whole.masked) == (1.0, "")
    assert (masked.counted, whole.counted) == ((), (1.0,))


def test_a_failed_reward_stays_an_error_whatever_the_shaping():
    reward = reward_of(truncated="mask", overlong={"buffer_tokens": 10})
    failed = Score(None, error="gsm8k: took too long")
    assert shaped_score(failed, sample_of(100, "length"), reward, LIMIT) == failed


def test_without_shaping_nothing_changes():
    score = scored(reward_of(), 1.0)
    assert shaped_score(score, sample_of(100, "length"), reward_of(), LIMIT) == score


def test_metrics_count_masked_samples_apart_from_errors():
    scores = (
        Score(1.0, solved=True),
        Score(None, masked=REACHED_LIMIT, solved=True),
        Score(None, error="x"),
        Score(0.0),
    )
    group = Group(Prompt("a:0", (1,), "sums", "7"), (sample_of(),) * 4, scores)
    metrics = rollout_metrics([group])
    assert (metrics["reward/errors"], metrics["reward/truncated_masked"], metrics["reward/solved_share"]) == (1, 1, 0.5)
    assert metrics["reward/mean"] == 0.5

"""Advantages of single tokens against recursions and sums written out response by response."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megagrpo.algorithm.advantages import AdvantageInputs, compute_advantages, discounted_sums, whitened
from megagrpo.algorithm.ragged import Ragged
from tests.methods import advantage

NAN = np.nan

numbers = st.integers(-64, 64).map(lambda n: n / 16)
tokens = st.lists(st.tuples(numbers, numbers), min_size=0, max_size=6)
responses = st.lists(st.tuples(st.one_of(st.just(NAN), numbers), tokens), min_size=1, max_size=8)


def ragged(rows):
    return Ragged(
        np.array([value for row in rows for value in row], float), np.cumsum([0, *map(len, rows)], dtype=np.int64)
    )


def inputs_of(step, coefficient=0.25):
    return AdvantageInputs(
        scores=np.array([score for score, _ in step]),
        group_ids=np.zeros(len(step), int),
        tokens=np.array([len(row) for _, row in step]),
        kl=ragged([[kl for kl, _ in row] for _, row in step]),
        kl_coefficient=coefficient,
        values=ragged([[value for _, value in row] for _, row in step]),
    )


def rewards_of(score, row, coefficient=0.25):
    rewards = [-coefficient * kl for kl, _ in row]
    if rewards:
        rewards[-1] += score
    return rewards


def whiten_all(rows, known):
    """Over the tokens of known rows together; None where a row is masked."""
    everything = [value for row, of_step in zip(rows, known, strict=True) if of_step for value in row]
    if len(everything) < 2:
        return [[0.0] * len(row) for row in rows]
    mean, deviation = np.mean(everything), np.sqrt(np.var(everything, ddof=1) + 1e-8)
    return [
        [(value - mean) / deviation if of_step else 0.0 for value in row]
        for row, of_step in zip(rows, known, strict=True)
    ]


@settings(max_examples=200)
@given(responses, st.sampled_from([1.0, 0.9, 0.25]))
def test_reinforce_plus_plus_is_whitened_rewards_to_come(step, discount):
    found = compute_advantages(inputs_of(step), advantage(name="reinforce_plus_plus", discount=discount))
    to_come = []
    for score, row in step:
        rewards = rewards_of(score, row)
        to_come.append(
            [sum(discount ** (s - t) * rewards[s] for s in range(t, len(rewards))) for t in range(len(rewards))]
        )
    expected = whiten_all(to_come, [not np.isnan(score) for score, _ in step])
    np.testing.assert_allclose(found.of_tokens.values, ragged(expected).values, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(found.of_rows, [np.mean(row) if row else 0 for row in expected], rtol=1e-6, atol=1e-7)
    assert found.returns is None


@settings(max_examples=200)
@given(responses, st.sampled_from([1.0, 0.9]), st.sampled_from([1.0, 0.95, 0.25]))
def test_gae_is_the_weighted_sum_of_td_errors(step, discount, trace):
    found = compute_advantages(inputs_of(step), advantage(name="gae", discount=discount, trace=trace))
    advantages, returns = [], []
    for score, row in step:
        rewards, values = rewards_of(score, row), [value for _, value in row]
        after = [*values, 0.0][1:]
        errors = [r + discount * later - v for r, later, v in zip(rewards, after, values, strict=True)]
        advantages.append(
            [sum((discount * trace) ** (s - t) * errors[s] for s in range(t, len(row))) for t in range(len(row))]
        )
        returns.append([0.0 if np.isnan(score) else a + v for a, v in zip(advantages[-1], values, strict=True)])
    expected = whiten_all(advantages, [not np.isnan(score) for score, _ in step])
    np.testing.assert_allclose(found.of_tokens.values, ragged(expected).values, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(found.returns.values, ragged(returns).values, atol=1e-12)
    np.testing.assert_array_equal(found.returns.offsets, inputs_of(step).values.offsets)


def test_gae_with_a_trace_of_one_learns_the_rewards_to_come_and_with_less_leans_on_the_next_estimates():
    step = [(1.0, [(0.0, 0.3), (0.0, 0.5), (0.0, 0.9)]), (0.0, [(0.0, -0.2)])]
    whole = compute_advantages(inputs_of(step), advantage(name="gae", trace=1.0))
    half = compute_advantages(inputs_of(step), advantage(name="gae", trace=0.5))
    np.testing.assert_allclose(whole.returns.values, [1, 1, 1, 0], atol=1e-12)
    # Backwards: 1; half 0.9 and half 1; half 0.5 and half what came before.
    np.testing.assert_allclose(half.returns.values, [0.725, 0.95, 1, 0], atol=1e-12)


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "gae"])
def test_masked_responses_change_nothing_and_may_lack_their_tokens(name):
    step = [(1.0, [(0.5, 0.25), (0.0, 0.5)]), (NAN, [(7.0, 9.0)] * 3), (0.0, [(0.25, 0.125)])]
    found = compute_advantages(inputs_of(step), advantage(name=name))
    alone = compute_advantages(inputs_of([step[0], step[2]]), advantage(name=name))
    np.testing.assert_array_equal(found.of_tokens.row(1), [0, 0, 0])
    np.testing.assert_array_equal(found.of_rows, [alone.of_rows[0], 0, alone.of_rows[1]])
    for found_row, alone_row in ((0, 0), (2, 1)):
        np.testing.assert_array_equal(found.of_tokens.row(found_row), alone.of_tokens.row(alone_row))

    without = [step[0], (NAN, []), step[2]]
    numbers_of = inputs_of(without)
    lacking = AdvantageInputs(
        numbers_of.scores, np.zeros(3, int), np.array([2, 3, 1]), kl=numbers_of.kl, kl_coefficient=0.25,
        values=numbers_of.values,
    )  # fmt: skip
    again = compute_advantages(lacking, advantage(name=name))
    np.testing.assert_array_equal(again.of_tokens.values, found.of_tokens.values)


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "gae"])
def test_a_scored_response_must_have_all_its_tokens(name):
    inputs = inputs_of([(1.0, [(0.5, 0.25), (0.0, 0.5)])])
    short = AdvantageInputs(inputs.scores, inputs.group_ids, np.array([3]), kl=inputs.kl, values=inputs.values)
    with pytest.raises(ValueError, match="3"):
        compute_advantages(short, advantage(name=name))


def test_equal_scores_are_exactly_zero():
    step = [(0.1, [(0.0, 0.0)] * length) for length in (3, 1, 4, 2)]
    found = compute_advantages(inputs_of(step), advantage(name="reinforce_plus_plus"))
    np.testing.assert_array_equal(found.of_tokens.values, np.zeros(10))
    np.testing.assert_array_equal(found.of_rows, np.zeros(4))


def test_discounted_sums_of_long_responses_keep_to_their_rows():
    lengths = np.array([1000, 0, 1, 700])
    values = Ragged(np.ones(lengths.sum()), np.concatenate([[0], np.cumsum(lengths)]))
    sums = discounted_sums(values, 0.5)
    np.testing.assert_allclose([sums.row(r)[0] for r in (0, 2, 3)], [2, 1, 2])
    np.testing.assert_allclose(discounted_sums(values, 1.0).row(3), np.arange(700, 0, -1))


def test_whitening_counts_each_value_for_its_tokens():
    values, counts = np.array([2.0, 5.0, 100.0]), np.array([3, 1, 0])
    found = whitened(values, counts)
    every = np.array([2.0, 2.0, 2.0, 5.0])
    np.testing.assert_allclose(found, [*((every - every.mean()) / every.std(ddof=1))[[0, 3]], 0.0], rtol=1e-8)
    np.testing.assert_array_equal(whitened(np.array([0.1] * 7 + [NAN]), np.array([1] * 7 + [0])), np.zeros(8))
    np.testing.assert_array_equal(whitened(np.array([3.0]), np.array([1])), [0.0])

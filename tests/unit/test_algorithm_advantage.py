"""Advantages of whole responses against the formulas written out group by group, and what they must not depend on."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megagrpo.algorithm.advantages import (
    AdvantageConfig,
    AdvantageInputs,
    compute_advantages,
    groups_that_teach,
    groups_with_signal,
)
from megagrpo.algorithm.ragged import Ragged, ragged_zeros
from tests.methods import advantage, names

NAN = np.nan
WEIGHTS = np.array([1.0, 0.5])
BY_GROUP = [name for name in names(AdvantageConfig) if name not in ("gae", "remax", "reinforce_plus_plus")]
SCALED = ("grpo", "gdpo", "pass_k")
WHITENED = ("reinforce_plus_plus_baseline", "gdpo")

sixteenths = st.integers(-160, 160).map(lambda n: n / 16)
rows = st.tuples(st.one_of(st.just(NAN), sixteenths), sixteenths, st.integers(0, 4), st.integers(1, 9))
steps = st.lists(rows, min_size=1, max_size=30).map(
    lambda step: tuple(np.array(column) for column in zip(*step, strict=True))
)


def advantages_of(name, scores, ids, tokens=None, second=None, kl=None, coefficient=0.0, **options):
    scores, ids = np.asarray(scores, float), np.asarray(ids)
    tokens = np.ones(len(scores), int) if tokens is None else np.asarray(tokens)
    parts = np.stack([scores, scores if second is None else second], 1) if name == "gdpo" else None
    inputs = AdvantageInputs(scores, ids, tokens, parts, WEIGHTS, kl=kl, kl_coefficient=coefficient)
    options = options if name in SCALED else {}
    result = compute_advantages(inputs, advantage(name=name, **options))
    assert (result.of_tokens, result.returns) == (None, None)
    return result.of_rows


# The formulas, with loops over groups.


def spread(values, deviation, epsilon):
    return 1.0 if deviation == "none" else np.std(values, ddof=deviation == "sample") + epsilon


def group_formula(name, values, tokens, deviation, epsilon):
    """Of one group with two scored samples or more, before anything that is over the whole step."""
    n, mean = len(values), values.mean()
    if name == "grpo":
        return (values - mean) / spread(values, deviation, epsilon)
    if name == "rloo":
        return np.array([values[i] - np.delete(values, i).mean() for i in range(n)])
    if name == "opo":
        return values - np.average(values, weights=tokens)
    if name == "pass_k":
        second, best = np.sort(values)[-2:]
        gain = (best - second) / spread(values, deviation, epsilon)
        return np.array([gain if value == best else 0.0 for value in values])
    return values - mean


def whiten(values, tokens):
    every_token = np.repeat(values, tokens)
    if len(every_token) < 2:
        return np.zeros_like(values)
    return (values - every_token.mean()) / np.sqrt(every_token.var(ddof=1) + 1e-8)


def one_group_at_a_time(name, scores, second, ids, tokens, deviation="sample", epsilon=1e-6):
    result, compared, alike, scored = np.zeros(len(scores)), [], 0, 0
    for group in set(ids.tolist()):
        members = [i for i in range(len(scores)) if ids[i] == group and not np.isnan(scores[i])]
        scored += len(members)
        if len(members) < 2 or len(set(scores[members])) == 1:
            alike += len(members)
        if len(members) < 2:
            continue
        compared += members
        if name == "gdpo":
            result[members] = sum(
                weight * group_formula("grpo", part[members], tokens[members], deviation, epsilon)
                for weight, part in zip(WEIGHTS, (scores, second), strict=True)
            )
        else:
            result[members] = group_formula(name, scores[members], tokens[members], deviation, epsilon)
    if name in WHITENED and compared:
        result[compared] = whiten(result[compared], tokens[compared])
    if name == "gpg" and alike < scored:
        result *= scored / (scored - alike)
    return result


@settings(max_examples=300)
@given(steps, st.sampled_from(sorted(BY_GROUP)), st.sampled_from(["sample", "population", "none"]))
def test_every_method_matches_its_formula_written_by_group(step, name, deviation):
    scores, second, ids, tokens = step
    found = advantages_of(name, scores, ids, tokens, second, standard_deviation=deviation, epsilon=0.01)
    expected = one_group_at_a_time(name, scores, second, ids, tokens, deviation, epsilon=0.01)
    np.testing.assert_allclose(found, expected, rtol=1e-7, atol=1e-7)


@settings(max_examples=200)
@given(steps, st.sampled_from(sorted(BY_GROUP)), st.randoms(use_true_random=False))
def test_order_and_names_of_groups_do_not_matter(step, name, random):
    scores, second, ids, tokens = step
    base = advantages_of(name, scores, ids, tokens, second)
    order = list(range(len(scores)))
    random.shuffle(order)
    shuffled = advantages_of(name, scores[order], 100 - 7 * ids[order], tokens[order], second[order])
    np.testing.assert_allclose(shuffled, base[order], atol=1e-9)


@settings(max_examples=200)
@given(steps, st.sampled_from(sorted(BY_GROUP)), st.integers(-4, 4), st.sampled_from([0.25, 2.0, 8.0]))
def test_shifted_scores_change_nothing_and_scaled_ones_only_what_is_not_normalised(step, name, shift, scale):
    scores, second, ids, tokens = step
    base = advantages_of(name, scores, ids, tokens, second, epsilon=0.0)
    moved = advantages_of(name, scores * scale + shift, ids, tokens, second * scale + shift, epsilon=0.0)
    scaled = scale if name in ("rloo", "opo", "gpg") else 1.0
    tolerance = 1e-5 if name in WHITENED else 1e-9  # the whitening adds 1e-8 to a variance
    np.testing.assert_allclose(moved, base * scaled, rtol=tolerance, atol=1e-9)


@settings(max_examples=200)
@given(steps, st.sampled_from(sorted(BY_GROUP)))
def test_masked_samples_and_single_ones_get_zero_and_change_nothing_for_the_others(step, name):
    scores, second, ids, tokens = step
    found = advantages_of(name, scores, ids, tokens, second)
    known = ~np.isnan(scores)
    sizes = np.array([np.sum(known & (ids == group)) for group in ids])
    left = known & (sizes > 1)
    assert np.isfinite(found).all()
    assert not found[~left].any()
    if left.any():
        alone = advantages_of(name, scores[left], ids[left], tokens[left], second[left])
        # gpg's alpha counts all scored samples, single ones too.
        expected = alone * known.sum() / left.sum() if name == "gpg" else alone
        np.testing.assert_allclose(found[left], expected, atol=1e-12)


@pytest.mark.parametrize("name", BY_GROUP)
@pytest.mark.parametrize("epsilon", [0.0, 1e-6])
def test_equal_scores_are_exactly_zero_although_their_mean_is_not_exact(name, epsilon):
    scores, ids, tokens = np.array([0.1] * 7 + [0.7] * 3), np.array([0] * 7 + [1] * 3), np.arange(3, 13)
    assert scores[:7].mean() != 0.1
    found = advantages_of(name, scores, ids, tokens, scores * 3, epsilon=epsilon)
    np.testing.assert_array_equal(found, np.zeros(10))
    assert len(groups_with_signal(found, ids)) == 0


# Figures worked out by hand, which verl 0.9.1 gives too.


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("grpo", {"epsilon": 0.0}, [-0.5, 1.5, -0.5, -0.5]),  # mean 1/4, deviation sqrt((3 x 1/16 + 9/16) / 3) = 1/2
        ("grpo", {"epsilon": 0.5}, [-0.25, 0.75, -0.25, -0.25]),
        ("grpo", {"standard_deviation": "none"}, [-0.25, 0.75, -0.25, -0.25]),
        ("rloo", {}, [-1 / 3, 1, -1 / 3, -1 / 3]),
        ("opo", {}, [-0.4, 0.6, -0.4, -0.4]),  # 4 of the group's 10 tokens are those of the one that is right
        ("pass_k", {"epsilon": 0.0}, [0, 2, 0, 0]),
        ("pass_k", {"standard_deviation": "none"}, [0, 1, 0, 0]),
    ],
)
def test_one_right_of_four(name, options, expected):
    found = advantages_of(name, [0, 1, 0, 0], [5, 5, 5, 5], [3, 4, 1, 2], **options)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_population_deviation_is_what_open_instruct_divides_by():
    found = advantages_of("grpo", [0, 1, 0, 1], [0] * 4, epsilon=0.0, standard_deviation="population")
    np.testing.assert_allclose(found, [-1, 1, -1, 1])


def test_opo_gives_the_baseline_of_least_variance_if_gradients_grow_with_length():
    scores, tokens = np.array([0.0, 1.0, 0.5]), np.array([1, 10, 4])
    baseline = (scores - advantages_of("opo", scores, [0, 0, 0], tokens))[0]
    candidates = np.linspace(-1, 2, 3001)
    variances = [(tokens * (scores - candidate) ** 2).sum() for candidate in candidates]
    assert baseline == pytest.approx(candidates[np.argmin(variances)], abs=1e-3)


def test_gpg_makes_up_for_the_groups_without_a_gradient():
    # Three prompts of two: one is all right, one all wrong. Of 6 samples 2 have a gradient.
    found = advantages_of("gpg", [1, 1, 0, 0, 1, 0], [0, 0, 1, 1, 2, 2])
    np.testing.assert_allclose(found, [0, 0, 0, 0, 3 * 0.5, 3 * -0.5])


def test_gpg_counts_groups_where_verl_counts_scores_that_are_not_zero():
    # There alpha is 6 / 3, for the samples of score 1; it changes when every score is shifted.
    plain, shifted = (
        advantages_of("gpg", np.array([1, 1, 0, 0, 1, 0]) + shift, [0, 0, 1, 1, 2, 2]) for shift in (0, 9)
    )
    np.testing.assert_allclose(plain, shifted)


def test_reinforce_plus_plus_baseline_weighs_by_tokens():
    # R - mean is ±1/2 with 1 and 3 tokens: the mean is -1/4, the variance (9/16 + 3/16) / 3 = 1/4.
    found = advantages_of("reinforce_plus_plus_baseline", [1, 0], [0, 0], [1, 3])
    np.testing.assert_allclose(found, [1.5, -0.5], rtol=1e-7)


def test_gdpo_tells_apart_what_sums_alike():
    # (1, 0) and (0, 1) sum to 1 both, and a second pair makes the whitening count for something.
    ids, scores = np.array([0, 0, 1, 1]), np.array([1.0, 1.0, 1.0, 0.0])
    parts = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 0.0]])
    inputs = AdvantageInputs(scores, ids, np.ones(4, int), parts, np.array([1.0, 0.5]))
    found = compute_advantages(inputs, advantage(name="gdpo", epsilon=0.0)).of_rows
    unit = np.sqrt(0.5)
    raw = unit * np.array([1 - 0.5, -1 + 0.5, 1, -1])
    np.testing.assert_allclose(found, raw / np.sqrt((raw**2).sum() / 3), rtol=1e-6)
    assert not compute_advantages(inputs, advantage()).of_rows[:2].any()
    np.testing.assert_array_equal(groups_that_teach(inputs, advantage()), [1])
    np.testing.assert_array_equal(groups_that_teach(inputs, advantage(name="gdpo")), [0, 1])
    masked = AdvantageInputs(
        np.array([1.0, 1.0, NAN]), np.zeros(3, int), np.ones(3, int), np.array([[1.0], [1.0], [5.0]]), np.ones(1)
    )
    assert not len(groups_that_teach(masked, advantage(name="gdpo")))


# Where others are defective, we differ.


@pytest.mark.parametrize("name", BY_GROUP)
def test_a_sample_alone_in_its_group_has_nothing_to_be_compared_with(name):
    # In verl a single sample keeps its raw score in grpo, rloo, opo, gpg and reinforce_plus_plus_baseline.
    found = advantages_of(name, [3.0, NAN, 9.0, 0.0, 1.0], [0, 1, 1, 2, 2])
    np.testing.assert_array_equal(found[:3], [0, 0, 0])
    assert found[4] > 0


def test_masking_never_merges_prompts():
    # open-instruct leaves truncated samples out and reshapes: here prompts 0 and 1 would become one group of four.
    scores, ids = [NAN, NAN, 0.0, 1.0, 5.0, 6.0, NAN, NAN], [0, 0, 0, 0, 1, 1, 1, 1]
    found = advantages_of("grpo", scores, ids, standard_deviation="none")
    np.testing.assert_allclose(found, [0, 0, -0.5, 0.5, -0.5, 0.5, 0, 0])


def test_a_group_with_two_best_answers_teaches_pass_k_nothing():
    scores, ids = np.array([1.0, 1, 0, 0, 0, 1, NAN, 0]), np.repeat([0, 1], 4)
    np.testing.assert_array_equal(advantages_of("pass_k", scores, ids)[:4], [0, 0, 0, 0])
    inputs = AdvantageInputs(scores, ids, np.ones(8, int))
    np.testing.assert_array_equal(groups_that_teach(inputs, advantage(name="pass_k")), [1])


# The reward less KL, ReMax, and the names of groups.


def test_kl_in_the_reward_is_subtracted_by_response_before_anything_else():
    kl = Ragged(np.array([0.5, 0.5, 9.0, 2.0, -1.0]), np.array([0, 2, 3, 3, 5]))  # the third row is masked: no tokens
    found = advantages_of("rloo", [1, 0, NAN, 0], [0, 0, 0, 0], [2, 1, 4, 2], kl=kl, coefficient=0.1)
    expected = advantages_of("rloo", [0.9, -0.9, NAN, -0.1], [0, 0, 0, 0])
    np.testing.assert_allclose(found, expected)
    with pytest.raises(ValueError, match="tokens"):
        advantages_of("rloo", [1, 0, 0, 0], [0, 0, 0, 0], [2, 1, 4, 2], kl=kl, coefficient=0.1)


def test_remax_subtracts_the_score_of_the_greedy_response():
    inputs = AdvantageInputs(
        np.array([1.0, NAN, 0.25, 1.0]),
        np.array([7, 3, 3, 5]),
        np.array([1, 1, 1, 1]),
        baselines=np.array([1.0, NAN, 0.5]),
    )
    found = compute_advantages(inputs, advantage(name="remax")).of_rows
    np.testing.assert_array_equal(found, [0.5, 0, -0.75, 0])  # the greedy response of prompt 5 has no score


def test_only_methods_that_compare_samples_are_by_group():
    assert [name for name in names(AdvantageConfig) if advantage(name=name).by_group] == BY_GROUP


def test_groups_with_signal_names_the_groups_that_differ():
    ids, scores = np.array([5, 9, 5, 2, 9, 2, 4, 4]), np.array([1.0, 0.0, 1.0, 0.0, 1.0, 1.0, NAN, 3.0])
    np.testing.assert_array_equal(groups_with_signal(advantages_of("grpo", scores, ids), ids), [2, 9])
    inputs = AdvantageInputs(scores, ids, np.ones(8, int))
    np.testing.assert_array_equal(groups_that_teach(inputs, advantage()), [2, 9])


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("grpo", {"tokens": np.ones(3, int)}),
        ("gdpo", {}),
        ("gdpo", {"parts": np.zeros((2, 1)), "weights": np.ones(1), "kl": ragged_zeros([1, 1])}),
        ("remax", {}),
        ("remax", {"baselines": np.zeros(2)}),
        ("gae", {}),
    ],
)
def test_missing_inputs_are_refused(name, more):
    inputs = {"scores": np.zeros(2), "group_ids": np.zeros(2, int), "tokens": np.ones(2, int)} | more
    with pytest.raises(ValueError):
        compute_advantages(AdvantageInputs(**inputs), advantage(name=name))

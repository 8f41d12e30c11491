"""Advantages against the formula written out per group, and what they must not depend on."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megagrpo.algorithm.advantage import groups_with_signal, grpo_advantages, penalized_scores

scores_and_groups = st.lists(
    st.tuples(st.one_of(st.just(np.nan), st.floats(-10, 10)), st.integers(0, 4)), min_size=1, max_size=30
).map(lambda rows: (np.array([r[0] for r in rows], float), np.array([r[1] for r in rows])))


def one_group_at_a_time(scores, groups, normalize, epsilon):
    result = np.zeros_like(scores)
    for group in set(groups.tolist()):
        rows = [i for i in range(len(scores)) if groups[i] == group and not np.isnan(scores[i])]
        if len(rows) < 2:
            continue
        values = scores[rows]
        result[rows] = values - values.mean()
        if normalize == "sample":
            result[rows] /= values.std(ddof=1) + epsilon
    return result


@settings(max_examples=200, deadline=None)
@given(scores_and_groups, st.sampled_from(["sample", "none"]))
def test_advantages_match_the_formula_of_each_group(data, normalize):
    scores, groups = data
    expected = one_group_at_a_time(scores, groups, normalize, 1e-6)
    np.testing.assert_allclose(grpo_advantages(scores, groups, normalize, 1e-6), expected, rtol=1e-7, atol=1e-8)


@settings(max_examples=100, deadline=None)
@given(scores_and_groups, st.randoms(use_true_random=False), st.integers(-4, 4), st.sampled_from([0.25, 2.0, 8.0]))
def test_advantages_do_not_depend_on_order_shift_or_scale(data, random, shift, scale):
    scores, groups = data
    scores = np.round(scores * 16) / 16  # sixteenths, so that shifting and scaling are exact
    base = grpo_advantages(scores, groups, epsilon=0.0)
    order = list(range(len(scores)))
    random.shuffle(order)
    np.testing.assert_allclose(grpo_advantages(scores[order], groups[order], epsilon=0.0), base[order], atol=1e-10)
    np.testing.assert_allclose(grpo_advantages(scores * scale + shift, groups, epsilon=0.0), base, atol=1e-10)


@settings(max_examples=100, deadline=None)
@given(scores_and_groups)
def test_advantages_of_a_group_sum_to_zero_and_masked_samples_get_none(data):
    scores, groups = data
    advantages = grpo_advantages(scores, groups)
    assert not advantages[np.isnan(scores)].any()
    assert np.isfinite(advantages).all()
    for group in set(groups.tolist()):
        assert abs(advantages[groups == group].sum()) < 1e-6


def test_equal_scores_are_exactly_zero_although_their_mean_is_not_exact():
    scores = np.full(7, 0.1)
    groups = np.zeros(7, int)
    assert not grpo_advantages(scores, groups).any()
    assert not grpo_advantages(scores, groups, epsilon=0.0).any()
    assert len(groups_with_signal(grpo_advantages(scores, groups), groups)) == 0


def test_a_masked_sample_leaves_the_others_as_if_it_were_not_there():
    groups = np.array([0, 0, 0, 1, 1])
    scores = np.array([1.0, np.nan, 0.0, 5.0, 7.0])
    rest = ~np.isnan(scores)
    np.testing.assert_array_equal(grpo_advantages(scores, groups)[rest], grpo_advantages(scores[rest], groups[rest]))


def test_a_sample_alone_in_its_group_gets_zero():
    np.testing.assert_array_equal(grpo_advantages(np.array([3.0, np.nan, 9.0]), np.array([0, 1, 1])), [0, 0, 0])


def test_groups_with_signal_names_the_groups_that_differ():
    groups = np.array([5, 9, 5, 2, 9, 2])
    advantages = grpo_advantages(np.array([1.0, 0.0, 1.0, 0.0, 1.0, 1.0]), groups)
    np.testing.assert_array_equal(groups_with_signal(advantages, groups), [2, 9])


def test_kl_in_the_reward_is_subtracted_and_masked_samples_stay_masked():
    np.testing.assert_allclose(
        penalized_scores(np.array([1.0, np.nan, 0.5]), np.array([2.0, 3.0, -1.0]), 0.1), [0.8, np.nan, 0.6]
    )

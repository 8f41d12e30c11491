"""Estimates against brute force, the coverage of intervals, and the size and power of the paired test."""

from itertools import combinations, product
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megagrpo.evaluation.metrics import best_of, intervals, majority, means, paired_p_value

SCORES = st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0]), min_size=1, max_size=7)


@given(SCORES, st.data())
def test_the_best_of_k_is_the_mean_best_of_all_subsets(scores: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(scores)))
    assert best_of(scores, k) == pytest.approx(fmean(max(subset) for subset in combinations(scores, k)))


def test_pass_at_k_is_unbiased() -> None:
    """Over all outcomes of 5 samples that are solved with a chance of 0.3, its mean is 1 - 0.7^k."""
    for k in (1, 2, 4, 5):
        expected = sum(
            0.3 ** sum(solved) * 0.7 ** (5 - sum(solved)) * best_of(solved, k)
            for solved in product([0.0, 1.0], repeat=5)
        )
        assert expected == pytest.approx(1 - 0.7**k)


def test_many_samples_are_no_problem() -> None:
    assert best_of([0.0] * 1000 + [1.0], 501) == pytest.approx(501 / 1001)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([0.0, 1.0])), min_size=1, max_size=6))
def test_majority_is_the_mean_over_uniform_tie_breaks(votes: list[tuple[str, float]]) -> None:
    answers = [answer for answer, _ in votes]
    most = max(answers.count(answer) for answer in answers)
    winners = sorted({answer for answer in answers if answers.count(answer) == most})
    expected = fmean(fmean(score for answer, score in votes if answer == winner) for winner in winners)
    assert majority([score for _, score in votes], answers) == pytest.approx(expected)


@pytest.mark.parametrize(("prompts", "rate"), [(60, 0.5), (200, 0.2)])
def test_intervals_hold_the_truth_about_as_often_as_they_say(prompts: int, rate: float) -> None:
    columns = np.random.default_rng(1).binomial(1, rate, size=(prompts, 400)).astype(float)
    low, high = intervals(columns)
    covered = ((low <= rate) & (rate <= high)).mean()
    assert 0.91 <= covered <= 0.98


@given(
    st.lists(st.sampled_from([0.0, 0.25, 1.0, float("nan")]), min_size=1, max_size=30),
    st.integers(60, 100),
)
def test_an_interval_is_around_the_mean_and_within_the_values(column: list[float], resamples: int) -> None:
    values = np.array(column)[:, None]
    (mean,), (low,), (high,) = means(values), *intervals(values, resamples)
    known = values[~np.isnan(values)]
    if not len(known):
        assert np.isnan([mean, low, high]).all()
        return
    assert mean == pytest.approx(known.mean())
    assert known.min() - 1e-9 <= low <= high <= known.max() + 1e-9


def test_intervals_are_the_same_every_time_and_do_not_depend_on_other_columns() -> None:
    values = np.random.default_rng(0).random((50, 3))
    together, alone = intervals(values), intervals(values[:, :1])
    assert (together[0][0], together[1][0]) == pytest.approx((alone[0][0], alone[1][0]), rel=1e-12)
    assert (intervals(values)[0] == together[0]).all()


@given(st.integers(0, 12), st.integers(0, 12), st.integers(0, 5))
def test_the_test_of_ones_and_zeros_is_mcnemars(better: int, worse: int, same: int) -> None:
    p, name = paired_p_value(np.array([1.0] * better + [-1.0] * worse + [0.0] * same))
    signs = list(product([1, -1], repeat=min(better + worse, 10)))
    if better + worse <= 10:
        as_far = fmean(abs(sum(flip)) >= abs(better - worse) for flip in signs)
        assert p == pytest.approx(as_far)
    assert name.startswith("McNemar")


def test_the_permutation_test_agrees_with_all_permutations() -> None:
    differences = np.array([0.5, -0.25, 1.0, 0.75, 0.125, 0.5, -0.5, 0.25])
    all_sums = [abs(np.dot(flip, differences)) for flip in product([1, -1], repeat=8)]
    p, name = paired_p_value(differences)
    assert p == pytest.approx(fmean(each >= differences.sum() - 1e-12 for each in all_sums), abs=0.02)
    assert name.startswith("permutation")


def test_the_paired_test_calls_equal_models_different_as_often_as_its_level_says() -> None:
    generator = np.random.default_rng(2)
    p_values = [paired_p_value(generator.normal(size=40))[0] for _ in range(200)]
    assert 0.01 <= np.mean(np.array(p_values) < 0.05) <= 0.1
    assert np.mean([paired_p_value(generator.normal(0.8, size=40))[0] < 0.05 for _ in range(20)]) > 0.9

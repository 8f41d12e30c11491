"""The estimate of how long responses would have been that were cut, against lengths that are known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megagrpo.algorithm.cut_off import cut_metrics, lengths_of_begun

LENGTHS = st.lists(st.integers(0, 50), min_size=1, max_size=30)


def test_a_long_tail_that_is_cut_has_a_bias_which_is_reported_and_estimated_from_below() -> None:
    draw = np.random.default_rng(0)
    lengths, limits = draw.lognormal(6.0, 1.2, 4000).astype(int), draw.uniform(200, 2000, 4000).astype(int)
    ended, cut = lengths[lengths <= limits], limits[lengths > limits]
    found = cut_metrics(ended.tolist(), ended.tolist(), cut.tolist())
    so_far = np.mean([*ended, *cut])
    true = 1 - ended.mean() / lengths.mean()
    assert 0.3 < found["cut/bias"] < true
    assert so_far < found["cut/begun_tokens_mean"] < lengths.mean()
    assert found["cut/begun_tokens_p90"] == pytest.approx(np.quantile(lengths, 0.9), rel=0.1)
    assert found["cut/samples"] == len(cut)
    assert found["cut/tokens_share"] == pytest.approx(cut.sum() / (cut.sum() + ended.sum()))


@given(trained=LENGTHS, unused=LENGTHS)
def test_what_ended_counts_with_its_length(trained: list[int], unused: list[int]) -> None:
    found = cut_metrics(trained, [*trained, *unused], [])
    assert found["cut/begun_tokens_mean"] == pytest.approx(np.mean([*trained, *unused]))
    assert cut_metrics(trained, trained, [])["cut/bias"] == pytest.approx(0.0, abs=1e-9)


def test_a_trained_response_that_engines_gave_up_on_would_have_been_longer() -> None:
    found = cut_metrics([10, 20, 5], [10, 20, 30], [5])
    assert found["cut/begun_tokens_mean"] == pytest.approx((10 + 20 + 30) / 3)
    assert found["cut/samples"] == 1
    assert found["cut/tokens_share"] == pytest.approx(30 / 65)


@given(ended=LENGTHS, cut=LENGTHS)
def test_the_estimate_is_a_distribution_and_no_shorter_than_what_is_there(ended: list[int], cut: list[int]) -> None:
    lengths, shares = lengths_of_begun(ended, cut)
    assert shares.min() >= 0.0
    assert shares.sum() == pytest.approx(1.0)
    assert lengths @ shares >= np.mean([*ended, *cut]) - 1e-9


def test_published_survival_times_have_the_published_shares() -> None:
    """Freireich's leukemia patients who were treated (1963), as in every textbook: 0.627 live longer than 16 weeks."""
    ended, cut = [6, 6, 6, 7, 10, 13, 16, 22, 23], [6, 9, 10, 11, 17, 19, 20, 25, 32, 32, 34, 35]
    lengths, shares = lengths_of_begun(ended, cut)
    for weeks, alive in ((6, 0.857), (7, 0.807), (10, 0.753), (13, 0.690), (16, 0.627), (22, 0.538), (23, 0.448)):
        assert shares[lengths > weeks].sum() == pytest.approx(alive, abs=5e-4)

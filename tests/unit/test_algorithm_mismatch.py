"""Figures of the train-versus-rollout mismatch against numpy, however the tokens are spread over ranks."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megagrpo.algorithm.mismatch import (
    Mismatch,
    absolute_difference_bits,
    float_of_bits,
    merge_worst,
    mismatch_of,
    mismatch_sums,
    percentile_bits,
    worst_tokens,
)
from megagrpo.algorithm.over_ranks import Sequences
from tests.methods import part_of
from tests.rank_threads import SumOverRanks, on_threads

LOGPROBS = st.floats(-40, 0, width=32)
PAIRS = st.lists(st.tuples(LOGPROBS, LOGPROBS), min_size=1, max_size=400)


def percentile_over(parts: list[torch.Tensor]) -> list[int]:
    """`percentile_bits` of every rank."""
    total = sum(map(len, parts))
    return on_threads(len(parts), lambda rank, sum_over_ranks: percentile_bits(parts[rank], total, sum_over_ranks))


@given(PAIRS, st.integers(1, 3))
@settings(max_examples=60)
def test_the_percentile_is_that_of_all_tokens_wherever_they_are(pairs, ranks):
    train, rollout = torch.tensor(pairs).T
    bits = absolute_difference_bits(train, rollout)
    wanted = np.quantile((train - rollout).abs().numpy(), 0.99, method="inverted_cdf")
    found = percentile_over([bits[rank::ranks] for rank in range(ranks)])
    assert [float_of_bits(each) for each in found] == [wanted] * ranks


def responses_of(tokens: int, length: int = 7) -> Sequences:
    """Responses of `length` tokens and one with the rest."""
    index = torch.arange(tokens) // length
    return Sequences(index, torch.bincount(index).float())


def alone(train: torch.Tensor, rollout: torch.Tensor, worst: int = 3) -> Mismatch:
    """All of it, on one rank."""
    bits = absolute_difference_bits(train, rollout)
    numbers = torch.arange(len(train))
    return mismatch_of(
        mismatch_sums(train, rollout, responses_of(len(train))),
        float_of_bits(percentile_bits(bits, len(bits), lambda _: None)),
        float_of_bits(int(bits.max())),
        merge_worst(worst_tokens(numbers, numbers + 10, train, rollout, worst), worst),
    )


@given(st.lists(st.tuples(st.floats(-9, 0, width=32), st.floats(-9, 0, width=32)), min_size=1, max_size=200))
@settings(max_examples=60)
def test_the_figures_are_those_of_the_formulas_in_float64(pairs):
    train, rollout = np.array(pairs, np.float32).T
    found = alone(torch.from_numpy(train.copy()), torch.from_numpy(rollout.copy()))
    d = train.astype(np.float64) - rollout
    weights = np.exp(d)
    assert found.tokens == len(pairs)
    assert found.mean == pytest.approx(np.abs(d).mean(), rel=1e-5, abs=1e-6)
    assert found.max == pytest.approx(np.abs(d).max(), rel=1e-6)
    assert found.k1 == pytest.approx((-d).mean(), rel=1e-5, abs=1e-5)
    assert found.k3 == pytest.approx((weights - 1 - d).mean(), rel=1e-4, abs=1e-6)
    assert found.ratio_mean == pytest.approx(weights.mean(), rel=1e-4)
    assert found.effective_share == pytest.approx(weights.sum() ** 2 / (len(d) * (weights**2).sum()), rel=1e-4)
    assert found.reverse_k3 == pytest.approx((weights * d - weights + 1).mean(), rel=1e-4, abs=1e-6)
    assert found.chi2_token == pytest.approx((weights**2).mean() - 1, rel=1e-4, abs=1e-5)
    products = [min(d[first : first + 7].sum(), 20.0) for first in range(0, len(d), 7)]
    products = [np.exp(2 * max(each, -20.0)) for each in products]
    assert found.chi2_sequence == pytest.approx(np.mean(products) - 1, rel=1e-3, abs=1e-4)
    assert found.train_perplexity == pytest.approx(np.exp(-train.astype(np.float64).mean()), rel=1e-5)
    assert found.rollout_perplexity == pytest.approx(np.exp(-rollout.astype(np.float64).mean()), rel=1e-5)


@given(PAIRS, st.integers(1, 3))
@settings(max_examples=30)
def test_sums_of_ranks_that_hold_parts_of_the_same_responses_add(pairs, ranks):
    train, rollout = torch.tensor(pairs).T
    whole = responses_of(len(pairs))

    def sums_on(rank: int, sum_over_ranks: SumOverRanks) -> torch.Tensor:
        part = part_of(whole, rank, ranks, sum_over_ranks)
        return mismatch_sums(train[rank::ranks], rollout[rank::ranks], part)

    added = sum(on_threads(ranks, sums_on))
    torch.testing.assert_close(added, mismatch_sums(train, rollout, whole), rtol=1e-9, atol=1e-9)


def test_no_token_has_no_mismatch():
    assert percentile_bits(torch.empty(0, dtype=torch.int32), 0, lambda _: None) == 0
    found = mismatch_of(mismatch_sums(torch.empty(0), torch.empty(0), responses_of(0)), 0.0, 0.0, ())
    assert (found.tokens, found.mean, found.k3, found.ratio_mean, found.effective_share) == (0, 0, 0, 1, 1)


@given(PAIRS, st.integers(1, 4), st.integers(1, 12))
@settings(max_examples=60)
def test_the_worst_tokens_are_those_of_all_ranks_largest_first(pairs, ranks, count):
    train, rollout = torch.tensor(pairs).T
    numbers = torch.arange(len(pairs))
    found = torch.cat(
        [
            worst_tokens(*(each[rank::ranks] for each in (numbers, numbers + 10, train, rollout)), count)
            for rank in range(ranks)
        ]
    )
    merged = merge_worst(found, count)
    assert len(merged) == min(count, len(pairs)), "rows that only fill up are not tokens"
    for token in merged:
        assert token.index == token.row + 10
        assert (token.train_logprob, token.rollout_logprob) == pairs[token.row]
    assert len({token.row for token in merged}) == len(merged)
    differences = (train - rollout).abs().sort(descending=True).values.tolist()
    assert [abs(np.float32(t.train_logprob) - np.float32(t.rollout_logprob)) for t in merged] == differences[
        : len(merged)
    ]


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_logprob_that_is_no_number_is_the_worst_and_seen_in_every_figure(value):
    train, rollout = -torch.rand(300), -torch.rand(300)
    rollout[[7, 8, 9, 10]] = value
    found = alone(train, rollout)
    assert not math.isfinite(found.mean)
    assert not math.isfinite(found.max)
    assert not math.isfinite(found.p99)
    assert {token.row for token in found.worst} <= {7, 8, 9, 10}

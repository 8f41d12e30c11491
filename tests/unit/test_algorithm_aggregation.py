"""Weights of tokens against nested means and sums, verl's, and what they must not depend on."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megagrpo.algorithm.aggregation import AggregationConfig, MinibatchTokens, token_weights
from megagrpo.algorithm.sequences import Sequences
from tests.methods import aggregation, names

KINDS = names(AggregationConfig)
DIVISOR = 50
every_kind = pytest.mark.parametrize("kind", KINDS)
responses = st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=10)


def aggregated(kind: str, rows: list[np.ndarray]) -> float:
    """Of the kept losses of each response, as the names say. A response of which nothing is kept is none."""
    rows = [row for row in rows if len(row)]
    if not rows:
        return 0.0
    if kind == "token_mean":
        return float(np.concatenate(rows).mean())
    if kind == "token_sum":
        return float(np.concatenate(rows).sum())
    of_response = {
        "seq_mean_token_sum": np.sum,
        "seq_mean_token_mean": np.mean,
        "seq_mean_token_sum_norm": lambda row: row.sum() / DIVISOR,
    }[kind]
    return float(np.mean([of_response(row) for row in rows]))


def weights_of(kind: str, kept: torch.Tensor, sequences: Sequences, tokens: float, count: float) -> torch.Tensor:
    """With the default divisor, the longest response."""
    return token_weights(aggregation(name=kind), MinibatchTokens(kept, sequences, tokens, count, DIVISOR))


def sequences_of(lengths: list[int], over_ranks=lambda sums: sums) -> Sequences:
    counts = torch.tensor(lengths)
    return Sequences(torch.arange(len(lengths)).repeat_interleave(counts), counts.float(), over_ranks)


@every_kind
@settings(max_examples=40)
@given(responses, st.integers(1, 4), st.randoms(use_true_random=False))
def test_weighed_losses_are_the_nested_means_and_sums_however_packed(kind, rows, parts, random):
    losses = [np.array([random.uniform(-1, 1) for _ in row]) for row in rows]
    kept = [np.array(row) for row in rows]
    tokens, count = sum(int(k.sum()) for k in kept), sum(bool(k.any()) for k in kept)
    order = list(range(len(rows)))
    random.shuffle(order)
    total = 0.0
    for part in range(parts):
        here = order[part::parts]
        if not here:
            continue
        sequences = sequences_of([len(rows[r]) for r in here])
        weights = weights_of(kind, torch.from_numpy(np.concatenate([kept[r] for r in here])), sequences, tokens, count)
        total += float(weights.double().numpy() @ np.concatenate([losses[r] for r in here]))
    assert total == pytest.approx(
        aggregated(kind, [x[k] for x, k in zip(losses, kept, strict=True)]), rel=1e-5, abs=1e-6
    )


@every_kind
def test_a_response_on_two_ranks_counts_once(kind):
    whole = sequences_of([4, 6])
    kept = torch.tensor([True, True, False, True, True, False, True, True, True, True])
    expected = weights_of(kind, kept, whole, 8, 2)
    halves = [torch.arange(rank, 10, 2) for rank in range(2)]
    of_rank = [torch.bincount(whole.index[half], kept[half].double(), minlength=2) for half in halves]
    for rank, half in enumerate(halves):
        part = Sequences(whole.index[half], whole.tokens, lambda sums, rank=rank: sums + of_rank[1 - rank])
        assert torch.equal(weights_of(kind, kept[half], part, 8, 2), expected[half])


@every_kind
def test_nothing_kept_weighs_nothing(kind):
    weights = weights_of(kind, torch.zeros(3, dtype=torch.bool), sequences_of([1, 2]), 0, 0)
    assert not weights.any()


def verl_agg_loss(losses: torch.Tensor, mask: torch.Tensor, mode: str) -> torch.Tensor:
    """verl/trainer/ppo/core_algos.py, agg_loss; seq-mean-token-sum-norm divides by the responses as of 0.9.1."""
    of_sequence = (losses * mask).sum(-1)
    there = (mask.sum(-1) > 0).float()
    if mode == "token-mean":
        return (losses * mask).sum() / mask.sum()
    if mode == "token-sum":
        return (losses * mask).sum()
    if mode == "seq-mean-token-sum":
        return (of_sequence * there).sum() / there.sum()
    if mode == "seq-mean-token-mean":
        return (of_sequence / (mask.sum(-1) + 1e-8) * there).sum() / there.sum()
    return of_sequence.sum() / DIVISOR / there.sum()


@every_kind
def test_aggregation_is_verls(kind):
    random = torch.Generator().manual_seed(0)
    losses, mask = torch.randn(5, 8, generator=random), (torch.rand(5, 8, generator=random) < 0.6).float()
    mask[2] = 0
    weights = weights_of(kind, mask.flatten() > 0, sequences_of([8] * 5), float(mask.sum()), 4)
    torch.testing.assert_close((weights * losses.flatten()).sum(), verl_agg_loss(losses, mask, kind.replace("_", "-")))


def test_the_norm_has_a_divisor_of_its_own():
    whole = MinibatchTokens(torch.ones(4, dtype=torch.bool), sequences_of([1, 3]), 4, 2, DIVISOR)
    weights = token_weights(aggregation(name="seq_mean_token_sum_norm", divisor=8.0), whole)
    assert weights.tolist() == [1 / 16] * 4

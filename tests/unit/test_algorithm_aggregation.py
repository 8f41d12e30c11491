"""Weights of tokens against nested means and sums however the tokens lie, and sums over responses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megagrpo.algorithm.aggregation import AggregationConfig, MinibatchTokens, token_weights
from megagrpo.algorithm.over_ranks import Sequences
from megagrpo.algorithm.policy_losses import GmpoConfig, GspoConfig, PolicyInputs
from tests.methods import aggregation, names, part_of, sequences_of
from tests.rank_threads import SumOverRanks, on_threads

KINDS = names(AggregationConfig)
DIVISOR = 50
every_kind = pytest.mark.parametrize("kind", KINDS)
responses = st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=10)


def aggregated(kind: str, rows: list[np.ndarray]) -> float:
    """The aggregation of `rows`, the kept losses of each response. A response with nothing kept does not count."""
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

    def weights_on(rank: int, sum_over_ranks: SumOverRanks) -> torch.Tensor:
        return weights_of(kind, kept[rank::2], part_of(whole, rank, 2, sum_over_ranks), 8, 2)

    for rank, found in enumerate(on_threads(2, weights_on)):
        assert torch.equal(found, expected[rank::2])


def test_the_norm_has_a_divisor_of_its_own():
    whole = MinibatchTokens(torch.ones(4, dtype=torch.bool), sequences_of([1, 3]), 4, 2, DIVISOR)
    weights = token_weights(aggregation(name="seq_mean_token_sum_norm", divisor=8.0), whole)
    assert weights.tolist() == [1 / 16] * 4


INDEX = torch.tensor([1, 0, 1, 1, 0])
SEQUENCES = Sequences(INDEX, torch.tensor([2.0, 3.0, 0.0]))


def test_sums_means_and_shares_are_by_response():
    values = torch.tensor([1.0, 20.0, 3.0, 5.0, 40.0])
    assert SEQUENCES.sum(values).tolist() == [60.0, 9.0, 0.0]
    assert SEQUENCES.mean(values).tolist() == [30.0, 3.0, 0.0]
    assert SEQUENCES.of_tokens(SEQUENCES.sum(INDEX == 1)).tolist() == [3.0, 0.0, 3.0, 3.0, 0.0]
    assert SEQUENCES.shares().sum().item() == pytest.approx(2)


def test_sums_are_exact_where_float32_would_depend_on_the_order():
    values = torch.tensor([1e8, 0.0, 1.0, -1e8, 0.0])
    order = [0, 3, 2, 1, 4]
    sums = [Sequences(INDEX[order], SEQUENCES.tokens).sum(values[order]), SEQUENCES.sum(values)]
    assert [each.tolist() for each in sums] == [[0.0, 1.0, 0.0]] * 2


def test_losses_by_response_keep_the_type_of_their_logprobs():
    logprobs = torch.tensor([-1.0, -2.0, -0.5, -0.25, -1.5], requires_grad=True)
    for method in (GspoConfig(), GmpoConfig()):
        inputs = PolicyInputs(logprobs, logprobs.detach() - 0.1, torch.ones(5), SEQUENCES)
        found = method.of_tokens(inputs)
        assert found.loss.dtype == found.ratio.dtype == torch.float32
        assert found.loss.requires_grad

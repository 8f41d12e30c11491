"""Putting sequences into microbatches of a fixed number of tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megagrpo.batching.microbatch import RankBatch
from megagrpo.layout.parallel import ParallelLayout


def padded_lengths(lengths: np.ndarray, context: int) -> np.ndarray:
    """Tokens each sequence occupies, int [sequences]: each of `context` ranks takes two equal pieces of it."""
    if context == 1:
        return lengths
    return -(-lengths // (2 * context)) * (2 * context)


def first_fit_decreasing(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Indices of the sequences in each bin; no bin holds more than `capacity` tokens.

    Longest first, each into the first bin with room: at most 11/9 of the fewest possible bins, plus 6/9
    (Dosa, 2007). No length may exceed `capacity`.
    """
    bins: list[list[int]] = []
    room = np.empty(0, dtype=np.int64)
    for index in np.argsort(-lengths, kind="stable"):
        fits = np.flatnonzero(room >= lengths[index])
        if len(fits):
            bins[fits[0]].append(int(index))
            room[fits[0]] -= lengths[index]
        else:
            bins.append([int(index)])
            room = np.append(room, capacity - lengths[index])
    return bins


def packing_efficiency(batches: Sequence[RankBatch], layout: ParallelLayout, tokens_per_microbatch: int) -> float:
    """Share of the microbatches' capacity that holds tokens, over all data ranks: between 0 and 1."""
    microbatches = [micro for batch in batches for minibatch in batch.minibatches for micro in minibatch]
    capacity = len(microbatches) * tokens_per_microbatch * layout.context
    return sum(micro.tokens for micro in microbatches) / capacity if capacity else 0.0


def imbalance(batches: Sequence[RankBatch]) -> float:
    """How much longer data ranks compute than if all had the same work: at the end of a minibatch they wait for the
    busiest. 0 at best, one less than the data ranks at worst."""
    of_minibatches = list(zip(*(batch.work for batch in batches), strict=True))
    mean = sum(sum(of_ranks) / len(of_ranks) for of_ranks in of_minibatches)
    return sum(map(max, of_minibatches)) / mean - 1 if mean else 0.0

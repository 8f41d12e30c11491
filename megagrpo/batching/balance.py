"""Sharing work evenly: sequences over microbatches, and microbatches over data ranks."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

TOKENS_WHERE_ATTENTION_COSTS_AS_MUCH_AS_MATRICES = 49152
"""12 x hidden for a hidden size of 4096: a layer's matrices take 24 hidden^2 flops per token, causal attention
2 hidden x length.
"""


def costs(lengths: np.ndarray) -> np.ndarray:
    """Relative time of each sequence, float64 [sequences]: linear in its length, plus attention's quadratic part."""
    return lengths * (1 + lengths / TOKENS_WHERE_ATTENTION_COSTS_AS_MUCH_AS_MATRICES)


def spread_evenly(lengths: np.ndarray, bins: int) -> list[list[int]]:
    """Sequences over exactly `bins` bins of about equal cost; some are empty if there are fewer sequences.

    Longest first, each to the bin with the least cost so far (LPT, Graham 1969).
    """
    cost = costs(lengths)
    heap = [(0.0, index) for index in range(bins)]
    filled: list[list[int]] = [[] for _ in range(bins)]
    for sequence in np.argsort(-lengths, kind="stable").tolist():
        load, index = heap[0]
        filled[index].append(sequence)
        heapq.heapreplace(heap, (load + cost[sequence], index))
    return filled


def split_to(bins: list[list[int]], lengths: np.ndarray, count: int) -> list[list[int]]:
    """More bins of the same sequences: the fullest that has two is halved until there are `count`, or none is left."""
    bins = list(bins)
    while len(bins) < count:
        index = max(range(len(bins)), key=lambda i: (len(bins[i]) > 1, int(lengths[bins[i]].sum())))
        whole = bins[index]
        if len(whole) < 2:
            break
        bins[index : index + 1] = [[whole[i] for i in half] for half in spread_evenly(lengths[whole], 2)]
    return bins


def share_over_ranks(bin_costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Bins over ranks, the same number each and about equal cost; the k-th bins of all ranks are alike.

    `len(bin_costs)` must be a multiple of `ranks`. Bins are dealt in rounds from the costliest: each round gives its
    costliest bin to the rank with the least so far. So ranks that wait for each other in every layer, as with experts,
    wait little.
    """
    order = sorted(range(len(bin_costs)), key=lambda i: -bin_costs[i])
    load = [0.0] * ranks
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for first in range(0, len(order), ranks):
        poorest = sorted(range(ranks), key=lambda rank: load[rank])
        for rank, index in zip(poorest, order[first : first + ranks], strict=True):
            shares[rank].append(index)
            load[rank] += bin_costs[index]
    return shares

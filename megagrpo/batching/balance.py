"""Sharing work evenly: sequences over microbatches, and microbatches over data ranks."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

SEQUENCES_PER_BIN_FOR_DIFFERENCING = 8
"""With more, the shortest ones even out what longest-first leaves, and differencing only takes longer."""


def spread_evenly(cost: np.ndarray, bins: int) -> list[list[int]]:
    """Sequences of some `cost` [sequences] over exactly `bins` bins; some are empty if there are fewer sequences.

    Of two ways that whose costliest bin is cheaper: longest first, and where there are few for each bin largest
    differencing.
    """
    longest_first = _longest_first(cost, bins)
    if bins == 1 or len(cost) > SEQUENCES_PER_BIN_FOR_DIFFERENCING * bins:
        return longest_first
    return min(longest_first, _largest_differencing(cost, bins), key=lambda filled: _costliest(cost, filled))


def split_to(bins: list[list[int]], cost: np.ndarray, count: int) -> list[list[int]]:
    """More bins of the same sequences: the costliest that has two is halved until there are `count` or none is left."""
    bins = list(bins)
    while len(bins) < count:
        index = max(range(len(bins)), key=lambda i: (len(bins[i]) > 1, float(cost[bins[i]].sum())))
        whole = bins[index]
        if len(whole) < 2:
            break
        bins[index : index + 1] = [[whole[i] for i in half] for half in spread_evenly(cost[whole], 2)]
    return bins


def share_over_ranks(bin_costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Bins over ranks, the same number each and about equal cost; the k-th bins of all ranks are alike.

    `len(bin_costs)` must be a multiple of `ranks`. Sorted by cost, every `ranks` bins are a round, of which each rank
    gets one. So ranks that wait for each other in every layer, as with experts, wait little. Which one is found by
    balanced largest differencing (Michiels, Korst, Aarts, van Leeuwen 2003): the two sets of rounds whose shares
    differ most are joined, the costliest share of one with the cheapest of the other. Ranks then differ by no more
    than the bins of some round do.
    """
    order = np.argsort(-np.asarray(bin_costs), kind="stable").reshape(-1, ranks)
    cost = np.asarray(bin_costs)[order]
    # Every entry: minus the largest difference, a number to break ties, and shares with ascending cost.
    heap = [
        (-float(np.ptp(shares)), index, shares[::-1], rounds[None, ::-1])
        for index, (shares, rounds) in enumerate(zip(cost, order, strict=True))
    ]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, index, one, rounds = heapq.heappop(heap)
        _, _, other, more = heapq.heappop(heap)
        shares = one + other[::-1]
        ascending = np.argsort(shares, kind="stable")
        joined = np.concatenate([rounds, more[:, ::-1]])[:, ascending]
        heapq.heappush(heap, (-float(np.ptp(shares)), index, shares[ascending], joined))
    (_, _, _, rounds) = heap[0]
    place = np.empty(order.size, dtype=np.int64)
    place[order.ravel()] = np.arange(order.size)
    return [sorted(of_rank.tolist(), key=place.__getitem__) for of_rank in rounds.T]


def _longest_first(cost: np.ndarray, bins: int) -> list[list[int]]:
    """Each to the bin with the least so far (LPT): at most 4/3 - 1/(3 bins) of the best (Graham 1969)."""
    heap = [(0.0, index) for index in range(bins)]
    filled: list[list[int]] = [[] for _ in range(bins)]
    for sequence in np.argsort(-cost, kind="stable").tolist():
        load, index = heap[0]
        filled[index].append(sequence)
        heapq.heapreplace(heap, (load + cost[sequence], index))
    return filled


def _largest_differencing(cost: np.ndarray, bins: int) -> list[list[int]]:
    """Karmarkar and Karp 1982: the two partitions whose bins differ most are joined, full bins with empty ones.

    Every sequence begins as a partition of its own, alone in the last bin.
    """
    heap = []
    for sequence, value in enumerate(cost.tolist()):
        loads = np.zeros(bins)
        loads[-1] = value
        heap.append((-value, sequence, loads, np.array([sequence]), np.array([bins - 1])))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, index, one, members, bin_of = heapq.heappop(heap)
        _, _, other, more, bin_of_more = heapq.heappop(heap)
        loads = one + other[::-1]
        ascending = np.argsort(loads, kind="stable")
        moved = np.empty(bins, dtype=np.int64)
        moved[ascending] = np.arange(bins)
        places = moved[np.concatenate([bin_of, bins - 1 - bin_of_more])]
        joined = np.concatenate([members, more])
        heapq.heappush(heap, (-float(np.ptp(loads)), index, loads[ascending], joined, places))
    filled: list[list[int]] = [[] for _ in range(bins)]
    for _, _, _, members, bin_of in heap:
        for sequence, place in zip(members.tolist(), bin_of.tolist(), strict=True):
            filled[place].append(sequence)
    return filled


def _costliest(cost: np.ndarray, bins: Sequence[Sequence[int]]) -> float:
    return max(float(cost[list(filled)].sum()) for filled in bins)

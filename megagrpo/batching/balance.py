"""Spreads work evenly: sequences over microbatches, and microbatches over data ranks."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

SEQUENCES_PER_BIN_FOR_DIFFERENCING = 8
"""With more sequences per bin, longest-first is even enough already, and differencing only takes longer."""


def spread_evenly(cost: np.ndarray, bins: int) -> list[list[int]]:
    """Spreads sequences of some `cost` [sequences] over `bins` bins; some are empty if there are fewer sequences.

    Tries longest first and, with few sequences per bin, largest differencing, and takes the result whose costliest bin
    is cheaper.
    """
    longest_first = _longest_first(cost, bins)
    if bins == 1 or len(cost) > SEQUENCES_PER_BIN_FOR_DIFFERENCING * bins:
        return longest_first
    ways = (longest_first, _largest_differencing(cost, bins))
    return min(ways, key=lambda filled: max(float(cost[one].sum()) for one in filled))


def split_to(bins: list[list[int]], cost: np.ndarray, count: int) -> list[list[int]]:
    """Halves the costliest bin that has two sequences until there are `count` bins or none can be halved."""
    bins = list(bins)
    while len(bins) < count:
        index = max(range(len(bins)), key=lambda i: (len(bins[i]) > 1, float(cost[bins[i]].sum())))
        whole = bins[index]
        if len(whole) < 2:
            break
        bins[index : index + 1] = [[whole[i] for i in half] for half in spread_evenly(cost[whole], 2)]
    return bins


def share_over_ranks(bin_costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Gives each rank the same number of bins and about the same cost; the k-th bins of all ranks cost about the same.

    `len(bin_costs)` must be a multiple of `ranks`. The bins are sorted by cost; every `ranks` of them are a round, and
    each rank gets one bin of a round. So ranks that wait for each other in every layer, as with experts, wait little.
    Balanced largest differencing (Michiels, Korst, Aarts, van Leeuwen 2003) decides which rank gets which bin: it joins
    the two sets of rounds whose shares differ most, the costliest share of one with the cheapest of the other. The
    ranks' totals then differ by at most the largest difference within a round.
    """
    order = np.argsort(-np.asarray(bin_costs), kind="stable").reshape(-1, ranks)
    cost = np.asarray(bin_costs)[order]
    # An entry is minus the largest difference, an index to break ties, the ascending costs of the shares, their rounds.
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
    """Puts each sequence into the cheapest bin so far (LPT): at most 4/3 - 1/(3 bins) of the best (Graham 1969)."""
    heap = [(0.0, index) for index in range(bins)]
    filled: list[list[int]] = [[] for _ in range(bins)]
    for sequence in np.argsort(-cost, kind="stable").tolist():
        load, index = heap[0]
        filled[index].append(sequence)
        heapq.heapreplace(heap, (load + cost[sequence], index))
    return filled


def _largest_differencing(cost: np.ndarray, bins: int) -> list[list[int]]:
    """Joins the two partitions whose bins differ most, full bins with empty ones (Karmarkar and Karp 1982).

    At first every sequence is a partition of its own, alone in the last bin.
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

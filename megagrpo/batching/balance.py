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
    rounds = zip(cost[:, ::-1], order[:, ::-1], strict=True)
    members, rank_of = _differenced([(shares, of_round, np.arange(ranks)) for shares, of_round in rounds])
    place = np.empty(order.size, dtype=np.int64)
    place[order.ravel()] = np.arange(order.size)
    return [sorted(members[rank_of == rank].tolist(), key=place.__getitem__) for rank in range(ranks)]


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
    last = np.array([bins - 1])
    alone = [(np.append(np.zeros(bins - 1), value), np.array([sequence]), last) for sequence, value in enumerate(cost)]
    filled: list[list[int]] = [[] for _ in range(bins)]
    for sequence, place in zip(*_differenced(alone), strict=True) if alone else ():
        filled[place].append(int(sequence))
    return filled


def _differenced(partitions: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Joins partitions until one is left: the two whose bins differ most, the costliest bin of one with the cheapest of
    the other. Returns its members and the bin of each. partitions: costs of the bins, ascending; members; their bins.
    """
    # An entry is minus the largest difference, an index to break ties, and the partition.
    heap = [(-float(np.ptp(partition[0])), index, *partition) for index, partition in enumerate(partitions)]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, index, one, members, bin_of = heapq.heappop(heap)
        _, _, other, more, bin_of_more = heapq.heappop(heap)
        costs, bins = one + other[::-1], len(one)
        ascending = np.argsort(costs, kind="stable")
        moved = np.empty(bins, dtype=np.int64)
        moved[ascending] = np.arange(bins)
        places = moved[np.concatenate([bin_of, bins - 1 - bin_of_more])]
        joined = np.concatenate([members, more])
        heapq.heappush(heap, (-float(np.ptp(costs)), index, costs[ascending], joined, places))
    return heap[0][3:]

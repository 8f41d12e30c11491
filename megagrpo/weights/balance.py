"""Even loads: bytes that several holders have are shared out so that the busiest carries as little as possible."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

Holders = tuple[int, ...]

GAP = 0.01
"""The largest load is at most this much above the least that is possible."""
SWEEPS = 1000
"""Sets of holders as they come from layouts need fewer than ten."""


def even_shares(demands: Mapping[Holders, int]) -> dict[Holders, np.ndarray]:
    """How many of its bytes each holder of a set carries: int64 [holders of the set], which add up to its demand.

    Set after set, holders are filled to a common level on top of what they carry for other sets. This descends on the
    sum of squared loads, whose minimum has the smallest largest load too. It ends when that load is within GAP of a
    lower bound which needs no trust in how it was reached (`least_load`).
    """
    order = sorted(
        (holders for holders, demand in demands.items() if demand), key=lambda holders: (len(holders), holders)
    )
    members = [np.array(holders) for holders in order]
    shares = [np.zeros(len(holders)) for holders in order]
    loads = np.zeros(max((holder for holders in order for holder in holders), default=-1) + 1)
    for sweep in range(SWEEPS):
        before = loads.copy()
        for index, holders in enumerate(order):
            of_set = members[index]
            loads[of_set] -= shares[index]
            shares[index] = _fill(loads[of_set], demands[holders])
            loads[of_set] += shares[index]
        moved, largest = np.abs(loads - before).max(initial=0.0), loads.max(initial=0.0)
        if sweep and moved <= GAP * largest and largest <= (1 + GAP) * least_load(demands, loads):
            break
    whole = {holders: _whole_bytes(share, demands[holders]) for holders, share in zip(order, shares, strict=True)}
    return whole | {holders: np.zeros(len(holders), np.int64) for holders in demands if holders not in whole}


def least_load(demands: Mapping[Holders, int], loads: np.ndarray) -> float:
    """No sharing can bring the largest load below this.

    Whatever only the holders of a group have, they must carry among themselves. The groups tried are the k busiest, for
    every k; at the optimum one of them is tight.
    """
    place = np.empty(len(loads), np.int64)
    place[np.argsort(-loads, kind="stable")] = np.arange(len(loads))
    within = np.zeros(len(loads))
    for holders, demand in demands.items():
        if demand:
            within[place[list(holders)].max()] += demand
    return float((np.cumsum(within) / np.arange(1, len(loads) + 1)).max(initial=0.0))


def _fill(levels: np.ndarray, amount: float) -> np.ndarray:
    """What to pour on each of these levels, `amount` in all, so that those that get something end at the same level."""
    order = np.sort(levels)
    # With the k lowest filled, the common level is (amount + sum of them) / k: right for the first k where it does not
    # reach the next one.
    reached = (amount + np.cumsum(order)) / np.arange(1, len(order) + 1)
    right = np.flatnonzero(reached[:-1] <= order[1:])
    return np.maximum(reached[right[0] if len(right) else -1] - levels, 0.0)


def _whole_bytes(share: np.ndarray, demand: int) -> np.ndarray:
    """Rounded so that they still add up to the demand."""
    edges = np.round(np.cumsum(share) * (demand / share.sum())).astype(np.int64)
    edges[-1] = demand
    return np.diff(edges, prepend=0)

"""Which node each device of a run lies on: whole engines on one node, and tensor ranks side by side."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from megagrpo.recipe.defaults import DevicePlan


def nodes_of_devices(devices: DevicePlan, tensor: int, free: Mapping[str, int]) -> tuple[str, ...] | None:
    """Node of every device, on as few nodes as can be; None if there is no room.

    An engine is never split. A group of `tensor` ranks is split only if there is no room otherwise.
    free: free devices of each node, in the order in which nodes of the same size are to be filled.
    """
    whole_groups = tuple(tuple(range(first, first + tensor)) for first in range(0, len(devices.bundle_of_rank), tensor))
    engines = devices.bundles_of_engine
    for unsplit in ((*engines, *whole_groups), engines):
        if found := _fill(_blocks(devices.bundles, unsplit), free):
            return found
    return None


def _blocks(devices: int, unsplit: tuple[tuple[int, ...], ...]) -> list[int]:
    """Sizes of the smallest runs of neighbouring devices that split none of `unsplit`, each of which is such a run."""
    inner = {device for run in unsplit for device in run[1:]}
    ends = [device for device in range(devices) if device not in inner]
    return [after - before for before, after in pairwise([*ends, devices])]


def _fill(blocks: list[int], free: Mapping[str, int]) -> tuple[str, ...] | None:
    """Blocks in their order, node after node, the largest node first; None if some are left over."""
    nodes: list[str] = []
    left = list(reversed(blocks))
    for node, room in sorted(free.items(), key=lambda item: -item[1]):
        while left and left[-1] <= room:
            nodes += [node] * left[-1]
            room -= left.pop()
    return None if left else tuple(nodes)

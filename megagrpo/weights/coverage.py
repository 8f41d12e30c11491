"""Geometry of boxes: what is left of one after taking others away, and whether pieces tile a region exactly."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

import numpy as np

from megagrpo.weights.boxes import Box

Region = tuple[tuple[int, ...], tuple[int, ...]]
"""Start and shape of a block, in whatever coordinates its axes have."""


def subtract(box: Box, hole: Box) -> list[Box]:
    """The part of `box` outside `hole`, as disjoint boxes: at most two for each axis."""
    common = box.intersect(hole)
    if common is None:
        return [box]
    left, start, shape = [], list(box.start), list(box.shape)
    for axis, (low, size) in enumerate(zip(common.start, common.shape, strict=True)):
        before, after = low - start[axis], start[axis] + shape[axis] - low - size
        if before:
            left.append(Box(box.tensor, tuple(start), (*shape[:axis], before, *shape[axis + 1 :])))
        if after:
            beyond = (*start[:axis], low + size, *start[axis + 1 :])
            left.append(Box(box.tensor, beyond, (*shape[:axis], after, *shape[axis + 1 :])))
        start[axis], shape[axis] = low, size
    return left


def uncovered(box: Box, by: Iterable[Box]) -> list[Box]:
    """The part of `box` that none of the others covers, as disjoint boxes."""
    left = [box]
    for other in by:
        left = [piece for part in left for piece in subtract(part, other)]
        if not left:
            break
    return left


def first_overlap(regions: Sequence[Region]) -> tuple[int, int] | None:
    """Indices of two regions with a common element, or None."""
    if len(regions) < 2 or not regions[0][0]:  # scalars: two of them are the same element
        return (0, 1) if len(regions) > 1 else None
    starts = np.array([start for start, _ in regions])
    ends = starts + np.array([shape for _, shape in regions])
    order = np.argsort(starts[:, 0], kind="stable")
    reach = np.maximum.accumulate(ends[order, 0])
    for position in range(1, len(order)):
        if reach[position - 1] <= starts[order[position], 0]:
            continue
        index, earlier = order[position], order[:position]
        meets = ((starts[earlier] < ends[index]) & (starts[index] < ends[earlier])).all(axis=1)
        if meets.any():
            return int(earlier[int(meets.argmax())]), int(index)
    return None


def tiling_error(region: Region, pieces: Sequence[Region]) -> str:
    """Why the pieces do not cover each element of the region exactly once; empty if they do."""
    start, shape = region
    for piece_start, piece_shape in pieces:
        inside = zip(start, shape, piece_start, piece_shape, strict=True)
        if any(p < s or p + m > s + n for s, n, p, m in inside):
            return f"{describe((piece_start, piece_shape))} is outside {describe(region)}"
    if (overlap := first_overlap(pieces)) is not None:
        first, second = (describe(pieces[index]) for index in overlap)
        return f"{first} and {second} overlap"
    missing = prod(shape) - sum(prod(piece_shape) for _, piece_shape in pieces)
    return f"{missing} of {prod(shape)} elements are missing" if missing else ""


def describe(region: Region) -> str:
    """A region as Python would slice it: [0:128, 64:96]."""
    start, shape = region
    return "[" + ", ".join(f"{low}:{low + size}" for low, size in zip(start, shape, strict=True)) + "]"

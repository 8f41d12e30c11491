"""Coverage: the difference of two boxes, pieces that tile a region, storages and sources that are complete."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np

from megagrpo.errors import Problem, WeightPlanError, few
from megagrpo.weights.boxes import Box, Manifest, Placement
from megagrpo.weights.families.parts.part import Tensor


def subtract(box: Box, hole: Box) -> list[Box]:
    """Returns the part of `box` outside `hole`, as disjoint boxes: at most two for each axis."""
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
    """Returns the part of `box` that the other boxes leave uncovered, as disjoint boxes."""
    left = [box]
    for other in by:
        left = [piece for part in left for piece in subtract(part, other)]
        if not left:
            break
    return left


def first_overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Returns the indices of two boxes of a tensor that share an element, or None."""
    if len(boxes) < 2 or not boxes[0].start:  # scalars: two of them are the same element
        return (0, 1) if len(boxes) > 1 else None
    starts = np.array([box.start for box in boxes])
    ends = starts + np.array([box.shape for box in boxes])
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


def tiling_error(box: Box, pieces: Sequence[Box]) -> str:
    """Returns the reason why the pieces do not cover each element of the box exactly once; empty if they do."""
    for piece in pieces:
        if not _contains(box, piece):
            return f"{as_slice(piece)} is outside {as_slice(box)}"
    if (overlap := first_overlap(pieces)) is not None:
        first, second = (as_slice(pieces[index]) for index in overlap)
        return f"{first} and {second} overlap"
    missing = box.elements - sum(piece.elements for piece in pieces)
    return f"{missing} of {box.elements} elements are missing" if missing else ""


def as_slice(box: Box) -> str:
    """Returns a box in Python's slice notation: [0:128, 64:96]."""
    return "[" + ", ".join(f"{low}:{low + size}" for low, size in zip(box.start, box.shape, strict=True)) + "]"


def storage_problems(manifest: Manifest) -> list[Problem]:
    """Returns a problem for each storage with an element that boxes and fills do not cover exactly once."""
    regions: dict[str, list[Box]] = {name: [] for name in manifest.storages}
    for placement in manifest.placements:
        regions[placement.storage].append(Box("", placement.at, placement.local_shape))
    for fill in manifest.fills:
        regions[fill.storage].append(Box("", fill.at, fill.shape))
    problems = []
    for name, storage in manifest.storages.items():
        whole = Box("", (0,) * len(storage.shape), storage.shape)
        if error := _storage_error(whole, tuple(regions[name])):
            problems.append(Problem(f"{manifest.holder}: {name}", error, "every element written exactly once"))
    return problems


_storage_error = lru_cache(maxsize=4096)(tiling_error)
"""Cached, because the storages of all layers and of all ranks are cut in the same few ways."""


def check_sources(tensors: Iterable[Tensor], sources: Sequence[Manifest]) -> None:
    """Raises WeightPlanError if no source holds some element of a tensor, naming the holders of its other elements.
    Raises it likewise if a source holds a tensor or a region that lies outside `tensors`."""
    boxes: dict[str, list[tuple[str, Box]]] = defaultdict(list)
    for manifest in sources:
        for placement in manifest.placements:
            boxes[placement.box.tensor].append((manifest.holder, placement.box))
    problems = []
    for tensor in tensors:
        whole = tensor.box
        held = boxes.pop(tensor.name, [])
        holders = few(sorted({holder for holder, _ in held})) or "no source"
        for holder, box in held:
            if len(box.shape) != len(whole.shape) or subtract(box, whole):
                region = as_slice(box)
                problems.append(Problem(tensor.name, f"{holder} has {region}", f"a part of {list(tensor.shape)}"))
                break
        else:
            if left := uncovered(whole, {box for _, box in held}):
                parts = few([as_slice(part) for part in left])
                problems.append(Problem(tensor.name, f"no source has {parts}", "every element", f"the rest: {holders}"))
    for name, held in boxes.items():
        problems.append(
            Problem(name, f"held by {few(sorted({holder for holder, _ in held}))}", "a tensor of the model")
        )
    if problems:
        raise WeightPlanError(problems)


class Located:
    """An index of a manifest's placements, which finds those around a box."""

    def __init__(self, manifest: Manifest) -> None:
        self._storages = manifest.storages
        placements: dict[str, list[Placement]] = defaultdict(list)
        for placement in manifest.placements:
            placements[placement.box.tensor].append(placement)
        self._by_tensor = {tensor: sorted(of_tensor, key=_start_of) for tensor, of_tensor in placements.items()}

    def around(self, box: Box, dtype: str | None = None) -> list[Placement]:
        """Returns the placements that contain all of a box, in storages of `dtype`; None: of any. Their order depends
        on the manifest alone."""
        placements = self._by_tensor.get(box.tensor, [])
        before = placements[: bisect_right(placements, box.start, key=_start_of)]
        of_dtype = (its for its in before if dtype in (None, self._storages[its.storage].dtype))
        return [whole for whole in of_dtype if _contains(whole.box, box)]

    def whole_of(self, part: Placement) -> Placement | None:
        """Returns the placement around `part`: the same storage, the same offset between local and box; or None."""
        return next((whole for whole in self.around(part.box) if whole.part(part.box) == part), None)


def _start_of(placement: Placement) -> tuple[int, ...]:
    return placement.box.start


def _contains(box: Box, part: Box) -> bool:
    for low, whole, begin, size in zip(box.start, box.shape, part.start, part.shape, strict=True):
        if begin < low or begin + size > low + whole:
            return False
    return True

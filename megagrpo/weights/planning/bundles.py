"""Bundles: bytes that are held by the same sources and wanted by the same destinations.

A model has a hundred thousand tensors and a cluster thousands of ranks, but ranks that differ only in a replica hold
the same boxes, and tensors that differ only in their layer or their expert are cut in the same way. Boxes are therefore
intersected once for each kind of tensor, between classes of ranks, which gives a few thousand bundles.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod

from megagrpo.errors import Problem, WeightPlanError
from megagrpo.weights.boxes import ITEM_BYTES, Box, HolderClass
from megagrpo.weights.coverage import as_slice, few, first_overlap, subtract


@dataclass(frozen=True, slots=True)
class Block:
    """The same region of several checkpoint tensors."""

    tensors: tuple[str, ...]
    start: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Bundle:
    """Boxes one after another, as a line of bytes that both ends cut at the same places.

    If a destination has several placements for the same box, this bundle fills the `copy`-th of them.
    """

    holders: tuple[int, ...]
    wanted_by: tuple[int, ...]
    dtype: str
    copy: int
    blocks: tuple[Block, ...]

    @cached_property
    def _edges(self) -> list[int]:
        """Returns the first byte of each block, and the end of the last one."""
        item_bytes = ITEM_BYTES[self.dtype]
        sizes = (len(block.tensors) * prod(block.shape) * item_bytes for block in self.blocks)
        return [0, *accumulate(sizes)]

    @property
    def bytes(self) -> int:
        return self._edges[-1]

    def cut(self, at: int) -> int:
        """Returns the nearest byte to `at` where the line can be cut: between two rows of a box, or between boxes."""
        if at <= 0 or at >= self.bytes:
            return min(max(at, 0), self.bytes)
        index, tensor_bytes, row_bytes, _ = self._block_at(at)
        tensor, within = divmod(at - self._edges[index], tensor_bytes)
        return self._edges[index] + tensor * tensor_bytes + round(within / row_bytes) * row_bytes

    def boxes(self, begin: int, end: int) -> Iterator[Box]:
        """Yields the boxes between bytes `begin` and `end`, which `cut` has returned."""
        while begin < end:
            index, tensor_bytes, row_bytes, axis = self._block_at(begin)
            block, until = self.blocks[index], min(end, self._edges[index + 1])
            while begin < until:
                tensor, within = divmod(begin - self._edges[index], tensor_bytes)
                taken = min(tensor_bytes - within, until - begin)
                start, shape = block.start, block.shape
                if taken < tensor_bytes:
                    low, rows = within // row_bytes, taken // row_bytes
                    start = (*start[:axis], start[axis] + low, *start[axis + 1 :])
                    shape = (*shape[:axis], rows, *shape[axis + 1 :])
                yield Box(block.tensors[tensor], start, shape)
                begin += taken

    def _block_at(self, at: int) -> tuple[int, int, int, int]:
        """Returns, of the block at this byte: its index, the bytes of one box and of one row, and the rows' axis."""
        index = bisect_right(self._edges, at) - 1
        shape, item_bytes = self.blocks[index].shape, ITEM_BYTES[self.dtype]
        axis = next((axis for axis, size in enumerate(shape) if size > 1), 0)
        return index, prod(shape) * item_bytes, prod(shape[axis + 1 :]) * item_bytes, axis


_Held = tuple[tuple[int, ...], tuple[int, ...], int]  # start, shape, class
_Wanted = tuple[tuple[int, ...], tuple[int, ...], int, str]  # and dtype
_Classes = tuple[int, ...]
_Key = tuple[_Classes, _Classes, str, int]
"""Holders, takers, dtype and copy of a bundle's elements."""


def bundles_of(sources: Sequence[HolderClass], destinations: Sequence[HolderClass]) -> list[Bundle]:
    """Returns bundles of all elements that destinations want. An element that is wanted in two dtypes, or twice by one
    destination, is in two bundles. Raises WeightPlanError, naming each tensor with elements that no source holds."""
    held: dict[str, list[_Held]] = defaultdict(list)
    for index, of_class in enumerate(sources):
        for placement in of_class.manifest.placements:
            held[placement.box.tensor].append((placement.box.start, placement.box.shape, index))
    wanted: dict[str, list[_Wanted]] = defaultdict(list)
    for index, of_class in enumerate(destinations):
        storages = of_class.manifest.storages
        for placement in of_class.manifest.placements:
            box = placement.box
            wanted[box.tensor].append((box.start, box.shape, index, storages[placement.storage].dtype))
    kinds: dict[tuple[tuple[_Held, ...], tuple[_Wanted, ...]], list[str]] = defaultdict(list)
    for tensor, wants in wanted.items():
        kinds[tuple(held.get(tensor, ())), tuple(wants)].append(tensor)

    blocks: dict[_Key, list[Block]] = defaultdict(list)
    problems = []
    for (holds, wishes), tensors in kinds.items():
        cells, missing = _cells(holds, wishes)
        if missing:
            problems += [_missing_source(tensor, missing, holds, sources, destinations) for tensor in tensors]
        for box, key in cells:
            blocks[key].append(Block(tuple(tensors), box.start, box.shape))
    if problems:
        raise WeightPlanError(problems)
    members: dict[tuple[int, _Classes], tuple[int, ...]] = {}

    def ranks_of(side: int, classes: _Classes) -> tuple[int, ...]:
        of_side = (sources, destinations)[side]
        if (side, classes) not in members:
            members[side, classes] = tuple(sorted(member for index in classes for member in of_side[index].members))
        return members[side, classes]

    return [
        Bundle(ranks_of(0, holders), ranks_of(1, wanted_by), dtype, copy, tuple(of_bundle))
        for (holders, wanted_by, dtype, copy), of_bundle in blocks.items()
    ]


def _cells(
    holds: Sequence[_Held], wants: Sequence[_Wanted]
) -> tuple[list[tuple[Box, _Key]], list[tuple[Box, _Classes]]]:
    """Returns boxes of one kind of tensor, by the holders and takers of their elements; and regions that no source
    holds, with the classes that want them."""
    sources = disjoint((start, shape, index) for start, shape, index in holds)
    cells: list[tuple[Box, _Key]] = []
    missing: list[tuple[Box, _Classes]] = []
    for dtype in dict.fromkeys(dtype for *_, dtype in wants):
        of_dtype = [(start, shape, index) for start, shape, index, its in wants if its == dtype]
        # Each placement counts as a holder, so that a class that wants an element twice is counted twice.
        placements = disjoint((start, shape, ordinal) for ordinal, (start, shape, _) in enumerate(of_dtype))
        for box, ordinals in placements:
            times = Counter(of_dtype[ordinal][2] for ordinal in ordinals)
            left = [box]
            for other, holders in sources:
                if box.start and other.start[0] >= box.start[0] + box.shape[0]:
                    break
                common = box.intersect(other)
                if common is None:
                    continue
                left = [piece for part in left for piece in subtract(part, common)]
                for copy in range(max(times.values())):
                    classes = tuple(sorted(index for index, count in times.items() if count > copy))
                    cells.append((common, (holders, classes, dtype, copy)))
            missing += [(part, tuple(times)) for part in left]
    return cells, missing


def _missing_source(
    tensor: str,
    missing: Sequence[tuple[Box, _Classes]],
    holds: Sequence[_Held],
    sources: Sequence[HolderClass],
    destinations: Sequence[HolderClass],
) -> Problem:
    parts = [
        f"{as_slice(box)} for {destinations[index].manifest.holder}" for box, classes in missing for index in classes
    ]
    holders = few([sources[index].manifest.holder for index in sorted({index for *_, index in holds})])
    given = f"no source for {few(parts)}"
    return Problem(tensor, given, "a source for every element", f"held by: {holders or 'no source at all'}")


def disjoint(held: Iterable[tuple[tuple[int, ...], tuple[int, ...], int]]) -> list[tuple[Box, tuple[int, ...]]]:
    """Cuts regions (start, shape, holder) so that no two overlap; returns each with all its holders, by first row."""
    holders: dict[Box, set[int]] = defaultdict(set)
    for start, shape, holder in held:
        holders[Box("", start, shape)].add(holder)
    boxes = list(holders.items())
    if first_overlap(list(holders)) is not None:
        cells: list[tuple[Box, set[int]]] = []
        for box, of_box in boxes:
            left, cut = [box], []
            for cell, others in cells:
                common = cell.intersect(box)
                if common is None:
                    cut.append((cell, others))
                    continue
                cut.append((common, others | of_box))
                cut += [(part, others) for part in subtract(cell, common)]
                left = [piece for part in left for piece in subtract(part, common)]
            cells = cut + [(part, of_box) for part in left]
        boxes = cells
    return sorted(((box, tuple(sorted(of_box))) for box, of_box in boxes), key=lambda item: item[0].start)

"""The conversion of a flat range of a local parameter to boxes in checkpoint coordinates. Pure arithmetic.

The distributed optimizer cuts a parameter's memory anywhere, even within a row. A range of a matrix is at most three
boxes: the end of a row, whole rows, the beginning of a row. So every state of every rank is a set of boxes of
checkpoint tensors, and a checkpoint made of them does not depend on the layout that wrote it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from megagrpo.weights.boxes import Box, Fill, Placement

Strided = tuple[tuple[int, ...], tuple[int, ...], int]
"""Shape, strides and offset (from its begin) of a part of a flat range, in elements, for torch.as_strided."""


def boxes_in_range(
    placement: Placement, storage_shape: Sequence[int], start: int, stop: int
) -> Iterator[tuple[Box, Strided]]:
    """Yields boxes of `placement` held by elements start .. stop of its storage (contiguous, of `storage_shape`).

    A view's axes are its box's.
    """
    for region in _regions(tuple(storage_shape), start, stop):
        if (part := placement.within(region)) is not None:
            _, strides, offset = _strided(part.at, part.local_shape, storage_shape, start)
            of_box = (strides[part.axes.index(axis)] for axis in range(len(part.box.shape)))
            yield part.box, (part.box.shape, tuple(of_box), offset)


def fills_in_range(fill: Fill, storage_shape: Sequence[int], start: int, stop: int) -> list[Strided]:
    """Returns the parts of `fill` held by elements start .. stop of its storage."""
    filled = Box("", fill.at, fill.shape)
    regions = [filled.intersect(region) for region in _regions(tuple(storage_shape), start, stop)]
    return [_strided(part.start, part.shape, storage_shape, start) for part in regions if part is not None]


def _regions(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Yields elements start .. stop of a contiguous tensor as axis-aligned regions, in order."""
    if start >= stop:
        return
    if len(shape) == 1:
        yield Box("", (start,), (stop - start,))
        return
    row = prod(shape[1:])
    first_whole, last_whole = -(-start // row), stop // row
    if first_whole > last_whole:  # the range begins and ends within one row
        yield from _within_row(shape, last_whole, start, stop)
        return
    if start < first_whole * row:
        yield from _within_row(shape, first_whole - 1, start, first_whole * row)
    if first_whole < last_whole:
        yield Box("", (first_whole, *(0,) * (len(shape) - 1)), (last_whole - first_whole, *shape[1:]))
    if last_whole * row < stop:
        yield from _within_row(shape, last_whole, last_whole * row, stop)


def _within_row(shape: tuple[int, ...], index: int, start: int, stop: int) -> Iterator[Box]:
    begin = index * prod(shape[1:])
    for part in _regions(shape[1:], start - begin, stop - begin):
        yield Box("", (index, *part.start), (1, *part.shape))


def _strided(at: tuple[int, ...], shape: tuple[int, ...], storage_shape: Sequence[int], start: int) -> Strided:
    strides = tuple(prod(storage_shape[axis + 1 :]) for axis in range(len(storage_shape)))
    return shape, strides, sum(a * s for a, s in zip(at, strides, strict=True)) - start

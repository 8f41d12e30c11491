"""Flat ranges of local parameters become boxes of checkpoint tensors: every element once, at the right place."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megagrpo.megatron.state import boxes_in_range, fills_in_range
from megagrpo.weights.boxes import Box, Fill, Placement


@st.composite
def cut_storage(draw: Any) -> tuple[Placement, tuple[int, ...], list[int]]:
    """A placement somewhere in a storage of one to three axes, perhaps transposed, and where the storage is cut."""
    axes = draw(st.sampled_from([(0,), (0, 1), (1, 0), (None, 0, 1), (None, 1, 0), (2, 0, 1)]))
    shape = tuple(1 if axis is None else draw(st.integers(1, 5)) for axis in axes)
    margin = [(draw(st.integers(0, 2)), draw(st.integers(0, 2))) for _ in axes]
    storage = tuple(before + size + after for size, (before, after) in zip(shape, margin, strict=True))
    ranks = max(axis for axis in axes if axis is not None) + 1
    box_shape = tuple(shape[axes.index(axis)] for axis in range(ranks))
    box = Box("t", tuple(draw(st.integers(0, 3)) for _ in box_shape), box_shape)
    elements = torch.Size(storage).numel()
    cuts = sorted(draw(st.lists(st.integers(0, elements), max_size=4)))
    return Placement("s", tuple(before for before, _ in margin), axes, box), storage, [0, *cuts, elements]


@settings(max_examples=300)
@given(cut_storage())
def test_the_ranges_of_a_storage_hold_each_element_of_its_box_once_and_in_place(
    case: tuple[Placement, tuple[int, ...], list[int]],
) -> None:
    placement, shape, cuts = case
    local = torch.arange(torch.Size(shape).numel())
    whole = local.view(shape)[tuple(slice(a, a + n) for a, n in zip(placement.at, placement.local_shape, strict=True))]
    keep = [size for size, axis in zip(placement.local_shape, placement.axes, strict=True) if axis is not None]
    order = [axis for axis in placement.axes if axis is not None]
    expected = whole.reshape(keep).permute([order.index(axis) for axis in range(len(order))])
    box = placement.box
    rebuilt, times = torch.full(box.shape, -1), torch.zeros(box.shape, dtype=torch.int)
    for start, stop in itertools.pairwise(cuts):
        flat = local[start:stop].clone()
        for part, view in boxes_in_range(placement, shape, start, stop):
            values = torch.as_strided(flat, *view)
            into = tuple(slice(a - o, a - o + n) for a, n, o in zip(part.start, part.shape, box.start, strict=True))
            rebuilt[into] = values
            times[into] += 1
    assert torch.equal(rebuilt, expected)
    assert bool((times == 1).all())


def test_a_range_of_a_matrix_is_at_most_three_boxes() -> None:
    placement = Placement("s", (0, 0), (0, 1), Box("t", (10, 0), (6, 4)))
    parts = boxes_in_range(placement, (6, 4), 3, 22)
    assert [(box.start, box.shape) for box, _ in parts] == [((10, 3), (1, 1)), ((11, 0), (4, 4)), ((15, 0), (1, 2))]


def test_padding_is_found_in_the_range_that_holds_it() -> None:
    fill = Fill("s", (4, 0), (2, 3))
    flat = torch.arange(8, 16)
    values = [torch.as_strided(flat, *view) for view in fills_in_range(fill, (6, 3), 8, 16)]
    assert torch.cat([value.flatten() for value in values]).tolist() == [12, 13, 14, 15]

"""Geometry of boxes against painting them, element by element."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megagrpo.weights.boxes import Box
from megagrpo.weights.coverage import first_overlap, subtract, tiling_error, uncovered

SIDE = 6


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    ends = [sorted(draw(st.lists(st.integers(0, SIDE), min_size=2, max_size=2, unique=True))) for _ in range(2)]
    return Box("w", tuple(low for low, _ in ends), tuple(high - low for low, high in ends))


def painted(*some: Box) -> np.ndarray:
    """How many of the boxes each element of a 6 x 6 matrix is in."""
    counts = np.zeros((SIDE, SIDE), int)
    for box in some:
        counts[tuple(slice(start, start + size) for start, size in zip(box.start, box.shape, strict=True))] += 1
    return counts


@given(box=boxes(), hole=boxes())
def test_what_is_left_and_the_hole_make_up_the_box(box: Box, hole: Box) -> None:
    left = painted(*subtract(box, hole))
    assert (left == painted(box) * (painted(hole) == 0)).all()


@given(box=boxes(), others=st.lists(boxes(), max_size=4))
def test_uncovered_is_what_no_other_box_has(box: Box, others: list[Box]) -> None:
    assert (painted(*uncovered(box, others)) == painted(box) * (painted(*others) == 0)).all()


@given(some=st.lists(boxes(), max_size=6))
def test_overlaps_and_gaps_are_found(some: list[Box]) -> None:
    regions = [(box.start, box.shape) for box in some]
    counts = painted(*some)
    overlap = first_overlap(regions)
    assert (overlap is not None) == bool((counts > 1).any())
    if overlap is not None:
        assert some[overlap[0]].intersect(some[overlap[1]]) is not None
    assert (tiling_error(((0, 0), (SIDE, SIDE)), regions) == "") == bool((counts == 1).all())


def test_scalars_overlap_themselves() -> None:
    scalar = Box("w", (), ())
    assert subtract(scalar, scalar) == []
    assert first_overlap([((), ())] * 2) == (0, 1)

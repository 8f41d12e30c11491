"""Arithmetic of layouts: every rank has a place of its own, every layer one chunk, and impossible sizes are found."""

from __future__ import annotations

from dataclasses import astuple, replace
from itertools import product
from math import prod

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megagrpo.layout.parallel import ParallelLayout, rank_grid
from megagrpo.layout.stages import layers_of_chunk

SIZE = st.integers(1, 4)
# Not interleaved. Some of these have expert sizes that do not fit the others.
LAYOUTS = st.builds(
    ParallelLayout, tensor=SIZE, pipeline=SIZE, context=SIZE, data=SIZE, expert=SIZE, expert_tensor=SIZE
)


@given(LAYOUTS)
def test_ranks_and_dense_coordinates_are_a_bijection(layout):
    grid = rank_grid(layout)
    assert [at.rank for at in grid] == list(range(layout.ranks))
    places = product(range(layout.pipeline), range(layout.data), range(layout.context), range(layout.tensor))
    # Sorted coordinates are in rank order: tensor is the fastest axis, pipeline the slowest.
    assert [(at.pipeline, at.data, at.context, at.tensor) for at in grid] == list(places)


@given(LAYOUTS)
def test_ranks_and_expert_coordinates_are_a_bijection(layout):
    assume(not layout.problems())
    places = product(
        range(layout.pipeline), range(layout.expert_data), range(layout.expert), range(layout.expert_tensor)
    )
    assert [(at.pipeline, at.expert_data, at.expert, at.expert_tensor) for at in rank_grid(layout)] == list(places)


@given(LAYOUTS)
def test_expert_axes_are_refused_exactly_if_they_do_not_fill_the_ranks_of_a_stage(layout):
    filled = layout.pipeline * layout.expert * layout.expert_tensor * layout.expert_data
    found = layout.problems()
    assert (found == []) == (filled == layout.ranks)
    for problem in found:
        assert f"{layout.expert} x {layout.expert_tensor} must divide tensor x context x data = " in problem


@given(
    LAYOUTS, st.sets(st.sampled_from([name for name, _ in ParallelLayout().sizes()]), min_size=1), st.integers(-2, 0)
)
def test_every_size_below_one_is_named(layout, names, size):
    found = replace(layout, **dict.fromkeys(names, size)).problems()
    assert sorted(found) == sorted(f"{name} must be at least 1, not {size}" for name in names)


@pytest.mark.parametrize(("pipeline", "chunks", "possible"), [(1, 1, True), (1, 2, False), (2, 2, True)])
def test_interleaving_needs_a_pipeline(pipeline, chunks, possible):
    problems = ParallelLayout(pipeline=pipeline, virtual_pipeline=chunks).problems()
    assert problems == ([] if possible else [f"virtual_pipeline = {chunks} needs pipeline of at least 2"])


@given(LAYOUTS)
def test_a_layout_is_described_by_the_sizes_that_matter(layout):
    described = str(layout)
    if described == "1 rank":
        assert set(astuple(layout)) == {1}
    else:
        sizes = {name: int(size) for name, size in (part.split(" ") for part in described.split(" x "))}
        assert min(sizes.values()) > 1
        assert ParallelLayout(**sizes) == layout


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4))
def test_chunks_partition_the_layers(per_chunk, pipeline, chunks):
    layers, layout = prod((per_chunk, pipeline, chunks)), ParallelLayout(pipeline=pipeline, virtual_pipeline=chunks)
    # The model passes through the stages once for each chunk.
    order = [
        layer
        for chunk in range(chunks)
        for stage in range(pipeline)
        for layer in layers_of_chunk(layers, layout, stage, chunk)
    ]
    assert order == list(range(layers))
    assert {len(layers_of_chunk(layers, layout, s, c)) for s in range(pipeline) for c in range(chunks)} == {per_chunk}

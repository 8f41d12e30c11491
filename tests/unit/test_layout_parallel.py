"""Arithmetic of layouts: every rank has a place of its own, every layer one chunk, and impossible sizes are found."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megagrpo.layout.parallel import ParallelLayout, layers_of_chunk, layers_of_stages, rank_grid, stage_problems

SIZE = st.integers(1, 4)
# Not interleaved. Some of these have expert sizes that do not fit the others.
LAYOUTS = st.builds(
    ParallelLayout, tensor=SIZE, pipeline=SIZE, context=SIZE, data=SIZE, expert=SIZE, expert_tensor=SIZE
)


@given(LAYOUTS)
def test_ranks_and_their_dense_and_expert_coordinates_are_bijections(layout):
    grid = rank_grid(layout)
    assert [at.rank for at in grid] == list(range(layout.ranks))
    # Sorted coordinates are in rank order: tensor is the fastest axis, pipeline the slowest.
    dense = product(*map(range, (layout.pipeline, layout.data, layout.context, layout.tensor)))
    assert [(at.pipeline, at.data, at.context, at.tensor) for at in grid] == list(dense)
    if not layout.problems():
        expert = product(*map(range, (layout.pipeline, layout.expert_data, layout.expert, layout.expert_tensor)))
        assert [(at.pipeline, at.expert_data, at.expert, at.expert_tensor) for at in grid] == list(expert)


@given(LAYOUTS)
def test_expert_axes_are_refused_exactly_if_they_do_not_fill_the_ranks_of_a_stage(layout):
    filled = layout.pipeline * layout.expert * layout.expert_tensor * layout.expert_data
    found = layout.problems()
    assert (found == []) == (filled == layout.ranks)
    for problem in found:
        assert f"{layout.expert} x {layout.expert_tensor}" in problem


@given(
    LAYOUTS, st.sets(st.sampled_from([name for name, _ in ParallelLayout().sizes()]), min_size=1), st.integers(-2, 0)
)
def test_every_size_below_one_is_named(layout, names, size):
    found = replace(layout, **dict.fromkeys(names, size)).problems()
    assert sorted(problem.split()[0] for problem in found) == sorted(names)


@given(LAYOUTS)
def test_a_layout_is_described_by_the_sizes_that_matter(layout):
    described = str(layout)
    if described == "1 rank":
        assert set(dict(layout.sizes()).values()) == {1}
    else:
        sizes = {name: int(size) for name, size in (part.split(" ") for part in described.split(" x "))}
        assert min(sizes.values()) > 1
        assert ParallelLayout(**sizes) == layout


@st.composite
def uneven_stages(draw: st.DrawFn) -> tuple[int, ParallelLayout]:
    """A number of layers, and stages that can hold them, of equal length or not."""
    pipeline, chunks, share = (draw(st.integers(least, most)) for least, most in ((1, 5), (1, 3), (1, 4)))
    first, last = (draw(st.none() | st.integers(1, 4)) for _ in range(2))
    if pipeline == 1:
        first, last, chunks = None, None, 1
    if pipeline == 2 and chunks > 1 and last is not None:
        first = None
    layers = (first or share) + (last or share) + (pipeline - 2) * share
    lengths = {"first_stage_layers": first and first * chunks, "last_stage_layers": last and last * chunks}
    return layers * chunks, ParallelLayout(pipeline=pipeline, virtual_pipeline=chunks, **lengths)


@given(uneven_stages())
def test_stages_partition_the_layers(case):
    layers, layout = case
    assert layout.problems() == stage_problems(layers, layout) == []
    pipeline, chunks = layout.pipeline, layout.virtual_pipeline
    first, last = layout.first_stage_layers, layout.last_stage_layers
    order = [
        layer
        for chunk in range(chunks)
        for stage in range(pipeline)
        for layer in layers_of_chunk(layers, layout, stage, chunk)
    ]
    assert order == list(range(layers)), "the model passes through the stages once for each chunk"
    counts = layers_of_stages(layers, layout)
    assert sum(counts) == layers
    assert min(counts) >= 1
    assert counts[0] == (first or counts[0])
    assert counts[-1] == (last or counts[-1])
    others = counts[first is not None : len(counts) - (last is not None)]
    assert len(set(others)) <= 1
    assert str(layout).endswith(", ".join(f"{name} {length}" for name, length in layout.stage_lengths()))


@pytest.mark.parametrize(
    ("layers", "pipeline", "chunks", "first", "last"),
    [
        (61, 16, 1, None, None),  # not shared out equally
        (61, 16, 1, None, 2),
        (5, 3, 1, None, 4),  # too few are left
        (5, 2, 1, None, 6),
        (6, 2, 1, 2, 2),  # some are left over
        (9, 2, 2, None, 3),  # not a whole number in each chunk
        (6, 1, 1, 6, None),
        (6, 1, 2, None, None),  # interleaving needs a pipeline
        (6, 2, 1, 0, None),
        (12, 2, 2, 8, 4),  # Megatron takes one of them
    ],
)
def test_stages_that_cannot_be_are_refused(layers, pipeline, chunks, first, last):
    layout = ParallelLayout(
        pipeline=pipeline, virtual_pipeline=chunks, first_stage_layers=first, last_stage_layers=last
    )
    assert layout.problems() or stage_problems(layers, layout)

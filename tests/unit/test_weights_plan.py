"""Boxes against painting them, and plans between random layouts and random boxes against whole tensors."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megagrpo.errors import ModelError, WeightPlanError
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.weights.boxes import Box, Manifest, Placement, Storage
from megagrpo.weights.coverage import check_sources, first_overlap, storage_problems, subtract, tiling_error, uncovered
from megagrpo.weights.digest import digests
from megagrpo.weights.families import tensors_of
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.plan import ListedTransfers, WeightPlan, make_plan, plan_problems
from megagrpo.weights.sides.checkpoint import transformers_manifest
from megagrpo.weights.sides.megatron_rank import LOCAL_SPEC, TE_SPEC
from megagrpo.weights.views import box_view, stored_tensors
from tests.safetensors_files import stack_experts
from tests.weight_streams import all_transfers, assert_equal, carry_out, empty, manifests
from tests.weights_oracle import Tensors, architecture, held_by_ranks, moe_architecture, random_checkpoint

SIZES = st.sampled_from([1, 2, 4])
SIDE = 6

# --- boxes ------------------------------------------------------------------------------------------------------------


def inside(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(box.start, box.shape, strict=True))


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    ends = [sorted(draw(st.lists(st.integers(0, SIDE), min_size=2, max_size=2, unique=True))) for _ in range(2)]
    return Box("w", tuple(low for low, _ in ends), tuple(high - low for low, high in ends))


def painted(*some: Box) -> np.ndarray:
    """Counts the boxes that hold each element of a 6 x 6 matrix."""
    counts = np.zeros((SIDE, SIDE), int)
    for box in some:
        counts[inside(box)] += 1
    return counts


@given(box=boxes(), others=st.lists(boxes(), max_size=4))
def test_uncovered_is_what_no_other_box_has(box: Box, others: list[Box]) -> None:
    assert (painted(*uncovered(box, others)) == painted(box) * (painted(*others) == 0)).all()


@given(some=st.lists(boxes(), max_size=6))
def test_overlaps_and_gaps_are_found(some: list[Box]) -> None:
    counts = painted(*some)
    overlap = first_overlap(some)
    assert (overlap is not None) == bool((counts > 1).any())
    if overlap is not None:
        assert some[overlap[0]].intersect(some[overlap[1]]) is not None
    assert (tiling_error(Box("w", (0, 0), (SIDE, SIDE)), some) == "") == bool((counts == 1).all())


def test_scalars_overlap_themselves() -> None:
    scalar = Box("w", (), ())
    assert subtract(scalar, scalar) == []
    assert first_overlap([scalar] * 2) == (0, 1)


# --- random layouts ---------------------------------------------------------------------------------------------------


@st.composite
def layouts(draw: st.DrawFn) -> ParallelLayout:
    tensor, pipeline, data = draw(SIZES), draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 3]))
    chunks = draw(st.sampled_from([1, 2])) if pipeline > 1 else 1
    expert = draw(st.sampled_from([1, tensor]))
    return ParallelLayout(
        tensor=tensor,
        pipeline=pipeline,
        virtual_pipeline=chunks,
        first_stage_layers=draw(st.sampled_from([None, 1, 3])) if pipeline > chunks == 1 else None,
        data=data,
        expert=expert,
        expert_tensor=draw(st.sampled_from([size for size in (1, 2) if tensor * data % (expert * size) == 0])),
    )


@st.composite
def architectures(draw: st.DrawFn) -> Architecture:
    heads, groups = draw(st.sampled_from([(4, 1), (4, 2), (4, 4), (8, 2)]))
    changes = {"heads": heads, "groups": groups, "head_dim": 8, "vocab": draw(st.integers(5, 40))}
    if draw(st.booleans()):
        return moe_architecture(**changes)
    return architecture(**changes, tied_embeddings=draw(st.booleans()))


@settings(max_examples=25)
@given(
    arch=architectures(),
    before=layouts(),
    after=layouts(),
    te=st.booleans(),
    bucket_bytes=st.sampled_from([200, 999, 1 << 20]),
)
def test_any_layout_to_any_layout_moves_every_element_to_its_place(
    arch: Architecture, before: ParallelLayout, after: ParallelLayout, te: bool, bucket_bytes: int
) -> None:
    checkpoint = random_checkpoint(arch)
    sources = manifests(arch, before)
    destinations = manifests(arch, after, spec=TE_SPEC if te else LOCAL_SPEC)
    check_sources(tensors_of(arch), sources)
    arrived = carry_out(make_plan(sources, destinations), held_by_ranks(arch, before, checkpoint), bucket_bytes)
    for tensors, expected in zip(arrived, held_by_ranks(arch, after, checkpoint, te), strict=True):
        assert_equal(tensors, expected)


@pytest.mark.parametrize("arch", [architecture(tied_embeddings=True), moe_architecture()], ids=["tied", "moe"])
def test_transformers_gets_stacked_experts_cast_with_the_digests_of_the_checkpoint(arch: Architecture) -> None:
    layout = ParallelLayout(tensor=2, pipeline=2, data=2, expert=2)
    checkpoint, manifest = random_checkpoint(arch), transformers_manifest(arch, "bfloat16")
    plan = make_plan(manifests(arch, layout), [manifest])
    [model] = carry_out(plan, held_by_ranks(arch, layout, checkpoint), bucket_bytes=2000)
    cast = {name: tensor.bfloat16() for name, tensor in checkpoint.items()}
    assert_equal(model, stack_experts(cast) if arch.experts else cast)
    expected = digests(cast, whole_placements(arch))
    wide = {name: tensor.float() for name, tensor in model.items()}
    assert digests(wide, manifest.placements, dtype="bfloat16") == expected
    assert digests(wide, manifest.placements) != expected


def whole_placements(arch: Architecture) -> list[Placement]:
    """Each checkpoint tensor as a whole, in a storage of its own."""
    return [Placement.whole(tensor.box) for tensor in tensors_of(arch)]


# --- random boxes, as in no real layout -------------------------------------------------------------------------------


@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, int], copies: int) -> list[Manifest]:
    """Holders that together have every element of a matrix at least once, in overlapping boxes, some transposed."""
    held = []
    for copy in range(copies):
        edges = [sorted({0, size, *draw(st.lists(st.integers(1, size - 1), max_size=2))}) for size in shape]
        for row, (top, bottom) in enumerate(zip(edges[0], edges[0][1:], strict=False)):
            for column, (left, right) in enumerate(zip(edges[1], edges[1][1:], strict=False)):
                box = Box("w", (top, left), (bottom - top, right - left))
                axes = draw(st.sampled_from([(0, 1), (1, 0)]))
                local = (box.shape[axes[0]], box.shape[axes[1]])
                name = f"copy {copy} part {row}, {column}"
                storages = {"s": Storage("s", (1, *local), "float32")}
                held.append(Manifest(name, storages, (Placement("s", (0, 0, 0), (None, *axes), box),)))
    return held


@settings(max_examples=50)
@given(data=st.data(), rows=st.integers(2, 9), columns=st.integers(2, 9))
def test_overlapping_and_transposed_boxes(data: st.DataObject, rows: int, columns: int) -> None:
    whole = torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns)

    def holding(manifest: Manifest) -> Tensors:
        [placement] = manifest.placements
        tensors = empty(manifest)
        box_view(tensors["s"], placement).copy_(whole[inside(placement.box)])
        return tensors

    sources = data.draw(tilings((rows, columns), data.draw(st.integers(1, 3))))
    destinations = data.draw(tilings((rows, columns), 1))
    arrived = carry_out(make_plan(sources, destinations), [holding(manifest) for manifest in sources])
    for manifest, tensors in zip(destinations, arrived, strict=True):
        assert_equal(tensors, holding(manifest))


# --- controls: a plan or a manifest that is not right is seen ---------------------------------------------------------


@cache
def small_plan() -> tuple[WeightPlan, list[Tensors], Tensors]:
    arch, layout = architecture(), ParallelLayout(tensor=2, data=2)
    checkpoint = random_checkpoint(arch)
    plan = make_plan(manifests(arch, layout), [transformers_manifest(arch, "float32")])
    return plan, held_by_ranks(arch, layout, checkpoint), checkpoint


@settings(max_examples=30)
@given(data=st.data())
def test_a_dropped_doubled_or_shifted_transfer_is_seen(data: st.DataObject) -> None:
    plan, held, checkpoint = small_plan()
    assert not plan_problems(plan)
    transfers = list(all_transfers(plan))
    index = data.draw(st.integers(0, len(transfers) - 1))
    transfer = transfers.pop(index)
    dropped = replace(plan, transfers=ListedTransfers(transfers))
    assert transfer.box.tensor in str(plan_problems(dropped)[0])
    come = transfer.source_placement
    shifted = [
        replace(transfer, source_placement=replace(come, at=tuple(at + (i == axis) for i, at in enumerate(come.at))))
        for axis in range(len(come.at))
    ]
    for wrong in ([transfer, transfer], *([moved] for moved in shifted)):
        assert plan_problems(replace(plan, transfers=ListedTransfers([*transfers, *wrong])))
    [arrived] = carry_out(dropped, held)
    whole = whole_placements(architecture())
    assert digests(arrived, whole) != digests(checkpoint, whole)


def test_elements_that_no_source_holds_are_named_with_the_holders_of_the_rest() -> None:
    arch = architecture()
    first, second = manifests(arch, ParallelLayout(tensor=2))
    with pytest.raises(WeightPlanError) as caught:
        make_plan([first], [transformers_manifest(arch, "float32")])
    for words in ("model.layers.3.mlp.down_proj.weight", "[0:20, 14:28] for transformers", "held by: train rank 0"):
        assert words in str(caught.value)
    assert not any("layernorm" in problem.where for problem in caught.value.problems)
    with pytest.raises(WeightPlanError, match="no source has"):
        check_sources(tensors_of(arch), [second])
    with pytest.raises(WeightPlanError, match=r"lm_head\.weight"):
        check_sources(tensors_of(architecture(tied_embeddings=True)), [first, second])


def test_a_storage_with_a_gap_or_an_overlap_is_refused() -> None:
    box, storage = Box("w", (0, 0), (2, 3)), {"s": Storage("s", (4, 3), "float32")}
    gap, overlap = (
        Manifest("rank 0", storage, tuple(Placement("s", (at, 0), (0, 1), box) for at in begins))
        for begins in ([0], [0, 1])
    )
    assert "6 of 12 elements are missing" in str(storage_problems(gap)[0])
    assert "[0:2, 0:3] and [1:3, 0:3] overlap" in str(storage_problems(overlap)[0])
    with pytest.raises(WeightPlanError, match="rank 0: s"):
        make_plan([gap], [gap])


def test_tensors_that_are_not_the_manifests_are_all_named() -> None:
    plan, held, _ = small_plan()
    name = "chunk0.decoder.final_layernorm.weight"
    wrong = {key: tensor for key, tensor in held[0].items() if key != name}
    wrong |= {"chunk0.other": torch.zeros(1), "chunk0.embedding.word_embeddings.weight": torch.zeros(3, 20)}
    with pytest.raises(ModelError) as caught:
        stored_tensors(plan.sources[0], wrong)
    found = [problem.where.split(": ")[1] for problem in caught.value.problems]
    assert found == [name, "chunk0.embedding.word_embeddings.weight", "chunk0.other"]

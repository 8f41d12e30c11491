"""Plans between random layouts and random boxes, carried out with buckets, against whole tensors."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megagrpo.errors import ModelError, WeightPlanError
from megagrpo.layout.parallel import ParallelLayout, rank_grid
from megagrpo.weights.boxes import Box, Manifest, Place, Placement, Storage, Topology
from megagrpo.weights.coverage import check_sources, storage_problems
from megagrpo.weights.digest import digests
from megagrpo.weights.families import tensors_of
from megagrpo.weights.families.architecture import Architecture, Tensor
from megagrpo.weights.plan import ListedTransfers, WeightPlan, make_plan, plan_problems
from megagrpo.weights.sides import transformers
from megagrpo.weights.sides.megatron_rank import LOCAL_SPEC, TE_SPEC
from megagrpo.weights.transport.buckets import buckets_between
from megagrpo.weights.views import box_view, stored_tensors
from tests.weight_streams import all_transfers, empty
from tests.weights_oracle import Tensors, architecture, moe_architecture, random_checkpoint, rank_tensors

SIZES = st.sampled_from([1, 2, 4])


@st.composite
def layouts(draw: st.DrawFn) -> ParallelLayout:
    tensor, pipeline = draw(SIZES), draw(st.sampled_from([1, 2]))
    chunks = draw(st.sampled_from([1, 2])) if pipeline > 1 else 1
    return ParallelLayout(
        tensor=tensor,
        pipeline=pipeline,
        virtual_pipeline=chunks,
        first_stage_layers=draw(st.sampled_from([None, 1, 3])) if pipeline > chunks == 1 else None,
        data=draw(st.sampled_from([1, 2])),
        expert=draw(st.sampled_from([1, tensor])),
    )


@st.composite
def architectures(draw: st.DrawFn) -> Architecture:
    heads, groups = draw(st.sampled_from([(4, 1), (4, 2), (4, 4), (8, 2)]))
    changes = {"heads": heads, "query_groups": groups, "head_dim": 8, "vocab": draw(st.integers(5, 40))}
    if draw(st.booleans()):
        return moe_architecture(**changes)
    return architecture(**changes, tied_embeddings=draw(st.booleans()))


def carry_out(plan: WeightPlan, held: list[Tensors], bucket_bytes: int = 1 << 20) -> list[Tensors]:
    """What the destinations hold after the plan has run through buckets."""
    arrived = [empty(manifest, padded=True) for manifest in plan.destinations]
    everyone = frozenset(range(len(plan.destinations)))
    for source, tensors in enumerate(held):
        for destination in plan.destinations_of(source):
            for bucket in buckets_between(plan, source, destination, everyone, bucket_bytes):
                assert bucket.bytes <= max(bucket_bytes, 4)
                flat = torch.empty(bucket.bytes, dtype=torch.uint8)
                bucket.pack(stored_tensors(plan.sources[source], tensors), flat)
                bucket.unpack(arrived[destination], flat)
    return arrived


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
    sources = [LOCAL_SPEC.manifest(arch, before, where, "float32") for where in rank_grid(before)]
    side = TE_SPEC if te else LOCAL_SPEC
    destinations = [side.manifest(arch, after, where, "float32") for where in rank_grid(after)]
    check_sources(tensors_of(arch), sources)
    held = [rank_tensors(arch, before, where, checkpoint) for where in rank_grid(before)]
    arrived = carry_out(make_plan(sources, destinations), held, bucket_bytes)
    for where, tensors in zip(rank_grid(after), arrived, strict=True):
        expected = rank_tensors(arch, after, where, checkpoint, te)
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[name], expected[name]) for name in expected)


@pytest.mark.parametrize("arch", [architecture(tied_embeddings=True), moe_architecture()], ids=["tied", "moe"])
def test_ranks_to_transformers_in_bfloat16(arch: Architecture) -> None:
    """What transformers holds: experts stacked in 3-D, and a cast on the way."""
    layout = ParallelLayout(tensor=2, pipeline=2, data=2, expert=2)
    checkpoint = random_checkpoint(arch)
    sources = [LOCAL_SPEC.manifest(arch, layout, where, "float32") for where in rank_grid(layout)]
    plan = make_plan(sources, [transformers.manifest(arch, "bfloat16")])
    held = [rank_tensors(arch, layout, where, checkpoint) for where in rank_grid(layout)]
    [model] = carry_out(plan, held, bucket_bytes=2000)
    for name, tensor in checkpoint.items():
        if ".experts." not in name:
            assert torch.equal(model[name], tensor.bfloat16())
    for layer in range(arch.layers if arch.experts else 0):
        prefix = f"model.layers.{layer}.mlp.experts."
        gate, up, down = (
            torch.stack([checkpoint[f"{prefix}{expert}.{kind}_proj.weight"] for expert in range(4)])
            for kind in ("gate", "up", "down")
        )
        assert torch.equal(model[prefix + "gate_up_proj"], torch.cat([gate, up], dim=1).bfloat16())
        assert torch.equal(model[prefix + "down_proj"], down.bfloat16())
    assert sum(sent_bytes(plan)) == sum(2 * tensor.numel() for tensor in checkpoint.values())


# --- random boxes: no layout that anybody would use -------------------------------------------------------------------


@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, int], copies: int) -> list[Manifest]:
    """Holders that together have every element of a matrix at least once, in overlapping boxes, some transposed."""
    manifests = []
    for copy in range(copies):
        edges = [sorted({0, size, *draw(st.lists(st.integers(1, size - 1), max_size=2))}) for size in shape]
        for row, (top, bottom) in enumerate(zip(edges[0], edges[0][1:], strict=False)):
            for column, (left, right) in enumerate(zip(edges[1], edges[1][1:], strict=False)):
                box = Box("w", (top, left), (bottom - top, right - left))
                axes = draw(st.sampled_from([(0, 1), (1, 0)]))
                local = (box.shape[axes[0]], box.shape[axes[1]])
                name = f"copy {copy} part {row}, {column}"
                storages = {"s": Storage("s", (1, *local), "float32")}
                manifests.append(Manifest(name, storages, (Placement("s", (0, 0, 0), (None, *axes), box),)))
    return manifests


@settings(max_examples=60)
@given(data=st.data(), rows=st.integers(2, 9), columns=st.integers(2, 9))
def test_overlapping_and_transposed_boxes(data: st.DataObject, rows: int, columns: int) -> None:
    whole = torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns)

    def holding(manifest: Manifest) -> Tensors:
        [placement] = manifest.placements
        tensors = empty(manifest)
        box = placement.box
        box_view(tensors["s"], placement).copy_(
            whole[box.start[0] : box.start[0] + box.shape[0], box.start[1] : box.start[1] + box.shape[1]]
        )
        return tensors

    sources = data.draw(tilings((rows, columns), data.draw(st.integers(1, 3))))
    destinations = data.draw(tilings((rows, columns), 1))
    arrived = carry_out(make_plan(sources, destinations), [holding(manifest) for manifest in sources])
    for manifest, tensors in zip(destinations, arrived, strict=True):
        assert torch.equal(tensors["s"], holding(manifest)["s"])


# --- controls: a plan that is not right is seen -----------------------------------------------------------------------


@cache
def small_plan() -> tuple[WeightPlan, list[Tensors], Tensors]:
    arch = architecture()
    layout = ParallelLayout(tensor=2, data=2)
    checkpoint = random_checkpoint(arch)
    sources = [LOCAL_SPEC.manifest(arch, layout, where, "float32") for where in rank_grid(layout)]
    held = [rank_tensors(arch, layout, where, checkpoint) for where in rank_grid(layout)]
    return make_plan(sources, [transformers.manifest(arch, "float32")]), held, checkpoint


@settings(max_examples=30)
@given(data=st.data())
def test_a_dropped_doubled_or_shifted_transfer_is_seen(data: st.DataObject) -> None:
    plan, held, checkpoint = small_plan()
    assert not plan_problems(plan)
    transfers = all_transfers(plan)
    index = data.draw(st.integers(0, len(transfers) - 1))
    transfer = transfers[index]
    before, after = transfers[:index], transfers[index + 1 :]
    dropped = replace_transfers(plan, before + after)
    assert transfer.box.tensor in str(plan_problems(dropped)[0])
    assert plan_problems(replace_transfers(plan, (*before, transfer, transfer, *after)))

    come = transfer.source_placement
    for axis in range(len(come.at)):
        moved = Placement(come.storage, tuple(at + (i == axis) for i, at in enumerate(come.at)), come.axes, come.box)
        assert plan_problems(replace_transfers(plan, (*before, replace(transfer, source_placement=moved), *after)))

    [arrived] = carry_out(dropped, held)
    whole = [whole_placement(tensor) for tensor in tensors_of(architecture())]
    assert digests(arrived, whole) != digests(checkpoint, whole)


def replace_transfers(plan: WeightPlan, transfers: tuple) -> WeightPlan:
    return replace(plan, transfers=ListedTransfers(transfers))


def sent_bytes(plan: WeightPlan) -> list[int]:
    """By source."""
    return [sum(map(plan.bytes_of, plan.outgoing(source))) for source in range(len(plan.sources))]


def whole_placement(tensor: Tensor) -> Placement:
    box = Box(tensor.name, (0,) * len(tensor.shape), tensor.shape)
    return Placement(tensor.name, box.start, tuple(range(len(box.shape))), box)


def test_elements_that_no_source_holds_are_named_with_the_holders_of_the_rest() -> None:
    arch, layout = architecture(), ParallelLayout(tensor=2)
    first, second = (LOCAL_SPEC.manifest(arch, layout, where, "float32") for where in rank_grid(layout))
    with pytest.raises(WeightPlanError) as caught:
        make_plan([first], [transformers.manifest(arch, "float32")])
    assert "model.layers.3.mlp.down_proj.weight" in str(caught.value)
    assert "[0:20, 14:28] for transformers" in str(caught.value)
    assert "held by: train rank 0" in str(caught.value)
    assert not any("layernorm" in problem.where for problem in caught.value.problems)
    check_sources(tensors_of(arch), [first, second])
    with pytest.raises(WeightPlanError, match="no source has"):
        check_sources(tensors_of(arch), [second])
    with pytest.raises(WeightPlanError, match=r"lm_head\.weight"):
        check_sources(tensors_of(architecture(tied_embeddings=True)), [first, second])


def test_a_storage_with_a_gap_or_an_overlap_is_refused() -> None:
    box = Box("w", (0, 0), (2, 3))
    storage = {"s": Storage("s", (4, 3), "float32")}
    gap = Manifest("rank 0", storage, (Placement("s", (0, 0), (0, 1), box),))
    overlap = Manifest("rank 0", storage, tuple(Placement("s", (at, 0), (0, 1), box) for at in (0, 1)))
    assert "6 of 12 elements are missing" in str(storage_problems(gap)[0])
    assert "[0:2, 0:3] and [1:3, 0:3] overlap" in str(storage_problems(overlap)[0])
    with pytest.raises(WeightPlanError, match="rank 0: s"):
        make_plan([gap], [gap])


# --- load -------------------------------------------------------------------------------------------------------------


def test_replicas_share_the_load() -> None:
    """The busiest rank sends at most a tenth more than its share, where others hold all that it has."""
    arch = architecture(hidden=128, ffn=512, vocab=4000, head_dim=32)
    for layout in (ParallelLayout(data=4), ParallelLayout(tensor=2, data=3), ParallelLayout(context=2, data=2)):
        sources = [LOCAL_SPEC.manifest(arch, layout, where, "float32") for where in rank_grid(layout)]
        sent = sent_bytes(make_plan(sources, [transformers.manifest(arch, "float32")]))
        assert max(sent) <= 1.1 * sum(sent) / len(sent), (str(layout), sent)


def test_a_source_in_the_same_place_is_preferred() -> None:
    arch, layout = architecture(), ParallelLayout(data=2)
    sources = [LOCAL_SPEC.manifest(arch, layout, where, "float32") for where in rank_grid(layout)]
    places = Place("a", 0), Place("b", 0)
    plan = make_plan(sources, sources, Topology(places, places))
    assert all(transfer.source == transfer.destination for transfer in all_transfers(plan))


# --- tensors ----------------------------------------------------------------------------------------------------------


def test_tensors_that_are_not_the_manifests_are_all_named() -> None:
    plan, held, _ = small_plan()
    name = "chunk0.decoder.final_layernorm.weight"
    wrong = {key: tensor for key, tensor in held[0].items() if key != name}
    wrong["chunk0.other"] = torch.zeros(1)
    wrong["chunk0.embedding.word_embeddings.weight"] = torch.zeros(3, 20)
    with pytest.raises(ModelError) as caught:
        stored_tensors(plan.sources[0], wrong)
    assert [problem.where.split(": ")[1] for problem in caught.value.problems] == [
        name, "chunk0.embedding.word_embeddings.weight", "chunk0.other",
    ]  # fmt: skip

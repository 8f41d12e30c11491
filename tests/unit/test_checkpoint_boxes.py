"""Flat ranges of local parameters become boxes of checkpoint tensors: every element once, at the right place."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megagrpo.checkpoint.state_boxes import (
    boxes_in_range,
    fills_in_range,
    first_holders,
)
from megagrpo.layout.parallel import ParallelLayout, rank_grid
from megagrpo.weights.boxes import Box, Fill, Placement
from megagrpo.weights.families import architecture_of, tensors_of
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.sides import megatron_local


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


@settings(deadline=None, max_examples=300)
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
        for part in boxes_in_range(placement, shape, start, stop):
            view = part.view
            values = torch.as_strided(flat, view.shape, view.strides, view.offset)
            into = tuple(slice(a - o, a - o + n) for a, n, o in zip(part.box.start, part.box.shape, box.start, strict=True))
            rebuilt[into] = values
            times[into] += 1
    assert torch.equal(rebuilt, expected) and bool((times == 1).all())


def test_a_range_of_a_matrix_is_at_most_three_boxes() -> None:
    placement = Placement("s", (0, 0), (0, 1), Box("t", (10, 0), (6, 4)))
    parts = boxes_in_range(placement, (6, 4), 3, 22)
    assert [(p.box.start, p.box.shape) for p in parts] == [((10, 3), (1, 1)), ((11, 0), (4, 4)), ((15, 0), (1, 2))]


def test_padding_is_found_in_the_range_that_holds_it() -> None:
    fill = Fill("s", (4, 0), (2, 3))
    flat = torch.arange(8, 16)
    values = [torch.as_strided(flat, v.shape, v.strides, v.offset) for v in fills_in_range(fill, (6, 3), 8, 16)]
    assert torch.cat([value.flatten() for value in values]).tolist() == [12, 13, 14, 15]


ARCHITECTURE = {
    "vocab_size": 131, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "rope_theta": 10000.0, "head_dim": 16,
}  # fmt: skip
MODELS = {
    "dense": ARCHITECTURE | {"model_type": "qwen2", "tie_word_embeddings": True},
    "experts": ARCHITECTURE
    | {
        "model_type": "qwen3_moe", "tie_word_embeddings": False, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 40, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
}  # fmt: skip


LAYOUTS = [
    ("dense", ParallelLayout()),
    ("dense", ParallelLayout(tensor=2, data=2)),
    ("dense", ParallelLayout(pipeline=2, virtual_pipeline=2, context=2)),
    ("dense", ParallelLayout(tensor=4)),
    ("experts", ParallelLayout(tensor=2, expert=2)),
    ("experts", ParallelLayout(tensor=2, expert_tensor=2, expert=2, data=4)),
    ("experts", ParallelLayout(pipeline=2, expert=2, data=4)),
]


@pytest.mark.parametrize(("model", "layout"), LAYOUTS)
def test_the_first_holders_together_hold_every_element_once(model: str, layout: ParallelLayout) -> None:
    arch: Architecture = architecture_of(MODELS[model])
    holders = first_holders(layout, lambda where: megatron_local.manifest(arch, layout, where, "float32"))
    held = {where.rank: megatron_local.manifest(arch, layout, where, "float32") for where in rank_grid(layout)}
    for box, rank in holders.items():
        boxes = {r: [placement.box for placement in manifest.placements] for r, manifest in held.items()}
        assert box in boxes[rank] and not any(box in boxes[lower] for lower in range(rank))
    for tensor in tensors_of(arch):
        boxes_of_tensor = [box for box in holders if box.tensor == tensor.name]
        assert sum(box.elements for box in boxes_of_tensor) == torch.Size(tensor.shape).numel()
        assert not any(a.intersect(b) for a in boxes_of_tensor for b in boxes_of_tensor if a is not b)

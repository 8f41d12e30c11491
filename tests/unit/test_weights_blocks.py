"""Weights in blocks of float8: from training ranks of many layouts into engines of many, against whole tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import pytest
import torch

from megagrpo.errors import ModelError
from megagrpo.layout.parallel import ParallelLayout, rank_grid
from megagrpo.plan.parameters import fetched_elements
from megagrpo.recipe.schema import EngineLayoutConfig
from megagrpo.weights.blocks import BLOCK, Preparation, prepare
from megagrpo.weights.boxes import Manifest
from megagrpo.weights.coverage import storage_problems
from megagrpo.weights.digest import digests
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.plan import WeightPlan, make_plan
from megagrpo.weights.quantizing import Quantizer, dequantize, quantize
from megagrpo.weights.sides import sglang
from megagrpo.weights.transport.sglang import check_derived, derive
from tests.weight_streams import carry_out, manifests, unlike_sent
from tests.weights_oracle import (
    Tensors,
    architecture,
    engine_tensors,
    held_by_ranks,
    latent_architecture,
    moe_architecture,
    random_checkpoint,
)

WHOLE: dict[str, Any] = {
    "layers": 2, "hidden": 256, "ffn": 512, "heads": 16, "groups": 8, "head_dim": 64, "vocab": 70, "expert_ffn": 256
}  # fmt: skip
UNEVEN = WHOLE | {"layers": 1, "hidden": 200, "heads": 8, "groups": 4}
DENSE, ROUTED = architecture(**WHOLE), moe_architecture(**UNEVEN)
LATENT = latent_architecture(
    **WHOLE | {"heads": 4}, query_rank=128, key_value_rank=96, plain_dim=64, rotary_dim=64, value_dim=64, shared_ffn=256
)
FOUR_RANKS = ParallelLayout(tensor=4, expert_tensor=4)
CASES = {
    "dense, whole blocks": (DENSE, ParallelLayout(tensor=2, pipeline=2, data=2), 2, 1),
    "dense, rows and columns cut within blocks": (DENSE, ParallelLayout(tensor=8), 2, 1),
    "dense, cut, with replicas": (DENSE, ParallelLayout(tensor=8, data=2), 4, 1),
    "experts whole": (ROUTED, ParallelLayout(tensor=2, data=2, expert=4), 2, 2),
    "experts cut, edges that are no whole block": (ROUTED, FOUR_RANKS, 2, 1),
    "latent attention": (LATENT, ParallelLayout(tensor=4, expert=2, expert_tensor=2), 2, 2),
}


def engines(arch: Architecture, tensor: int, expert: int) -> list[Manifest]:
    sizes = EngineLayoutConfig(tensor=tensor, expert=expert)
    return [sglang.manifest(arch, sizes, rank, "bfloat16", "cuda", quantization="fp8") for rank in range(tensor)]


def naive(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Block by block."""
    rows, columns = (-(-size // BLOCK) for size in weights.shape)
    values, scales = torch.empty(weights.shape, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
    for row in range(rows):
        for column in range(columns):
            at = slice(row * BLOCK, (row + 1) * BLOCK), slice(column * BLOCK, (column + 1) * BLOCK)
            largest = max(1e-4, weights[at].double().abs().max().item())
            scale = min(2.0**power for power in range(-40, 40) if largest <= 448 * 2.0**power)
            scales[row, column] = scale
            values[at] = (weights[at].double() / scale).to(torch.float8_e4m3fn)
    return values, scales


def stands_for(weights: torch.Tensor) -> torch.Tensor:
    """Block by block, the values that a matrix's blocks of float8 stand for."""
    values, scales = naive(weights)
    found = values.float()
    for row, of_row in enumerate(scales):
        for column, scale in enumerate(of_row):
            found[row * BLOCK : (row + 1) * BLOCK, column * BLOCK : (column + 1) * BLOCK] *= scale
    return found.to(weights.dtype)


def assert_served(rank: int, found: Tensors, arch: Architecture, tensor: int, expert: int, checkpoint: Tensors) -> None:
    """Checks that an engine rank has the blocks of its own unquantised parameters: it cuts between them."""
    sizes = EngineLayoutConfig(tensor=tensor, expert=expert)
    for name, whole in engine_tensors(arch, sizes, rank, "cuda", checkpoint).items():
        if f"{name}_scale_inv" not in found:
            assert torch.equal(found[name], whole), name
            continue
        matrices = whole if whole.dim() == 3 else whole[None]
        wanted = [torch.stack(both) for both in zip(*map(naive, matrices), strict=True)]
        for given, its in zip((found[name], found[f"{name}_scale_inv"]), wanted, strict=True):
            assert torch.equal(given.float(), its.view(given.shape).float()), name


@dataclass(frozen=True)
class Sent:
    preparation: Preparation
    plan: WeightPlan
    ready: list[Tensors]
    """Tensors that each training rank sends."""
    arrived: list[Tensors]


def sent_to(arch: Architecture, layout: ParallelLayout, tensor: int, expert: int, checkpoint: Tensors) -> Sent:
    held, served = manifests(arch, layout, "bfloat16"), engines(arch, tensor, expert)
    sources, preparation = prepare(held, served)
    assert preparation is not None
    ranks = held_by_ranks(arch, layout, checkpoint)
    fetched = carry_out(preparation.fetches, ranks) if preparation.fetches else [{}] * len(ranks)
    quantizers = [Quantizer(manifest, preparation, rank) for rank, manifest in enumerate(held)]
    assert [quantizer.manifest for quantizer in quantizers] == sources
    ready = [each.quantized(*both) for each, *both in zip(quantizers, ranks, fetched, strict=True)]
    plan = make_plan(sources, served)
    return Sent(preparation, plan, ready, carry_out(plan, ready))


@pytest.mark.parametrize("name", CASES)
def test_engines_get_the_blocks_of_whole_tensors(name: str) -> None:
    arch, layout, tensor, expert = CASES[name]
    checkpoint = random_checkpoint(arch, dtype=torch.bfloat16)
    sent = sent_to(arch, layout, tensor, expert, checkpoint)
    assert (sent.preparation.fetches is not None) == ("cut" in name or "latent" in name)
    served = sent.plan.destinations
    assert not [problem for manifest in served for problem in storage_problems(manifest)]
    for rank, tensors in enumerate(sent.arrived):
        assert_served(rank, tensors, arch, tensor, expert, checkpoint)
    found = [digests(its, manifest.placements) for its, manifest in zip(sent.arrived, served, strict=True)]
    assert not unlike_sent(sent.plan, sent.ready, found)


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_the_planner_knows_what_the_ranks_of_a_stage_fetch(name: str, staged: bool) -> None:
    arch, layout, tensor, expert = CASES[name]
    layout = replace(layout, pipeline=len(arch.layers)) if staged else layout
    _, preparation = prepare(manifests(arch, layout, "bfloat16"), engines(arch, tensor, expert))
    found = dict.fromkeys(range(layout.pipeline), 0)
    if preparation and preparation.fetches:
        for where, lacking in zip(rank_grid(layout), preparation.fetches.destinations, strict=True):
            elements = sum(prod(storage.shape) for storage in lacking.storages.values())
            found[where.pipeline] = max(found[where.pipeline], elements)
    assert {stage: fetched_elements(arch, layout, stage, False) for stage in found} == found


def cut_by_four() -> Sent:
    checkpoint = random_checkpoint(ROUTED, dtype=torch.bfloat16)
    return sent_to(ROUTED, FOUR_RANKS, 1, 1, checkpoint)


def test_a_changed_byte_is_found_by_the_digests_of_values_and_of_scales() -> None:
    sent = cut_by_four()
    manifest, arrived = sent.plan.destinations[0], sent.arrived[0]
    for storage, tensor in (
        ("model.layers.0.mlp.experts.w2_weight", "model.layers.0.mlp.experts.3.down_proj.weight_fp8"),
        ("model.layers.0.self_attn.qkv_proj.weight_scale_inv", "model.layers.0.self_attn.v_proj.weight_scale_inv"),
    ):
        last = arrived[storage].view(torch.uint8)
        last[(-1,) * last.dim()] ^= 1
        problems = unlike_sent(sent.plan, sent.ready, [digests(arrived, manifest.placements)])
        assert [problem.where.split()[0] for problem in problems] == [tensor]
        last[(-1,) * last.dim()] ^= 1


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_a_weight_that_is_not_finite_is_refused_by_name(value: float) -> None:
    checkpoint = random_checkpoint(ROUTED, dtype=torch.bfloat16)
    checkpoint["model.layers.0.mlp.experts.2.up_proj.weight"][200, 70] = value
    with pytest.raises(ModelError, match=r"experts\.2\.up_proj\.weight\n.*not finite") as refused:
        sent_to(ROUTED, ParallelLayout(), 1, 1, checkpoint)
    assert len(refused.value.problems) == 1


@pytest.mark.parametrize("size", [(128, 128), (1, 5), (300, 200), (576, 129)])
@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-7, 3e4, 0.0])
def test_values_and_scales_are_those_of_each_block(size: tuple[int, int], scale: float) -> None:
    weights = (torch.randn(size, generator=torch.Generator().manual_seed(1)) * scale).to(torch.bfloat16)
    values, scales = quantize(weights)
    for found, wanted in zip((values, scales), naive(weights), strict=True):
        assert torch.equal(found.float(), wanted.float())
    stands_for = dequantize(values, scales, torch.bfloat16)
    error = (stands_for.float() - weights.float()).abs()
    assert (error <= (weights.float().abs() / 16).clamp(min=scales.max() * 2**-10)).all()
    assert torch.equal(dequantize(*quantize(stands_for), torch.bfloat16), stands_for)  # again: nothing changes


@pytest.mark.parametrize(
    ("arch", "tensor", "named"),
    [
        (DENSE, 8, r"k_proj.weight in engine 0 rank 0\n.*\[0:64, 0:256\] of \[512, 256\]"),
        (
            architecture(**WHOLE | {"ffn": 576}),
            1,
            r"up_proj.weight .*\n.*\[0:576, 0:256\] of \[576, 256\], at \[576, 0\]",
        ),
        (architecture(**WHOLE | {"groups": 1}), 1, r"v_proj.weight"),
        (moe_architecture(**UNEVEN | {"expert_ffn": 192}), 1, r"experts\.0\.up_proj"),
    ],
)
def test_an_engine_that_would_cut_or_fuse_within_a_block_is_refused(
    arch: Architecture, tensor: int, named: str
) -> None:
    with pytest.raises(ModelError, match=named):
        engines(arch, tensor, 1)


def test_what_sglang_derives_must_follow_from_the_weights_that_came() -> None:
    values, scales = quantize(torch.randn(4 * 128, 96, generator=torch.Generator().manual_seed(1)).bfloat16())
    model, attention = torch.nn.Module(), torch.nn.Module()
    model.attention, attention.kv_b_proj = attention, torch.nn.Module()
    attention.kv_b_proj.weight, attention.kv_b_proj.weight_scale_inv = values, scales
    attention.qk_nope_head_dim, attention.v_head_dim = 96, 32
    heads = dequantize(values, scales, torch.bfloat16).unflatten(0, (4, 128))
    attention.w_kc, attention.w_vc = heads[:, :96].contiguous(), heads[:, 96:].transpose(1, 2).contiguous()
    check_derived(model)
    norm = model.norm = torch.nn.Module()
    norm.weight, norm.gemma_weight = torch.tensor([0.5]), torch.tensor([1.0])
    with pytest.raises(ModelError, match=r"norm\.gemma_weight"):
        check_derived(model)
    norm.refresh_gemma_weight = lambda: norm.gemma_weight.fill_(1.5)
    derive(model)
    check_derived(model)
    attention.w_vc[3, 5, 7] *= 2
    with pytest.raises(ModelError, match=r"attention\.w_vc"):
        check_derived(model)

"""Bytes of models at real sizes: against hand-made sums, and against a list of every parameter in a buffer."""

from __future__ import annotations

import json
from math import ceil, lcm, prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megagrpo.layout.parallel import ParallelLayout, rank_grid
from megagrpo.plan.known_models import known_models
from megagrpo.plan.memory.gradient_buffers import Bucket, Run, reversed_runs
from megagrpo.plan.memory.model_chunk import chunk_memory
from megagrpo.plan.memory.models import ModelMemory, TrainedMemory, model_memory
from megagrpo.plan.parameters import (
    active_parameters,
    expert_parameters,
    fused_layers,
    model_shard,
    rank_parameters,
    total_parameters,
)
from megagrpo.recipe.schema import Recipe, SftRecipe
from megagrpo.weights.families import read_architecture, tensors_of
from megagrpo.weights.families.architecture import Architecture, critic_of
from tests.weights_oracle import ARCHITECTURES

CASES = json.loads((Path(__file__).parents[1] / "golden" / "te_manifest.json").read_text())["cases"]
DEEPSEEK = "deepseek-ai/DeepSeek-V3"
SIZES = st.lists(
    st.tuples(st.lists(st.integers(1, 300), min_size=1, max_size=4), st.integers(1, 5)), min_size=1, max_size=5
)


def architecture(name: str) -> Architecture:
    return read_architecture(known_models()[name])


def recipe_of(layout: dict[str, Any], kind: type[Recipe] | type[SftRecipe] = Recipe, **sections: Any) -> Any:
    grpo: dict[str, Any] = {
        "data": {"train": [{"path": "unused"}]},
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 4},
        "reward": {"functions": [{"function": "gsm8k"}]},
    }
    sft: dict[str, Any] = {"kind": "sft", "data": {"train": [{"path": "unused"}], "examples_per_step": 4}}
    train = {"layout": layout, "total_steps": 1} | sections.pop("train", {})
    common = {"name": "memory", "model": {"path": "unused"}, "train": train}
    return kind.model_validate((grpo if kind is Recipe else sft) | common | sections)


@settings(max_examples=60)
@given(SIZES, st.integers(1, 9))
def test_shares_are_those_of_a_list_of_all_parameters(sizes: list[tuple[list[int], int]], ranks: int) -> None:
    """In the words of Megatron's _ParamAndGradBuffer: starts padded to 64 elements, the end to 128 and the ranks."""
    runs = [Run(tuple(elements), times) for elements, times in sizes]
    bucket = Bucket(reversed_runs(runs))
    in_order = [size for elements, times in sizes for _ in range(times) for size in elements][::-1]
    ranges, end = [], 0
    for size in in_order:
        start = ceil(end / 64) * 64
        ranges.append((start, end := start + size))
    padded = ceil(end / lcm(ranks, 128)) * lcm(ranks, 128)
    assert bucket.padded(ranks) == padded
    assert bucket.total == sum(in_order)
    part = padded // ranks
    for rank in range(ranks):
        low, high = rank * part, (rank + 1) * part
        held = sum(max(0, min(stop, high) - max(start, low)) for start, stop in ranges)
        assert bucket.share(rank, ranks) == held


def test_an_8b_model_on_one_gpu_costs_eighteen_bytes_for_each_parameter() -> None:
    arch = architecture("Qwen/Qwen3-8B")
    count = total_parameters(arch)
    recipe = recipe_of({}, train={"distributed_optimizer": False}, model={"path": "unused", "dtype": "bfloat16"})
    found = model_memory(arch, recipe, rank_grid(ParallelLayout())[0], "cpu")
    assert found == ModelMemory(TrainedMemory(2 * count, 4 * count, 4 * count, 8 * count, 0), 0, None)


def test_the_distributed_optimizer_shares_what_an_optimizer_needs() -> None:
    arch = architecture("meta-llama/Llama-3.1-70B-Instruct")
    recipe = recipe_of({"tensor": 8, "pipeline": 4, "data": 4})
    layout = recipe.train.layout.parallel()
    of_stage = [model_memory(arch, recipe, where, "cuda").policy for where in rank_grid(layout) if where.pipeline == 1]
    shard = rank_parameters(arch, layout, stage=1, fused=True).total
    assert {memory.gradients for memory in of_stage} == {4 * shard}, "all sizes divide by 128"
    assert {memory.main_parameters for memory in of_stage} == {4 * shard // 4}
    whole = sum(rank_parameters(arch, layout, stage, fused=True).total for stage in range(4))
    norms = (2 * 80 + 1) * arch.hidden * 7  # on each tensor rank
    assert whole * 8 == total_parameters(arch) + norms


def test_sft_and_recipes_without_a_penalty_have_no_reference() -> None:
    arch = architecture("Qwen/Qwen2.5-0.5B-Instruct")
    where = rank_grid(ParallelLayout())[0]
    sft = model_memory(arch, recipe_of({}, SftRecipe), where, "cuda")
    assert (sft.reference, sft.critic) == (0, None)
    penalty = model_memory(arch, recipe_of({}, algorithm={"kl": {"coefficient": 0.001}}), where, "cuda")
    assert penalty.reference == 2 * total_parameters(arch)
    assert penalty.policy == sft.policy


def test_released_parts_are_not_on_the_device() -> None:
    recipe = recipe_of({}, algorithm={"kl": {"coefficient": 0.1}, "advantage": {"name": "gae"}, "critic": {}})
    memory = model_memory(architecture("Qwen/Qwen2.5-0.5B-Instruct"), recipe, rank_grid(ParallelLayout())[0], "cuda")
    assert sum(memory.parts().values()) == memory.bytes
    assert list(memory.parts()) == ["parameters", "gradients", "optimizer", "reference", "critic"]
    assert list(memory.parts(released=["gradients", "critic"])) == ["parameters", "optimizer", "reference"]


@pytest.mark.parametrize(
    ("model", "active"),
    [
        ("Qwen/Qwen3-235B-A22B", 22.19e9),  # the model card says 22B,
        ("Qwen/Qwen3-30B-A3B", 3.35e9),  # 3.3B,
        (DEEPSEEK, 37.55e9),  # and arXiv:2412.19437 37B
    ],
)
def test_active_parameters_are_those_of_the_models_names(model: str, active: float) -> None:
    assert active_parameters(architecture(model)) == pytest.approx(active, rel=2e-3)


@pytest.mark.parametrize("model", known_models())
def test_total_parameters_are_those_of_the_checkpoint(model: str) -> None:
    for arch in (architecture(model), critic_of(architecture(model))):
        tensors = tensors_of(arch)
        assert total_parameters(arch) == sum(prod(tensor.shape) for tensor in tensors)
        assert expert_parameters(arch) == sum(prod(tensor.shape) for tensor in tensors if tensor.expert is not None)


def test_all_ranks_of_671b_on_2048_gpus_need_the_parameters_of_16_stages() -> None:
    arch = architecture(DEEPSEEK)
    recipe = recipe_of(
        {"tensor": 8, "pipeline": 16, "last_stage_layers": 1, "expert": 16, "expert_tensor": 1, "data": 16}
    )
    layout = recipe.train.layout.parallel()
    grid = rank_grid(layout)
    chunk_memory.cache_clear()
    memories = [model_memory(arch, recipe, where, "cuda") for where in grid]
    assert chunk_memory.cache_info().misses <= 16  # milliseconds each
    whole = sum(rank_parameters(arch, layout, stage, fused=True).experts for stage in range(16))
    assert whole * layout.expert == 58 * 256 * 3 * 7168 * 2048
    states = sum(memory.policy.main_parameters // 4 for where, memory in zip(grid, memories, strict=True))
    held_once = sum(
        layout.tensor * (held.total - held.experts) + layout.expert * held.experts
        for held in (rank_parameters(arch, layout, stage, fused=True) for stage in range(16))
    )
    assert states == held_once, "every shard has the optimizer's state once"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_fused_layers_have_their_modules_in_megatrons_order(case: dict[str, Any]) -> None:
    """As recorded from Megatron's own modules (tests/golden/record_te_manifest.py); transformer-engine's, which order
    a norm and its weight, are stood in for there."""
    arch, layout = ARCHITECTURES[case["kind"]](**case["architecture"]), ParallelLayout(**case["layout"])
    shard = model_shard(arch, layout.tensor, layout.expert, layout.expert_tensor, fused=True)
    for recorded in case["ranks"]:
        last = max(int(name.split(".")[3]) for name in recorded if ".layers." in name)
        found = [name.split(".", 4)[4] for name in recorded if f"decoder.layers.{last}." in name]
        planned = shard.sparse or shard.dense
        assert planned is not None
        names = [name.rpartition(".")[0] for name in found if not name.endswith("expert_bias")]
        assert [parameter.name.rpartition(".")[0] for parameter in planned.parameters] == names
        assert {parameter.name for parameter in planned.parameters} <= set(found)


def test_plans_for_gpus_expect_transformer_engine() -> None:
    train = recipe_of({}).train
    assert fused_layers(train, "cuda")
    assert not fused_layers(train, "cpu")
    assert not fused_layers(recipe_of({}, train={"lora": {}}).train, "cuda")

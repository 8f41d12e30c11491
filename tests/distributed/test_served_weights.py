"""The policy computes with the weights that quantised engines hold, and all else with its own (train.quantization)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from shutil import copytree
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from megagrpo.batching.rank_batches import RankBatch
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.megatron.model import named_tensors
from megagrpo.megatron.rank import TrainRank
from megagrpo.recipe.schema import Recipe
from megagrpo.weights.blocks import quantized_shapes
from megagrpo.weights.families import read_architecture, tensors_of
from megagrpo.weights.views import torch_dtype
from tests.distributed.conftest import CaseOf
from tests.distributed.layouts import ROWS
from tests.distributed.step_case import (
    StepResult,
    assemble,
    assert_same_step,
    grpo_step,
    in_checkpoint,
    load_reference,
    make_recipe,
)
from tests.distributed.step_ranks import Parts, gather, load_and_pass, on_ranks, states_of, step, update, weights_of
from tests.rollout_engines import model_directory, receive, start_engine
from tests.safetensors_files import saved
from tests.unit.test_weights_blocks import stands_for

SIZES: dict[str, dict[str, Any]] = {
    "qwen2_tied": {"hidden_size": 160, "intermediate_size": 272},
    "qwen3_moe": {"hidden_size": 136, "moe_intermediate_size": 140},
    "deepseek_v3": {"hidden_size": 144, "intermediate_size": 140, "moe_intermediate_size": 132},
}
"""Tensors of several blocks, which ranks cut within blocks, and smaller blocks at their edges."""


def recipe_of(layout: ParallelLayout, dtype: str = "float32", quantized: bool = True, **train: Any) -> Recipe:
    """Without weight decay: optimizer steps then depend on gradients alone."""
    both = {"quantization": "same_as_rollout"} if quantized else {}
    recipe = make_recipe(
        layout,
        model={"path": "unused", "dtype": dtype},
        rollout={"quantization": "fp8", "prompts_per_step": 4, "samples_per_prompt": 3, "temperature": 0.8},
        algorithm={"aggregation": "token_mean"},
        train={"distributed_optimizer": False} | both | train,
    )
    optimizer = recipe.train.optimizer.model_copy(update={"weight_decay": 0.0})
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"optimizer": optimizer})})


# --- bits -------------------------------------------------------------------------------------------------------------


def make_scales_matter(rank: TrainRank) -> None:
    """Makes weights differ by up to 2^20, and the parts of a block on different ranks by 8: a scale that is not the
    whole block's then rounds small weights otherwise."""
    weights, served = named_tensors(rank.policy.chunks), rank.served.weights()
    for name in served:
        exponents = torch.empty(weights[name].shape).uniform_(0, 20, generator=torch.Generator().manual_seed(1))
        index = rank.where.expert_tensor if ".experts." in name else rank.where.tensor
        weights[name].mul_(2.0 ** -(exponents + 3 * index))


def trained_and_served(rank: TrainRank, batch: RankBatch, advantages: np.ndarray) -> tuple[Parts, Parts, Parts]:
    """After an update: the weights, those of the policy's passes, and those of the reference's."""
    seen: dict[str, Parts] = {}
    compute = rank._compute_logprobs

    def watched(of: str, **how: Any) -> Any:
        seen[of] = weights_of(rank.policy)
        return compute(of, **how)

    rank._compute_logprobs = watched  # type: ignore[method-assign]
    load_and_pass(rank, batch)
    update(rank, advantages)
    make_scales_matter(rank)
    before = states_of(rank.policy)
    load_and_pass(rank, batch)
    with patch.object(rank, "routes", SimpleNamespace(left_out=nullcontext)):
        rank.compare_own_routes()
    with pytest.raises(IndexError):
        broken_pass(rank, seen)
    after = states_of(rank.policy)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    for which in ("update", "policy, by its own routes,"):
        for (_, found), (box, wanted) in zip(seen[which], seen["policy"], strict=True):
            np.testing.assert_array_equal(found, wanted, err_msg=str(box))
    return weights_of(rank.policy), seen["policy"], seen["reference"]


def broken_pass(rank: TrainRank, seen: dict[str, Parts]) -> None:
    with rank._as_served():
        seen["update"] = weights_of(rank.policy)
        raise IndexError


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("tensor, data", "float32"),
        pytest.param("four tensor ranks", "float32", marks=pytest.mark.long),
        ("expert over tensor", "bfloat16"),
        pytest.param("all", "float32", marks=pytest.mark.long),
        pytest.param("virtual, unequal", "bfloat16", marks=pytest.mark.long),
    ],
)
def test_passes_have_the_bits_of_engines_and_nothing_else_changes(
    name: str, dtype: str, case_of: CaseOf, tmp_path: Path
) -> None:
    family = ROWS[name].family
    case = case_of(family, **SIZES[family] | ROWS[name].changes)
    recipe = recipe_of(ROWS[name].layout, dtype)
    results = zip(*on_ranks(trained_and_served, recipe, case), strict=True)
    held, passing, reference = (assemble(parts) for parts in results)
    arch, tensors = read_architecture(case.directory), {}
    for tensor in tensors_of(arch):
        tensors[tensor.name] = torch.from_numpy(held[tensor.name]).to(torch_dtype(tensor.stored_as(dtype)))
    directory = model_directory(family, tmp_path, **SIZES[family] | ROWS[name].changes)
    save_file(tensors, directory / "model.safetensors")
    engine = start_engine(directory, "rollout.quantization=fp8", f"model.dtype={dtype}")
    receive(engine, directory)
    in_engine = in_checkpoint(arch)({its: tensor.double() for its, tensor in engine._model.state_dict().items()})
    quantized, changed = quantized_shapes(arch), 0
    for its, values in passing.items():
        np.testing.assert_array_equal(values, in_engine[its], err_msg=its)
        wanted = stands_for(tensors[its]) if its in quantized else tensors[its]
        np.testing.assert_array_equal(values, wanted.float().numpy(), err_msg=its)
        np.testing.assert_array_equal(reference[its], saved(case.directory)[its].to(wanted.dtype).float().numpy())
        changed += not torch.equal(wanted, tensors[its])
    assert changed == len(quantized)


# --- gradients --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def in_torch(case_of: CaseOf, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], StepResult]:
    """The step of a plain model whose weights are those that the blocks of the family's stand for."""

    @cache
    def made(family: str) -> StepResult:
        case = case_of(family, **SIZES[family])
        tensors = saved(case.directory)
        quantized = quantized_shapes(read_architecture(case.directory))
        tensors |= {name: stands_for(tensors[name]) for name in quantized}
        directory = copytree(case.directory, tmp_path_factory.mktemp("served") / family)
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
        return grpo_step(case, recipe_of(ParallelLayout()), load_reference(directory))

    return made


@pytest.mark.parametrize(
    ("name", "train"),
    [
        pytest.param("one rank", {}, marks=pytest.mark.long),
        pytest.param("four tensor ranks", {}, marks=pytest.mark.long),
        ("tensor, data", {"recompute": "full"}),
        pytest.param("expert, data", {}, marks=pytest.mark.long),
        ("expert, data", {"distributed_optimizer": True, "overlap": ["gradients"]}),
        pytest.param("all", {"distributed_optimizer": True}, marks=pytest.mark.long),
        pytest.param("expert over tensor", {"layer_spec": "transformer_engine"}, marks=pytest.mark.long),
    ],
)
def test_the_weights_get_the_gradients_of_the_served_ones(
    name: str, train: dict[str, Any], case_of: CaseOf, in_torch: Callable[[str], StepResult]
) -> None:
    family = ROWS[name].family
    case, wanted = case_of(family, **SIZES[family]), in_torch(family)
    whole = not train.get("distributed_optimizer")
    found = gather(on_ranks(step, recipe_of(ROWS[name].layout, **train), case), with_gradients=whole)
    assert_same_step(found, wanted if whole else replace(wanted, gradients={}))
    weights = saved(case.directory)
    for its, values in found.before.items():
        np.testing.assert_array_equal(values, weights[its].numpy(), err_msg=its)

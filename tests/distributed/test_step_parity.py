"""One GRPO step is the same in plain torch, in every layout, and however its sequences are packed.

Advantages of both signs, clipping on both sides, a KL term, an entropy bonus, responses from 1 token to the longest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megagrpo.batching.rank_batches import RankBatch, count_response_tokens
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.megatron import model_rank
from megagrpo.megatron.attention import PackedLatentAttention
from megagrpo.recipe.schema import Recipe
from tests.distributed.conftest import CaseOf
from tests.distributed.layouts import KINDS, ROWS, soak
from tests.distributed.step_case import (
    LIMITS,
    LONGEST,
    Case,
    StepResult,
    assert_same_step,
    differences,
    grpo_step,
    load_reference,
    make_recipe,
)
from tests.distributed.step_ranks import RankStep, gather, on_ranks, step
from tests.distributed.test_family_matrix import changes
from tests.tiny_models import DELTA_NET_FAMILIES


@dataclass(frozen=True)
class Family:
    """A batch, and the step on it in plain torch and on one training rank."""

    name: str
    case: Case
    in_torch: StepResult
    alone: StepResult


def recipe_of(family: str, layout: ParallelLayout, dtype: str = "float32", **train: Any) -> Recipe:
    """Without the distributed optimizer, which would leave each data rank with its part of the gradients."""
    return make_recipe(
        layout,
        model={"path": "unused", "dtype": dtype},
        algorithm={"aggregation": "seq_mean_token_mean" if KINDS.get(family) == "dense" else "token_mean"},
        train={"distributed_optimizer": False} | train,
    )


def run(recipe: Recipe, case: Case, function: Callable[..., RankStep] = step) -> StepResult:
    return gather(on_ranks(function, recipe, case))


@pytest.fixture(scope="module")
def family_of(case_of: CaseOf) -> Callable[[str], Family]:
    """The family, with its layers, that a row names."""

    @cache
    def made(name: str, **changes: int) -> Family:
        case, recipe = case_of(name, **changes), recipe_of(name, ParallelLayout())
        in_torch = grpo_step(case, recipe, load_reference(case.directory))
        return Family(name, case, in_torch, run(recipe, case))

    return lambda row: made(ROWS[row].family, **ROWS[row].changes)


@pytest.fixture(scope="module")
def dense(family_of: Callable[[str], Family]) -> Family:
    return family_of("one rank")


@pytest.mark.parametrize("name", ["one rank", "all", "tensor, data"])
def test_one_rank_agrees_with_transformers_and_autograd(name, family_of):
    assert_same_step(family_of(name).alone, family_of(name).in_torch)


@pytest.fixture(scope="module")
def in_layout(family_of: Callable[[str], Family]) -> Callable[[str], StepResult]:
    """The step of a row's layout, without the distributed optimizer."""

    @cache
    def made(row: str) -> StepResult:
        return run(recipe_of(family_of(row).name, ROWS[row].layout), family_of(row).case)

    return made


@pytest.mark.parametrize("name", [name for name in ROWS if name != "one rank"])
def test_every_layout_takes_the_same_step(name, family_of, in_layout):
    assert_same_step(in_layout(name), family_of(name).alone)


NEWER = ("gpt_oss", "qwen3_5_moe_text", "gemma3_text", "olmo3", "glm4_moe", "minimax_m2", "ernie4_5", "phi3")
OFTEN = [("gpt_oss", "expert over tensor"), ("minimax_m2", "all")]
NEWER_STEPS = [(family, name) for family in NEWER for name in ("all", "unequal, data", "expert over tensor")]


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *(pytest.param(*one, marks=pytest.mark.long) for one in OFTEN),
        *soak(*(one for one in NEWER_STEPS if one not in OFTEN)),
    ],
)
def test_newer_families_take_the_step_of_plain_torch_in_any_layout_and_packing(family, name, case_of):
    case = case_of(family, **changes(family, layers=4))
    recipe = recipe_of(family, ROWS[name].of(family), tokens_per_microbatch=2 * LONGEST)
    wanted = grpo_step(case, recipe, load_reference(case.directory))
    found = run(recipe, replace(case, sequences=case.sequences[::-1]))
    assert_same_step(found, wanted, slack=2 if family in DELTA_NET_FAMILIES else 1)


@pytest.mark.parametrize("name", ["context, data", "expert, data"])
def test_the_distributed_optimizer_takes_the_same_step(name, family_of, in_layout):
    family = family_of(name)
    recipe = recipe_of(family.name, ROWS[name].layout, distributed_optimizer=True)
    found = gather(on_ranks(step, recipe, family.case), with_gradients=False)
    apart = differences(found, replace(in_layout(name), gradients={}))
    assert apart["grad norm"] <= 1e-6, apart
    assert apart["change"] <= 1e-5, apart


def test_bfloat16_with_float32_gradients_stays_near_float32(dense):
    recipe = recipe_of(dense.name, ROWS["tensor"].layout, dtype="bfloat16")
    found = differences(run(recipe, dense.case), dense.alone)
    assert found["loss"] < 0.02, found
    assert found["grad norm"] < 0.1, found


def test_the_step_does_not_depend_on_packing(dense):
    backwards = replace(dense.case, sequences=dense.case.sequences[::-1])
    for tokens in (LONGEST + 30, 1000):
        recipe = recipe_of(dense.name, ParallelLayout(), tokens_per_microbatch=tokens)
        assert_same_step(run(recipe, backwards), dense.alone)


AROUND = {"embedding_scale": 3.3, "logit_scale": 2.2, "logit_cap": 0.9}


def read_with_scales() -> None:
    read = model_rank.read_architecture
    model_rank.read_architecture = lambda directory: replace(read(directory), **AROUND)


def with_scales(model: torch.nn.Module) -> torch.nn.Module:
    scale, factor, cap = AROUND.values()
    model.model.embed_tokens.register_forward_hook(lambda _, __, output: output * scale)
    model.lm_head.register_forward_hook(lambda _, __, output: cap * torch.tanh(output * factor / cap))
    return model


def test_embeddings_are_scaled_and_logits_scaled_and_capped(case_of: CaseOf) -> None:
    case, recipe = case_of("qwen2_tied"), recipe_of("qwen2_tied", ParallelLayout(tensor=2, pipeline=2))
    wanted = grpo_step(case, recipe, with_scales(load_reference(case.directory)))
    assert_same_step(gather(on_ranks(step, recipe, case, first=read_with_scales)), wanted)


def step_with_keys_of_own_heads(*args: Any) -> RankStep:
    """With Megatron's own gradient of the rotary part of latent attention's keys."""
    with patch.object(PackedLatentAttention, "with_whole_gradient", lambda self, key: key):
        return step(*args)


def test_megatrons_gradient_of_shared_keys_would_be_noticed(family_of):
    latent = family_of("tensor, data")
    recipe = recipe_of(latent.name, ROWS["tensor"].layout)
    found = differences(run(recipe, latent.case, step_with_keys_of_own_heads), latent.alone)
    assert found["loss"] <= LIMITS["loss"], found
    assert found["gradient"] > 0.1, found


def step_with_local_denominators(rank: Any, batch: RankBatch, *args: Any) -> RankStep:
    tokens = tuple(sum(count_response_tokens(micro.sequences) for micro in mini) for mini in batch.minibatches)
    rows = tuple(sum(len(micro.sequences) for micro in mini) for mini in batch.minibatches)
    return step(rank, replace(batch, tokens=tokens, rows=rows), *args)


def test_local_denominators_would_be_noticed(dense):
    recipe = recipe_of(dense.name, ParallelLayout(data=2))
    found = differences(run(recipe, dense.case, step_with_local_denominators), dense.alone)
    assert min(found["loss"], found["gradient"], found["grad norm"]) > 1e-3, found

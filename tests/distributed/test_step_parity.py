"""One GRPO step is the same in plain torch, in every layout, and however its sequences are packed.

Advantages of both signs, clipping on both sides, a KL term, an entropy bonus, responses from 1 token to the longest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from megagrpo.batching.rank_batches import RankBatch, count_response_tokens
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.recipe.schema import Recipe
from tests.distributed.grpo_case import (
    LONGEST,
    LR,
    Case,
    StepResult,
    load_reference,
    make_batches,
    make_case,
    make_recipe,
    transformers_step,
)
from tests.distributed.grpo_ranks import gather, on_ranks, step, step_with_keys_of_own_heads
from tests.tiny_models import make_model

LAYOUTS = {
    "tensor": ParallelLayout(tensor=2),
    "pipeline": ParallelLayout(pipeline=2),
    "tensor and pipeline": ParallelLayout(tensor=2, pipeline=2),
    "virtual pipeline": ParallelLayout(pipeline=2, virtual_pipeline=2),
    "stages of unequal length": ParallelLayout(pipeline=3, last_stage_layers=2),
    "context": ParallelLayout(context=2),
    "data": ParallelLayout(data=2),
}
EXPERT_LAYOUTS = {
    "expert": ParallelLayout(data=2, expert=2),
    "all": ParallelLayout(tensor=2, pipeline=2, virtual_pipeline=2, context=2, expert=2, expert_tensor=2),
}
LATENT_LAYOUTS = {
    "tensor": ParallelLayout(tensor=2),
    "context": ParallelLayout(context=2),
    "all": EXPERT_LAYOUTS["all"],
}
AGGREGATIONS = {"qwen2_tied": "seq_mean_token_mean", "qwen3_moe": "token_mean", "deepseek_v3": "token_mean"}


@dataclass(frozen=True)
class Family:
    """A model, a batch, and the step on it in plain torch and on one training rank."""

    name: str
    directory: Path
    case: Case
    in_torch: StepResult
    alone: StepResult

    def recipe(self, layout: ParallelLayout, tokens_per_microbatch: int = LONGEST) -> Recipe:
        train = {"distributed_optimizer": False, "tokens_per_microbatch": tokens_per_microbatch}
        return make_recipe(layout, algorithm={"aggregation": AGGREGATIONS[self.name]}, train=train)


def run(family: Family, recipe: Recipe, batches: list[RankBatch]) -> StepResult:
    return gather(on_ranks(step, recipe, family.directory, batches, family.case.advantages, LR))


def make_family(name: str, parent: Path) -> Family:
    directory = make_model(name, parent / name)
    model = load_reference(directory)
    family = Family(name, directory, make_case(model, 0.8), None, None)  # type: ignore[arg-type]
    recipe = family.recipe(ParallelLayout())
    in_torch = transformers_step(directory, model, family.case, recipe)
    alone = run(family, recipe, make_batches(recipe, family.case.sequences))
    return replace(family, in_torch=in_torch, alone=alone)


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> Family:
    return make_family("qwen2_tied", tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="module")
def experts(tmp_path_factory) -> Family:
    return make_family("qwen3_moe", tmp_path_factory.mktemp("experts"))


@pytest.fixture(scope="module")
def latent(tmp_path_factory) -> Family:
    return make_family("deepseek_v3", tmp_path_factory.mktemp("latent"))


def differences(got: StepResult, wanted: StepResult) -> dict[str, float]:
    """Of the loss; of any gradient, relative to its tensor's largest; of the whole change of weights, relative."""
    assert got.gradients.keys() == wanted.gradients.keys()
    return {
        "loss": abs(got.loss - wanted.loss),
        "gradient": max(
            np.abs(got.gradients[name] - wanted.gradients[name]).max() / np.abs(wanted.gradients[name]).max()
            for name in wanted.gradients
        ),
        "grad norm": abs(got.grad_norm / wanted.grad_norm - 1),
        "change": np.linalg.norm(got.change() - wanted.change()) / np.linalg.norm(wanted.change()),
    }


LIMITS = {"loss": 1e-6, "gradient": 1e-5, "grad norm": 1e-5, "change": 1e-3}


def assert_same_step(got: StepResult, wanted: StepResult) -> None:
    found = differences(got, wanted)
    assert all(found[name] <= limit for name, limit in LIMITS.items()), found


@pytest.mark.parametrize("name", ["dense", "experts", "latent"])
def test_one_rank_agrees_with_transformers_and_autograd(name, request):
    family = request.getfixturevalue(name)
    assert_same_step(family.alone, family.in_torch)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_takes_the_same_step(name, dense):
    recipe = dense.recipe(LAYOUTS[name])
    assert_same_step(run(dense, recipe, make_batches(recipe, dense.case.sequences)), dense.alone)


@pytest.mark.parametrize("name", EXPERT_LAYOUTS)
def test_every_layout_of_experts_takes_the_same_step(name, experts):
    recipe = experts.recipe(EXPERT_LAYOUTS[name])
    assert_same_step(run(experts, recipe, make_batches(recipe, experts.case.sequences)), experts.alone)


@pytest.mark.parametrize("name", LATENT_LAYOUTS)
def test_every_layout_of_latent_attention_takes_the_same_step(name, latent):
    recipe = latent.recipe(LATENT_LAYOUTS[name])
    assert_same_step(run(latent, recipe, make_batches(recipe, latent.case.sequences)), latent.alone)


def test_megatrons_gradient_of_shared_keys_would_be_noticed(latent):
    recipe = latent.recipe(LATENT_LAYOUTS["tensor"])
    batches = make_batches(recipe, latent.case.sequences)
    steps = on_ranks(step_with_keys_of_own_heads, recipe, latent.directory, batches, latent.case.advantages, LR)
    found = differences(gather(steps), latent.alone)
    assert found["loss"] <= LIMITS["loss"], found
    assert found["gradient"] > 0.1, found


def test_the_step_does_not_depend_on_packing(dense):
    for tokens_per_microbatch in (LONGEST + 30, 1000):
        recipe = dense.recipe(ParallelLayout(), tokens_per_microbatch)
        assert_same_step(run(dense, recipe, make_batches(recipe, dense.case.sequences[::-1])), dense.alone)


def test_local_denominators_would_be_noticed(dense):
    recipe = dense.recipe(LAYOUTS["data"])
    batches = [
        replace(
            batch,
            tokens=tuple(sum(count_response_tokens(micro.sequences) for micro in mini) for mini in batch.minibatches),
            sequences=tuple(sum(len(micro.sequences) for micro in mini) for mini in batch.minibatches),
        )
        for batch in make_batches(recipe, dense.case.sequences)
    ]
    found = differences(run(dense, recipe, batches), dense.alone)
    assert min(found["loss"], found["gradient"], found["grad norm"]) > 1e-3, found

"""One GRPO step is the same in plain torch, in every layout, and however its sequences are packed.

Advantages of both signs, clipping on both sides, a KL term, an entropy bonus, responses from 1 token to the longest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from megagrpo.batching.rank_batches import RankBatch, count_response_tokens
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.recipe.schema import Recipe
from tests.distributed.conftest import Tiny
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
from tests.distributed.layouts import KINDS, ROWS


@dataclass(frozen=True)
class Family:
    """A model, a batch, and the step on it in plain torch and on one training rank."""

    name: str
    directory: Path
    case: Case
    in_torch: StepResult
    alone: StepResult

    def recipe(self, layout: ParallelLayout, tokens_per_microbatch: int = LONGEST) -> Recipe:
        aggregation = "seq_mean_token_mean" if KINDS[self.name] == "dense" else "token_mean"
        train = {"distributed_optimizer": False, "tokens_per_microbatch": tokens_per_microbatch}
        return make_recipe(layout, algorithm={"aggregation": aggregation}, train=train)


def run(family: Family, recipe: Recipe, batches: list[RankBatch]) -> StepResult:
    return gather(on_ranks(step, recipe, family.directory, batches, family.case.advantages, LR))


def make_family(name: str, directory: Path) -> Family:
    model = load_reference(directory)
    family = Family(name, directory, make_case(model, 0.8), None, None)  # type: ignore[arg-type]
    recipe = family.recipe(ParallelLayout())
    in_torch = transformers_step(directory, model, family.case, recipe)
    alone = run(family, recipe, make_batches(recipe, family.case.sequences))
    return replace(family, in_torch=in_torch, alone=alone)


@pytest.fixture(scope="module")
def family_of(tiny: Tiny) -> Callable[[str], Family]:
    """The family, with its layers, that a row names."""
    made = cache(lambda name, layers: make_family(name, tiny(name, **dict(layers))))
    return lambda name: made(ROWS[name].family, tuple(ROWS[name].changes.items()))


@pytest.fixture(scope="module")
def dense(family_of: Callable[[str], Family]) -> Family:
    return family_of("one rank")


def differences(got: StepResult, wanted: StepResult) -> dict[str, float]:
    """The largest gradient difference is relative to its tensor's maximum; norm and change are relative too."""
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


@pytest.mark.parametrize("name", ["one rank", "all", "tensor, data"])
def test_one_rank_agrees_with_transformers_and_autograd(name, family_of):
    family = family_of(name)
    assert_same_step(family.alone, family.in_torch)


@pytest.mark.parametrize("name", [name for name in ROWS if name != "one rank"])
def test_every_layout_takes_the_same_step(name, family_of):
    family = family_of(name)
    recipe = family.recipe(ROWS[name].layout)
    assert_same_step(run(family, recipe, make_batches(recipe, family.case.sequences)), family.alone)


def test_megatrons_gradient_of_shared_keys_would_be_noticed(family_of):
    latent = family_of("tensor, data")
    recipe = latent.recipe(ROWS["tensor"].layout)
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
    recipe = dense.recipe(ParallelLayout(data=2))
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

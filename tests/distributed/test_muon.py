"""Muon's steps are those of a few lines of torch, the same in every layout, kept in checkpoints and out of the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megagrpo.algorithm.optimizer import OptimizerConfig
from megagrpo.batching.rank_batches import RankBatch
from megagrpo.checkpoint.torch_dist import TorchCheckpoint
from megagrpo.megatron.rank import TrainRank
from megagrpo.megatron.state import shards_of
from megagrpo.recipe.schema import Recipe, SftRecipe
from tests.distributed.conftest import CaseOf, Tiny
from tests.distributed.layouts import ROWS, soak
from tests.distributed.step_case import LR, Case, StepResult, conversations, make_recipe, make_sft_recipe
from tests.distributed.step_ranks import RankStep, gather, on_ranks, states_of, step, the_one
from tests.distributed.test_checkpoint_resume import (
    failed_loads,
    figures,
    load_and_continue,
    save_and_continue,
    step_and_save,
)
from tests.distributed.test_step_update import updates_around_broken_ones

# Another rate than the steps have: these set it themselves, in all groups of both optimizers.
MUON = {"kind": "muon", "lr": LR / 7, "weight_decay": 0.1, "clip_grad": 0.5}
COEFFICIENTS = [
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
]
FAMILIES = {"qwen3": "dense", "qwen3_moe": "experts", "deepseek_v3": "latent"}


def recipe_of(row: str, family: str, dtype: str = "float32", optimizer: Any = MUON, **train: Any) -> Recipe:
    layout = ROWS[row].of(family)
    return make_recipe(layout, model={"path": "unused", "dtype": dtype}, train={"optimizer": optimizer} | train)


def three_steps(rank: TrainRank, batch: RankBatch, advantages: np.ndarray) -> list[RankStep]:
    return [step(rank, batch, advantages) for _ in range(3)]


def steps_of(recipe: Recipe, case: Case, with_gradients: bool = False) -> list[StepResult]:
    found = zip(*on_ranks(three_steps, recipe, case), strict=True)
    return [gather(of_ranks, with_gradients) for of_ranks in found]


@pytest.fixture(scope="module")
def alone(case_of: CaseOf) -> Callable[[str], list[StepResult]]:
    return cache(
        lambda family: steps_of(recipe_of("one rank", family, distributed_optimizer=False), case_of(family), True)
    )


# --- plain torch ------------------------------------------------------------------------------------------------------


def orthogonalised(matrix: torch.Tensor) -> torch.Tensor:
    """Newton-Schulz in float64, times 0.2 sqrt(max(rows, columns))."""
    found = matrix / matrix.norm()
    for a, b, c in COEFFICIENTS:
        product = found @ found.T
        found = a * found + (b * product + c * product @ product) @ found
    return 0.2 * max(matrix.shape) ** 0.5 * found


def together(name: str) -> str:
    """Tensors that are one matrix of Megatron's, and not told apart."""
    return name.replace("up_proj", "gate_proj")


def in_torch(steps: list[StepResult], settings: OptimizerConfig) -> dict[str, torch.Tensor]:
    """Weights after steps with these gradients, by Muon and Adam as their papers have them."""
    first, second, momentum = settings.beta1, settings.beta2, settings.muon.momentum
    weights = {name: torch.from_numpy(value.copy()).double() for name, value in steps[0].before.items()}
    mean = {name: torch.zeros_like(value) for name, value in weights.items()}
    square = {name: torch.zeros_like(value) for name, value in weights.items()}
    for number, found in enumerate(steps, 1):
        clip = min(1.0, settings.clip_grad / (found.grad_norm + 1e-6))
        gradients = {name: torch.from_numpy(value).double() * clip for name, value in found.gradients.items()}
        for _, group in groupby(sorted(gradients, key=together), key=together):
            names = list(group)
            matrix = "layers" in names[0] and gradients[names[0]].dim() == 2
            for name in names:
                gradient, decay = gradients[name], 1 - LR * settings.weight_decay * (weights[name].dim() > 1)
                weights[name] *= decay
                mean[name].lerp_(gradient, 1 - (momentum if matrix else first))
                square[name].lerp_(gradient**2, 1 - second)
            if matrix:
                ahead = torch.cat([gradients[name].lerp(mean[name], momentum) for name in names])
                parts = orthogonalised(ahead).split([len(weights[name]) for name in names])
            else:
                parts = [
                    mean[name] / (1 - first**number) / ((square[name] / (1 - second**number)).sqrt() + settings.epsilon)
                    for name in names
                ]
            for name, part in zip(names, parts, strict=True):
                weights[name] -= LR * part
    return weights


@pytest.mark.parametrize("family", FAMILIES)
def test_three_steps_are_those_of_plain_torch(family: str, alone: Callable[[str], list[StepResult]]) -> None:
    steps = alone(family)
    wanted = in_torch(steps, recipe_of("one rank", family).train.optimizer)
    for name, value in wanted.items():
        before, after = steps[0].before[name], steps[-1].after[name]
        if name not in steps[0].gradients:
            continue  # a router's bias
        apart = np.linalg.norm(after - value.numpy()) / np.linalg.norm(after - before)
        assert apart <= 1e-5, name


# --- layouts ----------------------------------------------------------------------------------------------------------

LAYOUTS = [
    ("tensor, data", "qwen3", {}),
    ("expert, data", "qwen3_moe", {}),
    ("unequal, context, expert", "deepseek_v3", {}),
    ("expert over tensor", "qwen3_moe", {"distributed_optimizer": False}),
    ("all", "qwen3_moe", {}),
    ("tensor, data", "deepseek_v3", {"distributed_optimizer": False}),
    ("virtual, context", "qwen3", {}),
    ("expert, data", "qwen3_moe", {"layer_spec": "transformer_engine"}),
    ("tensor, data", "deepseek_v3", {"layer_spec": "transformer_engine"}),
]


@pytest.mark.parametrize(
    ("name", "family", "train"),
    [*LAYOUTS[:2], *(pytest.param(*one, marks=pytest.mark.long) for one in LAYOUTS[2:4]), *soak(*LAYOUTS[4:])],
)
def test_every_layout_takes_the_same_three_steps(
    name: str, family: str, train: dict[str, Any], alone: Callable[[str], list[StepResult]], case_of: CaseOf
) -> None:
    found = steps_of(recipe_of(name, family, **train), case_of(family))
    for one, wanted in zip(found, alone(family), strict=True):
        assert one.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-4)
    got, wanted = (replace(steps[-1], before=steps[0].before).change() for steps in (found, alone(family)))
    assert np.linalg.norm(got - wanted) <= 3e-5 * np.linalg.norm(wanted)


@pytest.mark.parametrize("name", [*soak("tensor, data"), "unequal, data"])
def test_exchanges_beside_passes_change_no_number(name: str, case_of: CaseOf) -> None:
    overlap = ["gradients", "parameters"]
    recipes = (recipe_of(name, "qwen3", "bfloat16", overlap=which) for which in ([], overlap))
    (*_, wanted), (*_, found) = (steps_of(recipe, case_of("qwen3")) for recipe in recipes)
    assert found.grad_norm == wanted.grad_norm
    for tensor, value in wanted.after.items():
        np.testing.assert_array_equal(found.after[tensor], value)


# --- skipped steps, memory, checkpoints -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "family", "dtype"),
    [("expert, data", "qwen3_moe", "float32"), *soak(("tensor, data", "qwen3", "bfloat16"))],
)
def test_a_step_with_a_nan_on_one_rank_is_skipped_on_all_and_leaves_nothing_behind(
    name: str, family: str, dtype: str, case_of: CaseOf
) -> None:
    recipe = recipe_of(name, family, dtype)
    broken, whole = (on_ranks(updates_around_broken_ones, recipe, case_of(family), which) for which in (1, None))
    assert the_one(skipped for skipped, _ in broken).skipped_steps == 1
    for (_, found), (_, wanted) in zip(broken, whole, strict=True):
        assert any(key.startswith("momentum.") and value.any() for key, value in wanted.items())
        assert all(torch.equal(found[key], value) for key, value in wanted.items())


def two_steps(rank: TrainRank, batch: RankBatch, advantages: np.ndarray, release: bool) -> dict[str, torch.Tensor]:
    """States after two updates, between which everything may be released and restored."""
    parts = ("parameters", "gradients", "optimizer")
    step(rank, batch, advantages)
    if release:
        held = [tensor for shard in shards_of(rank.policy.optimizer).values() for tensor in shard.tensors.values()]
        rank.release(parts)
        assert not any(tensor.untyped_storage().nbytes() for tensor in held)
        rank.restore(parts)
    step(rank, batch, advantages)
    return states_of(rank.policy)


def test_released_momentum_is_gone_and_comes_back_bit_for_bit(case_of: CaseOf) -> None:
    recipe = recipe_of("tensor, data", "qwen3", "bfloat16")
    wanted, found = (on_ranks(two_steps, recipe, case_of("qwen3"), release) for release in (False, True))
    for own, other in zip(found, wanted, strict=True):
        assert own.keys() == other.keys()
        assert all(torch.equal(own[key], value) for key, value in other.items())


def sft_recipe(name: str, family: str, kind: str = "muon", dtype: str = "float32") -> SftRecipe:
    layout, optimizer = ROWS[name].of(family), {"kind": kind, "lr": LR, "clip_grad": 0.5}
    return make_sft_recipe(layout, dtype, optimizer=optimizer)


CHAIN = [
    ("unequal, data", "tensor, data", "qwen3"),
    ("expert, data", "expert over tensor", "qwen3_moe"),
    ("unequal, context, expert", "one rank", "deepseek_v3"),
]


@pytest.mark.parametrize(("saved", "loaded", "family"), [*CHAIN[:2], *soak(CHAIN[2])])
def test_a_run_continues_in_the_same_layout_bit_for_bit_and_in_another(
    saved: str, loaded: str, family: str, tiny: Tiny, tmp_path: Path
) -> None:
    model = conversations(tiny(family))
    run = on_ranks(save_and_continue, sft_recipe(saved, family), model, tmp_path)
    keys = TorchCheckpoint(tmp_path).tensors
    matrix, norm = "model.layers.1.self_attn.o_proj.weight", "model.norm.weight"
    assert {key.partition(".")[0] for key in keys if key.endswith(matrix)} == {"param", "momentum"}
    assert {key.partition(".")[0] for key in keys if key.endswith(norm)} == {"param", "exp_avg", "exp_avg_sq"}
    again = on_ranks(load_and_continue, sft_recipe(saved, family), model, tmp_path)
    for whole, continued in zip(run, again, strict=True):
        assert continued["after"] == whole["after"]
        assert all(torch.equal(value, whole["states"][key]) for key, value in continued["states"].items())
    other = on_ranks(load_and_continue, sft_recipe(loaded, family), model, tmp_path)
    assert figures(other) == pytest.approx(figures(run), rel=3e-5)


def test_a_checkpoint_of_the_other_optimizer_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    model = conversations(tiny("qwen3"))
    for kind, other in (("adam", "muon"), ("muon", "adam")):
        directory = tmp_path / kind
        on_ranks(step_and_save, sft_recipe("tensor", "qwen3", kind), model, directory)
        for (message,) in on_ranks(failed_loads, sft_recipe("tensor", "qwen3", other), model, [directory]):
            assert f"given: {kind}" in message, message
            assert f"train.optimizer.kind: {other}" in message
            assert message.count("given:") == 1

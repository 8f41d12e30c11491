"""Adapters on real ranks: their gradients, updates and merged weights are those of transformers and plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from megatron.core.tensor_parallel.layers import LinearWithFrozenWeight

from megagrpo.batching.rank_batches import RankBatch
from megagrpo.convert.merge_lora import merge_lora
from megagrpo.convert.targets import to_hugging_face
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.megatron.model import named_tensors
from megagrpo.megatron.rank import TrainRank
from megagrpo.recipe.schema import Recipe
from megagrpo.weights.families import read_architecture
from megagrpo.weights.files.adapters import adapted_matrices, initial_a, key_a, key_b
from megagrpo.weights.sides.checkpoint import transformers_manifest
from megagrpo.weights.views import box_view
from tests.distributed.conftest import CaseOf, Tiny
from tests.distributed.layouts import ROWS, soak
from tests.distributed.step_case import (
    Case,
    StepResult,
    assemble,
    assert_same_step,
    clip_and_step,
    grpo_step,
    in_checkpoint,
    load_reference,
    make_case,
    make_recipe,
)
from tests.distributed.step_ranks import (
    Parts,
    RankStep,
    export_adapter,
    gather,
    load_and_pass,
    on_ranks,
    save,
    step,
    the_one,
    trained_of,
    update,
    weights_of,
)
from tests.safetensors_files import saved
from tests.tiny_models import COMPOSITES, OTHER_FAMILIES

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SETTINGS = {"rank": 3, "alpha": 6.0}
SCALE = 2.0


@dataclass(frozen=True)
class AdapterStep:
    initial: Parts
    step: RankStep
    merged: Parts


def put(rank: TrainRank, values: dict[str, np.ndarray]) -> None:
    """Whole adapters, by PEFT's names, into a rank whose optimizer has no main weights of its own."""
    tensors = rank.policy.adapters.tensors()
    for p in rank.policy.adapters.manifest.placements:
        at = tuple(slice(a, a + n) for a, n in zip(p.box.start, p.box.shape, strict=True))
        box_view(tensors[p.storage], p).copy_(torch.from_numpy(values[p.box.tensor][at]))


@contextmanager
def gradients_row_by_row() -> Iterator[None]:
    """Fails for a gradient with strides for which torch multiplies it by a frozen weight token by token."""
    backward = LinearWithFrozenWeight.backward

    def checked(ctx: Any, gradient: torch.Tensor) -> Any:
        assert gradient.stride() == torch.empty(gradient.shape).stride(), gradient.shape
        return backward(ctx, gradient)

    with mock.patch.object(LinearWithFrozenWeight, "backward", staticmethod(checked)):
        yield


def step_from(rank: TrainRank, batch: RankBatch, advantages: Any, values: dict[str, np.ndarray]) -> AdapterStep:
    """A step from these adapters. The base model stays, and zeros where an adapter has no matrix."""
    adapters = rank.policy.adapters
    initial = trained_of(rank.policy)
    put(rank, values)
    base = {name: tensor.clone() for name, tensor in named_tensors(rank.policy.chunks).items()}
    with gradients_row_by_row():
        taken = step(rank, batch, advantages)
    after = adapters.tensors()
    assert not any(after[f.storage][f.at[0] : f.at[0] + f.shape[0]].any() for f in adapters.manifest.fills)
    assert all(torch.equal(base[name], now) for name, now in named_tensors(rank.policy.chunks).items())
    return AdapterStep(initial, taken, weights_of(rank.policy))


def some_adapters(directory: Path, targets: Sequence[str]) -> dict[str, np.ndarray]:
    """By PEFT's names, float32. B's are not zeros, so that all gradients matter."""
    random = np.random.default_rng(1)
    values = {}
    for matrix in adapted_matrices(read_architecture(directory), targets):
        out, inputs = matrix.shape
        values[key_a(matrix.name)] = random.normal(0, inputs**-0.5, (SETTINGS["rank"], inputs)).astype(np.float32)
        values[key_b(matrix.name)] = random.normal(0, 0.02, (out, SETTINGS["rank"])).astype(np.float32)
    return values


def torch_merged(directory: Path, values: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """The model's tensors in float64 with the adapters added."""
    tensors = in_checkpoint(read_architecture(directory))(load_reference(directory).state_dict())
    merged = {name: torch.from_numpy(tensor) for name, tensor in tensors.items()}
    for matrix in merged:
        if key_a(matrix) in values:
            a, b = (torch.from_numpy(values[key(matrix)]).double() for key in (key_a, key_b))
            merged[matrix] += SCALE * b @ a
    return merged


def torch_step(case: Case, values: dict[str, np.ndarray], recipe: Recipe) -> StepResult:
    """Gradients of the merged matrices from transformers; those of A and B by the chain rule; torch's AdamW."""
    model = load_reference(case.directory)
    model.load_state_dict(in_transformers(torch_merged(case.directory, values), case.directory))
    of_matrices = grpo_step(case, recipe, model)
    leaves = {name: torch.from_numpy(value).double().requires_grad_() for name, value in values.items()}
    for matrix, gradient in of_matrices.gradients.items():
        if key_a(matrix) in leaves:
            a, b, of_matrix = leaves[key_a(matrix)], leaves[key_b(matrix)], torch.from_numpy(gradient)
            a.grad = SCALE * b.detach().T @ of_matrix
            b.grad = SCALE * of_matrix @ a.detach().T
    gradients = {name: leaf.grad.clone().numpy() for name, leaf in leaves.items()}
    norm = clip_and_step(leaves, recipe.train.optimizer)
    after = {name: leaf.detach().numpy() for name, leaf in leaves.items()}
    return StepResult(of_matrices.loss, norm, gradients, values, after)


def in_transformers(checkpoint: dict[str, torch.Tensor], directory: Path) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors as transformers holds them in memory: experts stacked."""
    manifest = transformers_manifest(read_architecture(directory), "float64")
    state = {name: torch.empty(storage.shape, dtype=torch.float64) for name, storage in manifest.storages.items()}
    for p in manifest.placements:
        at = tuple(slice(a, a + n) for a, n in zip(p.box.start, p.box.shape, strict=True))
        box_view(state[p.storage], p).copy_(checkpoint[p.box.tensor][at])
    state = {name: tensor.view(manifest.storages[name].outer_shape) for name, tensor in state.items()}
    if "lm_head.weight" not in state:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    return state


SOME, OTHERS = ["q_proj", "v_proj", "down_proj"], ["k_proj", "o_proj", "up_proj"]
UNFUSED = {
    "gpt_oss": ALL[:4],
    "glm4": [*ALL[:4], "down_proj"],
    "phi3": ["o_proj", "down_proj"],
    "phi3_long": ["o_proj", "down_proj"],
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), ALL[1:]),
}
"""The matrices that may have adapters in families whose files fuse the others."""
LATENT = ("glm4_moe_lite", "kimi_k2")
NEWER = {family: UNFUSED.get(family, ALL) for family in OTHER_FAMILIES if family not in (*LATENT, *COMPOSITES)}
WHOLE_EXPERTS = {"layout": vars(ParallelLayout(tensor=2))}


@pytest.mark.parametrize(
    ("family", "name", "targets", "train"),
    [
        *soak(("qwen2", "tensor, unequal", ALL, {})),
        ("qwen3", "four tensor ranks", SOME, {}),  # more than query groups
        ("qwen3_moe", "expert over tensor", ALL, {}),
        ("mixtral", "tensor", ALL, WHOLE_EXPERTS),  # on every rank
        ("qwen2_tied", "context, data", ALL, {}),
        ("qwen2_tied", "virtual, context", OTHERS, {"recompute": "full"}),
        pytest.param("gpt_oss", "expert over tensor", UNFUSED["gpt_oss"], {}, marks=pytest.mark.long),
        *soak(*((family, "expert over tensor", NEWER[family], {}) for family in NEWER if family != "gpt_oss")),
    ],
)
def test_gradients_and_update_are_those_of_plain_torch(family, name, targets, train, case_of: CaseOf):
    check_step(case_of(family), name, family, targets, train)


@pytest.mark.long
def test_beside_transformer_engine_adapters_are_on_megatrons_own_layers(case_of: CaseOf):
    """With its Adam."""
    check_step(case_of("qwen3_moe"), "expert over tensor", "qwen3_moe", ALL, {}, transformer_engine=True)


def check_step(case: Case, name: str, family: str, targets: Sequence[str], train: Any, **installed: bool) -> None:
    lora = {"lora": SETTINGS | {"targets": targets}, "distributed_optimizer": False}
    recipe = make_recipe(ROWS[name].of(family), train=lora | train)
    values = some_adapters(case.directory, targets)
    results = on_ranks(step_from, recipe, case, values, **installed)
    found = gather([result.step for result in results])
    assert_same_step(found, torch_step(case, values, recipe))
    for key, whole in assemble([result.merged for result in results]).items():
        wanted = torch_merged(case.directory, found.after)[key].numpy()
        np.testing.assert_allclose(whole, wanted, rtol=1e-6, atol=1e-7)
    matrices = adapted_matrices(read_architecture(case.directory), targets)
    initial = {key_a(m.name): initial_a(m.name, 3, m.shape[1], recipe.seed).numpy() for m in matrices}
    initial |= {key_b(m.name): np.zeros((m.shape[0], 3)) for m in matrices}
    for key, whole in assemble([result.initial for result in results]).items():
        np.testing.assert_array_equal(whole, initial[key])


# --- checkpoints and exports ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    first_kl: float | None
    adapters: Parts
    merged: Parts
    next_step: Any


def grpo(rank: TrainRank, batch: RankBatch, advantages: Any) -> Any:
    load_and_pass(rank, batch)
    return update(rank, advantages)


def train_and_save(
    rank: TrainRank, batch: RankBatch, advantages: np.ndarray, saved_in: Path, exported_in: Path
) -> Trained:
    metrics = [grpo(rank, batch, advantages) for _ in range(2)]
    save(rank, saved_in)
    export_adapter(rank, exported_in, rank.recipe.train.lora, "bfloat16")
    adapters, merged = trained_of(rank.policy), weights_of(rank.policy)
    rank.release(["parameters", "gradients", "optimizer", "reference"])
    rank.restore(["parameters", "gradients", "optimizer", "reference"])
    return Trained(metrics[0] and metrics[0].kl, adapters, merged, grpo(rank, batch, advantages))


def load_and_continue(rank: TrainRank, batch: RankBatch, advantages: np.ndarray, saved_in: Path) -> Trained:
    rank.load(saved_in)
    return Trained(None, trained_of(rank.policy), weights_of(rank.policy), grpo(rank, batch, advantages))


def test_a_checkpoint_holds_the_adapters_for_any_layout_and_the_export_merges_into_the_same_model(
    tiny: Tiny, tmp_path: Path
):
    directory = tmp_path / "base"
    to_hugging_face(tiny("qwen2"), directory, dtype="bfloat16")
    case = make_case(directory)

    def run(function: Callable[..., Any], layout: ParallelLayout, *args: Any) -> list[Trained]:
        lora = {"lora": SETTINGS | {"targets": ALL}}
        recipe = make_recipe(layout, train=lora, model={"path": "unused", "dtype": "bfloat16"})
        return on_ranks(function, recipe, case, *args)

    saved_in = tmp_path / "checkpoint"
    saved_in.mkdir()
    before = run(train_and_save, ParallelLayout(tensor=2, data=2), saved_in, tmp_path / "adapter")
    same = run(load_and_continue, ParallelLayout(tensor=2, data=2), saved_in)
    other = run(load_and_continue, ParallelLayout(pipeline=2), saved_in)

    assert the_one(result.first_kl for result in before) == 0.0  # the reference has no adapters, these add nothing yet
    adapters, merged = (assemble([getattr(r, name) for r in before]) for name in ("adapters", "merged"))
    for results in (same, other):
        for key, whole in assemble([result.adapters for result in results]).items():
            np.testing.assert_array_equal(whole, adapters[key], err_msg=key)
    steps = [the_one(result.next_step for result in results) for results in (before, same, other)]
    assert steps[1] == steps[0]
    assert steps[0].kl > 1e-4
    assert steps[2].loss == pytest.approx(steps[0].loss, abs=0.02)
    assert steps[2].grad_norm == pytest.approx(steps[0].grad_norm, rel=0.1)

    exported = saved(tmp_path / "adapter")
    assert {key: tuple(tensor.shape) for key, tensor in exported.items()} == {k: v.shape for k, v in adapters.items()}
    assert all(torch.equal(tensor.float(), torch.from_numpy(adapters[key]).float()) for key, tensor in exported.items())
    merge_lora(directory, tmp_path / "adapter", tmp_path / "merged")
    for key, tensor in saved(tmp_path / "merged").items():
        assert torch.equal(tensor.float(), torch.from_numpy(merged[key]).float()), key

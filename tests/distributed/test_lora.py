"""Adapters on real ranks: their gradients, updates and merged weights are those of transformers and plain torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megagrpo.batching.rank_batches import RankBatch
from megagrpo.convert.hugging_face import to_hugging_face
from megagrpo.convert.merge_lora import merge_lora
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.megatron.model import named_tensors
from megagrpo.megatron.state import parameters_of
from megagrpo.recipe.schema import Recipe
from megagrpo.weights.families import read_architecture
from megagrpo.weights.files.adapters import adapted_matrices, initial_a, key_a, key_b
from megagrpo.weights.sides import transformers as transformers_side
from megagrpo.weights.views import box_view
from tests.distributed.grpo_case import (
    LR,
    Case,
    StepResult,
    assemble,
    clip_and_step,
    load_reference,
    make_batches,
    make_case,
    make_recipe,
    transformers_step,
)
from tests.distributed.grpo_ranks import (
    Parts,
    adapter_boxes,
    boxes,
    compute_gradients,
    export_adapter,
    on_ranks,
    take_old_and_reference_from_rollout,
    update,
)
from tests.safetensors_files import saved
from tests.tiny_models import make_model

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SETTINGS = {"rank": 3, "alpha": 6.0}
SCALE = 2.0


@dataclass(frozen=True)
class RankStep:
    metrics: Any
    initial: Parts
    gradients: Parts
    after: Parts
    merged: Parts
    zeros_stay: bool
    base_stays: bool


def put(rank: Any, values: dict[str, np.ndarray]) -> None:
    """Whole adapters, by PEFT's names, into a rank whose optimizer has no main weights of its own."""
    tensors = rank.policy.adapters.tensors()
    for p in rank.policy.adapters.manifest.placements:
        at = tuple(slice(a, a + n) for a, n in zip(p.box.start, p.box.shape, strict=True))
        box_view(tensors[p.storage], p).copy_(torch.from_numpy(values[p.box.tensor][at]))


def step(rank: Any, values: dict[str, np.ndarray], batches: Sequence[RankBatch], advantages: np.ndarray) -> RankStep:
    """Gradients of the first minibatch, then the update."""
    adapters = rank.policy.adapters
    initial = adapter_boxes(rank, adapters.tensors())
    put(rank, values)
    base = {name: tensor.clone() for name, tensor in named_tensors(rank.policy.chunks).items()}
    rank.load_batch(batches[rank.where.data])
    take_old_and_reference_from_rollout(rank)
    compute_gradients(rank, advantages)
    parameters = parameters_of(rank.policy.chunks)
    gradients = adapter_boxes(rank, {name: parameters[name].main_grad for name in adapters.manifest.storages})
    metrics = update(rank, advantages, LR)
    after = adapters.tensors()
    return RankStep(
        metrics,
        initial,
        gradients,
        adapter_boxes(rank, after),
        boxes(rank, rank.tensors()),
        zeros_stay=not any(after[f.storage][f.at[0] : f.at[0] + f.shape[0]].any() for f in adapters.manifest.fills),
        base_stays=all(torch.equal(base[name], now) for name, now in named_tensors(rank.policy.chunks).items()),
    )


def some_adapters(directory: Path, targets: Sequence[str]) -> dict[str, np.ndarray]:
    """By PEFT's names, float32. B's are not zeros, so that all gradients matter."""
    random = np.random.default_rng(1)
    values = {}
    for matrix in adapted_matrices(read_architecture(directory), targets):
        out, inputs = matrix.shape
        values[key_a(matrix.name)] = random.normal(0, inputs**-0.5, (SETTINGS["rank"], inputs)).astype(np.float32)
        values[key_b(matrix.name)] = random.normal(0, 0.05, (out, SETTINGS["rank"])).astype(np.float32)
    return values


def torch_merged(directory: Path, values: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """The model's checkpoint in float64 with the adapters added."""
    weights = {name: tensor.double() for name, tensor in saved(directory).items()}
    for matrix in weights:
        if key_a(matrix) in values:
            a, b = (torch.from_numpy(values[key(matrix)]).double() for key in (key_a, key_b))
            weights[matrix] += SCALE * b @ a
    return weights


def torch_step(directory: Path, values: dict[str, np.ndarray], case: Case, recipe: Recipe) -> StepResult:
    """Gradients of the merged matrices from transformers; those of A and B by the chain rule; torch's AdamW."""
    model = load_reference(directory)
    model.load_state_dict(load_reference_of(torch_merged(directory, values), directory))
    of_matrices = transformers_step(directory, model, case, recipe)
    leaves = {name: torch.from_numpy(value).double().requires_grad_() for name, value in values.items()}
    for matrix, gradient in of_matrices.gradients.items():
        if key_a(matrix) in leaves:
            a, b, of_matrix = leaves[key_a(matrix)], leaves[key_b(matrix)], torch.from_numpy(gradient)
            a.grad = SCALE * b.detach().T @ of_matrix
            b.grad = SCALE * of_matrix @ a.detach().T
    gradients = {name: leaf.grad.clone().numpy() for name, leaf in leaves.items()}
    norm = clip_and_step(list(leaves.values()), recipe.train.optimizer)
    after = {name: leaf.detach().numpy() for name, leaf in leaves.items()}
    return StepResult(of_matrices.loss, norm, gradients, values, after)


def load_reference_of(weights: dict[str, torch.Tensor], directory: Path) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors as transformers holds them in memory: experts stacked."""
    manifest = transformers_side.manifest(read_architecture(directory), "float64")
    state = {name: torch.empty(storage.shape, dtype=torch.float64) for name, storage in manifest.storages.items()}
    for p in manifest.placements:
        box_view(state[p.storage], p).copy_(weights[p.box.tensor])
    if "lm_head.weight" not in state:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    return state


CASES = {
    "tensor, pipeline": ("qwen2", ParallelLayout(tensor=2, pipeline=2), ALL, {}),
    "more tensor ranks than query groups": ("qwen3", ParallelLayout(tensor=4), ["q_proj", "v_proj", "down_proj"], {}),
    "experts over tensor ranks": ("qwen3_moe", ParallelLayout(tensor=2, expert=2), ALL, {}),
    "experts whole on every rank": ("mixtral", ParallelLayout(tensor=2), ALL, {"expert_tensor": 1}),
    "data, context": ("qwen2_tied", ParallelLayout(data=2, context=2), ALL, {}),
    "virtual pipeline, recompute": (
        "qwen2_tied",
        ParallelLayout(pipeline=2, virtual_pipeline=2),
        ["k_proj", "o_proj", "up_proj"],
        {"recompute": "full"},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_and_update_are_those_of_plain_torch(name, tmp_path):
    family, layout, targets, changes = CASES[name]
    layers = 4 if layout.virtual_pipeline > 1 else 2
    directory = make_model(family, tmp_path / family, num_hidden_layers=layers)
    lora = SETTINGS | {"targets": targets}
    recipe = make_recipe(layout)
    train = recipe.train.model_dump() | {"lora": lora, "distributed_optimizer": False}
    if "expert_tensor" in changes:
        train["layout"]["expert_tensor"] = changes["expert_tensor"]
    else:
        train |= changes
    recipe = make_recipe(layout, train=train)
    case = make_case(load_reference(directory), temperature=0.8)
    values = some_adapters(directory, targets)
    results = on_ranks(step, recipe, directory, values, make_batches(recipe, case.sequences), case.advantages)
    wanted = torch_step(directory, values, case, recipe)

    (metrics,) = [result.metrics for result in results if result.metrics is not None]
    assert metrics.loss == pytest.approx(wanted.loss, rel=1e-4, abs=1e-6)
    assert metrics.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-4)
    gradients = assemble([result.gradients for result in results])
    assert gradients.keys() == wanted.gradients.keys()
    for key, gradient in wanted.gradients.items():
        np.testing.assert_allclose(gradients[key], gradient, atol=2e-5 * np.abs(gradient).max() + 1e-9, err_msg=key)
    after = assemble([result.after for result in results])
    change = np.concatenate([(after[key] - values[key]).ravel() for key in sorted(after)])
    wanted_change = np.concatenate([(wanted.after[key] - values[key]).ravel() for key in sorted(after)])
    assert np.linalg.norm(change - wanted_change) <= 1e-3 * np.linalg.norm(wanted_change)

    assert all(result.base_stays and result.zeros_stay for result in results)
    for key, whole in assemble([result.merged for result in results]).items():
        np.testing.assert_allclose(whole, torch_merged(directory, after)[key].numpy(), rtol=1e-6, atol=1e-7)
    matrices = adapted_matrices(read_architecture(directory), targets)
    initial = {key_a(m.name): initial_a(m.name, 3, m.shape[1], recipe.seed).numpy() for m in matrices}
    initial |= {key_b(m.name): np.zeros((m.shape[0], 3)) for m in matrices}
    for key, whole in assemble([result.initial for result in results]).items():
        np.testing.assert_array_equal(whole, initial[key])


# --- checkpoints and exports ------------------------------------------------------------------------------------------


def grpo_step(rank: Any, batches: Sequence[RankBatch], advantages: np.ndarray) -> Any:
    rank.load_batch(batches[rank.where.data])
    rank.compute_old_logprobs()
    rank.compute_reference_logprobs()
    return update(rank, advantages, LR)


@dataclass(frozen=True)
class Trained:
    first_kl: float | None
    adapters: Parts
    merged: Parts
    next_step: Any


def now(rank: Any) -> tuple[Parts, Parts]:
    """bfloat16 as float32, which numpy knows."""
    return (
        adapter_boxes(rank, {name: tensor.float() for name, tensor in rank.policy.adapters.tensors().items()}),
        boxes(rank, {name: tensor.float() for name, tensor in rank.tensors().items()}),
    )


def train_and_save(
    rank: Any, batches: Sequence[RankBatch], advantages: np.ndarray, saved_in: Path, exported_in: Path
) -> Trained:
    metrics = [grpo_step(rank, batches, advantages) for _ in range(2)]
    rank.save(saved_in)
    export_adapter(rank, exported_in, rank.recipe.train.lora, "bfloat16")
    adapters, merged = now(rank)
    rank.release(["parameters", "gradients", "optimizer", "reference"])
    rank.restore(["parameters", "gradients", "optimizer", "reference"])
    return Trained(metrics[0].kl if metrics[0] else None, adapters, merged, grpo_step(rank, batches, advantages))


def load_and_continue(rank: Any, batches: Sequence[RankBatch], advantages: np.ndarray, saved_in: Path) -> Trained:
    rank.load(saved_in)
    return Trained(None, *now(rank), grpo_step(rank, batches, advantages))


def test_a_checkpoint_holds_the_adapters_for_any_layout_and_the_export_merges_into_the_same_model(tmp_path):
    directory = tmp_path / "base"
    to_hugging_face(make_model("qwen2", tmp_path / "float32", num_hidden_layers=2), directory, dtype="bfloat16")
    case = make_case(load_reference(directory), temperature=0.8)

    def run(function: Callable[..., Any], layout: ParallelLayout, *args: Any) -> list[Trained]:
        train = make_recipe(layout).train.model_dump() | {"lora": SETTINGS | {"targets": ALL}}
        recipe = make_recipe(layout, train=train, model={"path": "unused", "dtype": "bfloat16"})
        batches = make_batches(recipe, case.sequences)
        return on_ranks(function, recipe, directory, batches, case.advantages, *args)

    saved_in = tmp_path / "checkpoint"
    saved_in.mkdir()
    before = run(train_and_save, ParallelLayout(tensor=2, data=2), saved_in, tmp_path / "adapter")
    same = run(load_and_continue, ParallelLayout(tensor=2, data=2), saved_in)
    other = run(load_and_continue, ParallelLayout(pipeline=2), saved_in)

    (first_kl,) = [result.first_kl for result in before if result.first_kl is not None]
    assert first_kl == 0.0  # the reference is the model without adapters, and these begin with nothing
    adapters, merged = (assemble([getattr(r, name) for r in before]) for name in ("adapters", "merged"))
    for results in (same, other):
        for key, whole in assemble([result.adapters for result in results]).items():
            np.testing.assert_array_equal(whole, adapters[key], err_msg=key)
    steps = [next(r.next_step for r in results if r.next_step) for results in (before, same, other)]
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

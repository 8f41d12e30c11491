"""What the step tests run on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

from megagrpo.batching.rank_batches import RankBatch
from megagrpo.megatron.attention import PackedLatentAttention
from megagrpo.megatron.batch import Passes
from megagrpo.megatron.rank import TrainRank
from megagrpo.megatron.state import parameters_of
from megagrpo.recipe.schema import Recipe
from megagrpo.recipe.schema.train import LoraConfig
from megagrpo.weights.files.adapters import adapted_matrices, peft_config
from megagrpo.weights.files.export import begin_adapter_export, finish_export
from megagrpo.weights.plan import make_plan
from megagrpo.weights.views import box_view
from tests.distributed.grpo_case import LR, StepResult, assemble, reference_of
from tests.rank_group import run_ranks

Parts = list[tuple[Any, np.ndarray]]


def on_ranks(function: Callable[..., Any], recipe: Recipe, directory: Path, *args: Any) -> list[Any]:
    """Results by rank of `function`(TrainRank, *args)."""
    ranks = recipe.train.layout.parallel().ranks
    return run_ranks(ranks, call, function, recipe, str(directory), *args, joined=False)


def call(number: int, store: str, function: Callable[..., Any], recipe: Recipe, directory: str, *args: Any) -> Any:
    return function(TrainRank(recipe, number, store, directory, "cpu"), *args)


def boxes(rank: Any, tensors: dict[str, torch.Tensor]) -> Parts:
    """Copies of this rank's placements in these tensors, by storage name; routers' biases have no gradients."""
    return [
        (p.box, box_view(tensors[p.storage], p).detach().float().contiguous().clone().numpy())
        for p in rank.manifest().placements
        if p.storage in tensors
    ]


def take_old_and_reference_from_rollout(rank: Any) -> None:
    rollout = tuple(response.rollout_logprobs for response in rank.batch.responses)
    rank.passes = Passes(old_logprobs=rollout, reference_logprobs=tuple(map(reference_of, rollout)))


def compute_gradients(rank: Any, advantages: Any, step: int = 1) -> Any:
    """Gradients of the first minibatch, with the recipe's KL coefficient. Returns the Update that they belong to."""
    started = rank.begin_update(advantages, rank.recipe.algorithm.kl.coefficient, step)
    rank.compute_gradients(*started.minibatches[0], started)
    return started


def update(rank: Any, advantages: np.ndarray, lr: float) -> Any:
    """The rank's update with the recipe's KL coefficient, if it is a term of the loss."""
    kl = rank.recipe.algorithm.kl
    return rank.update(advantages, lr, kl.coefficient if kl.placement == "loss" else 0.0, step=1)


def row_kl(rank: Any) -> dict[int, float]:
    """KL estimates summed over the response tokens that this rank speaks for, by row of the step."""
    found = rank.token_kl()
    if found is None:
        return {}
    sums = np.bincount(found.rows, found.values.astype(np.float64))
    return {row: sums[row] for row in sorted(set(found.rows.tolist()))}


@dataclass(frozen=True)
class RankStep:
    metrics: Any
    gradients: Parts
    before: Parts
    after: Parts


def step(rank: Any, batches: Sequence[RankBatch], advantages: np.ndarray, lr: float) -> RankStep:
    """Gradients of the first minibatch (complete ones: without the distributed optimizer), then the update."""
    rank.load_batch(batches[rank.where.data])
    take_old_and_reference_from_rollout(rank)
    before = boxes(rank, rank.tensors())
    compute_gradients(rank, advantages)
    gradients = boxes(rank, {name: p.main_grad for name, p in parameters_of(rank.policy.chunks).items()})
    metrics = update(rank, advantages, lr)
    return RankStep(metrics, gradients, before, boxes(rank, rank.tensors()))


def step_with_keys_of_own_heads(*args: Any) -> RankStep:
    """The same with Megatron's own gradient of the rotary part of latent attention's keys."""
    with patch.object(PackedLatentAttention, "with_whole_gradient", lambda self, key: key):
        return step(*args)


def metrics_of_step(rank: Any, batches: Sequence[RankBatch], advantages: np.ndarray) -> Any:
    rank.load_batch(batches[rank.where.data])
    take_old_and_reference_from_rollout(rank)
    return update(rank, advantages, LR)


def gather(steps: Sequence[RankStep], gradients: bool = True) -> StepResult:
    """One result from those of all ranks. Exactly one of them has the metrics."""
    (metrics,) = [step.metrics for step in steps if step.metrics is not None]
    return StepResult(
        loss=metrics.loss,
        grad_norm=metrics.grad_norm,
        gradients=assemble([step.gradients for step in steps]) if gradients else {},
        before=assemble([step.before for step in steps]),
        after=assemble([step.after for step in steps]),
    )


# --- adapters ---------------------------------------------------------------------------------------------------------


def adapter_boxes(rank: Any, tensors: dict[str, torch.Tensor]) -> Parts:

    placements = rank.policy.adapters.manifest.placements
    return [(p.box, box_view(tensors[p.storage], p).detach().clone().numpy()) for p in placements]


def export_adapter(rank: Any, directory: Path, lora: LoraConfig, dtype: str) -> None:
    """What trainer/saving.py does, without Ray."""

    manifests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(manifests, rank.adapter_manifest())
    adapters, begun = rank.policy.adapters, [None]
    if dist.get_rank() == 0:
        config = peft_config(adapted_matrices(rank.policy.architecture, lora.targets), lora.rank, lora.alpha, "base")
        begun = [begin_adapter_export(directory, adapters.checkpoint_tensors, config, dtype)]
    dist.broadcast_object_list(begun)
    rank.write_export(begun[0], make_plan(manifests, begun[0].files), dist.get_rank(), adapters=True)
    dist.barrier()
    if dist.get_rank() == 0:
        finish_export(begun[0])

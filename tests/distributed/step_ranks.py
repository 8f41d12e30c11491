"""Functions that tests run on every rank: a training rank of a recipe, its passes and steps, and the tensors that it
holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megagrpo.batching.rank_batches import RankBatch, make_rank_batches
from megagrpo.checkpoint.store import SavedFile
from megagrpo.megatron.batch import Passes
from megagrpo.megatron.model import named_tensors
from megagrpo.megatron.model_rank import ModelRank, SftRank
from megagrpo.megatron.rank import TrainRank
from megagrpo.megatron.state import parameters_of, shards_of
from megagrpo.megatron.trained_model import TrainedModel
from megagrpo.rank_results import TokenNumbers
from megagrpo.recipe.schema import AnyRecipe, LoraConfig, SftRecipe
from megagrpo.weights.boxes import Box, Manifest
from megagrpo.weights.files.adapters import adapted_matrices, adapter_tensors, peft_config
from megagrpo.weights.files.export import Export, begin_adapter_export, finish_export
from megagrpo.weights.plan import make_plan
from megagrpo.weights.views import box_view
from tests.distributed.step_case import LR, RESPONSES, Case, StepResult, assemble, reference_of
from tests.distributed.te_ranks import build_as_on_gpus
from tests.rank_group import run_ranks

Parts = list[tuple[Box, np.ndarray]]


def on_ranks(
    function: Callable[..., Any],
    recipe: AnyRecipe,
    case: Case,
    *args: Any,
    first: Callable[[], None] | None = None,
    transformer_engine: bool = False,
) -> list[Any]:
    """Results by rank of `function`(the recipe's TrainRank or SftRank, its RankBatch, the case's advantages, *args).

    `first` is called before the rank is made. With `transformer_engine`, or where the recipe's layer_spec asks for it,
    ranks find te_stub installed, and their models are built as on GPUs.
    """
    arguments = first, recipe, str(case.directory), make_batches(recipe, case), case.advantages, *args
    ranks, fused = recipe.train.layout.parallel().ranks, recipe.train.layer_spec == "transformer_engine"
    installed = fused or transformer_engine
    return run_ranks(ranks, _call, function, *arguments, joined=False, transformer_engine=installed)


def make_batches(recipe: AnyRecipe, case: Case) -> list[RankBatch]:
    return make_rank_batches(
        case.sequences,
        layout=recipe.train.layout.parallel(),
        minibatches=1 if isinstance(recipe, SftRecipe) else recipe.algorithm.minibatches,
        tokens_per_microbatch=recipe.train.tokens_per_microbatch,
        seed=1,
    )


def _call(
    number: int,
    store: str,
    function: Callable[..., Any],
    first: Callable[[], None] | None,
    recipe: AnyRecipe,
    directory: str,
    batches: Sequence[RankBatch],
    *args: Any,
) -> Any:
    if first is not None:
        first()
    if find_spec("transformer_engine") is not None:
        build_as_on_gpus()
    kind: Callable[..., ModelRank] = SftRank if isinstance(recipe, SftRecipe) else TrainRank
    rank = kind(recipe, number, store, directory, "cpu")
    return function(rank, batches[rank.where.data], *args)


def the_one(answers: Iterable[Any]) -> Any:
    """Returns the answer of the one rank that answers for all."""
    (answer,) = [answer for answer in answers if answer is not None]
    return answer


def of_all_tokens(parts: Iterable[TokenNumbers | None]) -> np.ndarray:
    """Joins the ranks' numbers: [response tokens], row after row. Every token comes from exactly one rank."""
    found = {}
    for part in parts:
        for row, index, value in zip(part.rows, part.index, part.values, strict=True) if part else ():
            assert (row, index) not in found
            found[row, index] = value
    assert len(found) == sum(RESPONSES)
    return np.array([found[token] for token in sorted(found)])


# --- passes and updates -----------------------------------------------------------------------------------------------


def take_old_and_reference_from_rollout(rank: TrainRank) -> None:
    rollout = tuple(response.rollout_logprobs for response in rank.batch.responses)
    rank.passes = Passes(old_logprobs=rollout, reference_logprobs=tuple(map(reference_of, rollout)))


def load_and_pass(rank: TrainRank, batch: RankBatch) -> None:
    """The batch, with old and reference logprobs as the trainer asks for them."""
    rank.load_batch(batch)
    rank.compute_old_logprobs()
    rank.compute_reference_logprobs()


def compute_gradients(rank: TrainRank, advantages: Any, step: int = 1) -> Any:
    """Gradients of the first minibatch, with the recipe's KL coefficient. Returns the Update that they belong to."""
    started = rank.begin_update(advantages, rank.recipe.algorithm.kl.coefficient, step)
    rank.compute_gradients(*started.minibatches[0], started)
    return started


def update(rank: TrainRank, advantages: Any, lr: float = LR) -> Any:
    """The rank's update with the recipe's KL coefficient, if it is a term of the loss."""
    kl = rank.recipe.algorithm.kl
    return rank.update(advantages, lr, kl.coefficient if kl.placement == "loss" else 0.0, step=1)


def sft_steps(rank: SftRank, batch: RankBatch, count: int) -> list[float]:
    """Losses and gradient norms of steps on the same batch, on the rank that answers."""
    rank.load_batch(batch)
    updates = [rank.update(LR / 10) for _ in range(count)]
    return [number for found in updates if found for number in (found.loss.mean, found.grad_norm)]


def with_noise(rank: ModelRank) -> ModelRank:
    """Weights, main weights too, that only a checkpoint can replace."""
    for tensor in named_tensors(rank.policy.chunks).values():
        tensor.normal_()
    for shard in shards_of(rank.policy.optimizer).values():
        shard.tensors["param"].normal_()
    return rank


# --- what a rank holds ------------------------------------------------------------------------------------------------


def boxes(manifest: Manifest, tensors: dict[str, torch.Tensor]) -> Parts:
    """Float32 copies of the placements in these tensors, by storage name; routers' biases have no gradients."""
    return [
        (p.box, box_view(tensors[p.storage], p).detach().float().contiguous().clone().numpy())
        for p in manifest.placements
        if p.storage in tensors
    ]


def weights_of(model: TrainedModel) -> Parts:
    """The model's weights, adapters added."""
    return boxes(model.manifest(), model.tensors())


def trained_of(model: TrainedModel) -> Parts:
    """Returns the trained parameters: the adapters, or all weights."""
    return boxes(model.adapters.manifest, model.adapters.tensors()) if model.adapters else weights_of(model)


def gradients_of(model: TrainedModel) -> Parts:
    """Returns the gradients in the chunks' buffers: complete ones without the distributed optimizer."""
    manifest = model.adapters.manifest if model.adapters else model.manifest()
    found = {name: p.main_grad for name, p in parameters_of(model.chunks).items() if p.requires_grad}
    return boxes(manifest, found)


def states_of(model: TrainedModel) -> dict[str, torch.Tensor]:
    """Copies of all weights, main weights and moments of this rank."""
    shards, parameters = shards_of(model.optimizer), parameters_of(model.chunks)
    found = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        if parameter in shards:
            found |= {f"{kind}.{name}": flat.clone() for kind, flat in shards[parameter].tensors.items()}
    return found


@dataclass(frozen=True)
class RankStep:
    metrics: Any
    gradients: Parts
    before: Parts
    after: Parts


def take_step(model: TrainedModel, compute: Callable[[], Any], update: Callable[[], Any]) -> RankStep:
    """Returns the gradients that `compute` leaves in the buffers, then runs `update`."""
    before = trained_of(model)
    compute()
    found = gradients_of(model)
    return RankStep(update(), found, before, trained_of(model))


def step(rank: TrainRank, batch: RankBatch, advantages: Any) -> RankStep:
    """Gradients of the first minibatch, then the update."""
    rank.load_batch(batch)
    take_old_and_reference_from_rollout(rank)
    return take_step(rank.policy, lambda: compute_gradients(rank, advantages), lambda: update(rank, advantages))


def gather(steps: Sequence[RankStep], with_gradients: bool = True) -> StepResult:
    """One result from those of all ranks."""
    metrics = the_one(step.metrics for step in steps)
    return StepResult(
        loss=getattr(metrics.loss, "mean", metrics.loss),  # fine-tuning answers with a sum and a count
        grad_norm=metrics.grad_norm,
        gradients=assemble([step.gradients for step in steps]) if with_gradients else {},
        before=assemble([step.before for step in steps]),
        after=assemble([step.after for step in steps]),
    )


def save(rank: ModelRank, directory: Path) -> tuple[SavedFile, ...]:
    """Saves like trainer/saving.py, without Ray. Returns the files that this rank wrote."""
    rank.take_snapshot()
    return write(rank, directory)


def write(rank: ModelRank, directory: Path) -> tuple[SavedFile, ...]:
    """The snapshot that every rank has taken."""
    files, contents = rank.write_snapshot(directory)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, contents)
    return files + (rank.finish_snapshot(directory, *gathered) if dist.get_rank() == 0 else ())


def export(rank: ModelRank, begin: Callable[[], Export], adapters: bool = False) -> None:
    """Exports like trainer/saving.py, without Ray."""
    manifests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(manifests, rank.adapter_manifest() if adapters else rank.manifest())
    first = dist.get_rank() == 0
    begun: list[Any] = [begin() if first else None]
    dist.broadcast_object_list(begun)
    rank.write_export(begun[0], make_plan(manifests, begun[0].files), dist.get_rank(), adapters)
    dist.barrier()
    if first:
        finish_export(begun[0])


def export_adapter(rank: ModelRank, directory: Path, lora: LoraConfig, dtype: str) -> None:
    matrices = adapted_matrices(rank.policy.architecture, lora.targets)
    config, tensors = peft_config(matrices, lora.rank, lora.alpha, "base"), adapter_tensors(matrices, lora.rank)
    export(rank, lambda: begin_adapter_export(directory, tensors, config, dtype), adapters=True)

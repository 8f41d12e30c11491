"""One training rank: policy, reference and optimizer of its part of the layout. Knows neither Ray nor torchrun.

Every method is collective: all ranks call the same ones in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megagrpo.algorithm.kl import kl_estimate
from megagrpo.algorithm.objective import ObjectiveSettings
from megagrpo.batching.microbatch import RankBatch
from megagrpo.checkpoint.integrity import SavedFile
from megagrpo.errors import Problem, RankError
from megagrpo.layout.parallel import RankCoordinates, rank_grid
from megagrpo.megatron import process, state
from megagrpo.megatron.config import layer_spec, transformer_config
from megagrpo.megatron.forward_backward import forward, forward_backward, sum_gradients
from megagrpo.megatron.grpo_loss import GrpoLoss, ResponseTokens, response_tokens
from megagrpo.megatron.logprob import VocabularyShard
from megagrpo.megatron.mismatch import reduce_mismatch
from megagrpo.megatron.model import build_chunks, named_tensors
from megagrpo.megatron.offload import Offload, Part
from megagrpo.megatron.optimizer import make_optimizer, set_learning_rate, wrap_chunks
from megagrpo.megatron.packed import PackedTensors, pack
from megagrpo.megatron.reference import Reference
from megagrpo.megatron.results import MetricSums, StepMetrics
from megagrpo.megatron.state import TrainingState
from megagrpo.recipe.defaults import dtype_name
from megagrpo.recipe.schema import Recipe
from megagrpo.weights.boxes import Manifest, Placement
from megagrpo.weights.digest import digests
from megagrpo.weights.executors import checkpoint_files
from megagrpo.weights.executors.checkpoint_export import Export, write_part
from megagrpo.weights.families import read_architecture
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.plan import WeightPlan
from megagrpo.weights.sides import megatron_local, megatron_te


@dataclass(frozen=True)
class Minibatch:
    """What one optimizer step works on. `responses` is empty on ranks that compute no logits."""

    packed: list[PackedTensors]
    responses: list[ResponseTokens]


class TrainRank:
    def __init__(self, recipe: Recipe, rank: int, init_method: str, model_directory: str, device: str) -> None:
        """Joins the other ranks and loads this rank's weights, and the reference's if the recipe has a KL penalty.

        device: cpu, cuda or cuda:N. Raises RankError, ModelError or RecipeError.
        """
        self.recipe = recipe
        self.layout = recipe.train.layout.parallel()
        self.where = rank_grid(self.layout)[rank]
        self._dtype_name = dtype_name(recipe, "cpu" if device == "cpu" else "cuda")
        dtype = getattr(torch, self._dtype_name)
        cluster, train = recipe.cluster, recipe.train
        process.start(rank, self.layout.ranks, init_method, device, cluster.start_timeout_seconds)
        process.start_parallel(self.layout, recipe.seed, cluster.step_timeout_seconds)
        self.device = torch.device("cpu") if device == "cpu" else torch.device("cuda", torch.cuda.current_device())

        self.architecture: Architecture = read_architecture(model_directory)
        config = transformer_config(self.architecture, train, dtype, device)
        self._side = megatron_te if layer_spec(train, device) == "transformer_engine" else megatron_local
        models = build_chunks(self.architecture, config, self.layout)
        checkpoint_files.load(model_directory, self.manifest(), named_tensors(models))
        self.reference = Reference(models) if recipe.algorithm.kl.coefficient > 0 else None
        sum_gradients(config)
        self.chunks = wrap_chunks(models, config, train.distributed_optimizer)
        self.optimizer = make_optimizer(self.chunks, train.optimizer, train.distributed_optimizer, dtype)
        self._offload = Offload(self.chunks, self.optimizer, self.reference.weights if self.reference else ())
        self._state = TrainingState(self.chunks, self.optimizer, self.architecture, self.layout, self.manifest())
        self._loss = GrpoLoss(_objective_settings(recipe), recipe.rollout.temperature, self._vocabulary_shard())
        self._minibatches: list[Minibatch] = []
        self._rows: list[int] = []

    # --- the step -----------------------------------------------------------------------------------------------------

    def load_batch(self, batch: RankBatch) -> None:
        """Takes this data rank's part of a step, and forgets the one before."""
        self._rows = [row for micros in batch.minibatches for micro in micros for row in micro.rows]
        self._minibatches = []
        aggregation = self.recipe.algorithm.aggregation
        for micros, tokens, sequences in zip(batch.minibatches, batch.tokens, batch.sequences, strict=True):
            packed = [
                pack(micro, layout=self.layout, context_rank=self.where.context, device=self.device) for micro in micros
            ]
            responses = []
            if self._has_logits:
                responses = [
                    response_tokens(tensors, micro, aggregation, tokens, sequences)
                    for tensors, micro in zip(packed, micros, strict=True)
                ]
            self._minibatches.append(Minibatch(packed, responses))

    def compute_old_logprobs(self) -> None:
        """Logprobs of the loaded batch under the policy as it is now; they stay here."""
        self._compute_logprobs("old_logprobs")

    def compute_reference_logprobs(self) -> None:
        """Logprobs of the loaded batch under the reference; they stay here."""
        if self.reference is None:
            raise RankError(Problem("reference logprobs", "algorithm.kl.coefficient: 0", "a KL coefficient above 0"))
        self._offload.require(["reference"])
        with self.reference.in_place_of(self.chunks):
            self._compute_logprobs("reference_logprobs")

    def sequence_kl(self) -> dict[int, float]:
        """Row of the step -> KL estimate summed over its response tokens. Old and reference logprobs must be there.

        Each row comes from one rank; ranks that report nothing return {}.
        """
        responses = self._responses()
        if not responses:  # no logits here, or nothing in the batch
            return {}
        rows = torch.cat([response.rows for response in responses])
        old, reference = self._stored("old_logprobs"), self._stored("reference_logprobs")
        kl = kl_estimate(old, reference, self.recipe.algorithm.kl.estimator).double()
        sums = torch.zeros(max(self._rows, default=-1) + 1, dtype=torch.float64, device=self.device)
        sums.index_add_(0, rows, kl)
        if self.layout.context > 1:  # these ranks have parts of the same sequences
            dist.all_reduce(sums, group=parallel_state.get_context_parallel_group())
        if self.where.tensor or self.where.context:
            return {}
        values = sums.tolist()
        return {row: values[row] for row in self._rows}

    def update(self, advantages: np.ndarray, lr: float) -> StepMetrics | None:
        """All minibatches and epochs of the loaded batch. advantages: float [rows of the step].

        With more than one optimizer step the ratio is to the policy before the first: compute_old_logprobs must have
        been called; and compute_reference_logprobs, if there is a reference. One rank returns the metrics of all, the
        others None. Raises RankError if one of these passes is missing or a gradient is not finite.
        """
        self._offload.require(["parameters", "gradients", "optimizer"])
        algorithm, settings = self.recipe.algorithm, self.recipe.train.optimizer
        minibatches = [minibatch for minibatch in self._minibatches if minibatch.packed]
        if self._has_logits and len(minibatches) * algorithm.epochs > 1:
            self._stored("old_logprobs")
        if self._has_logits and self.reference is not None:
            self._stored("reference_logprobs")
        of_row = torch.as_tensor(advantages, dtype=torch.float32, device=self.device)
        metrics = MetricSums(self.device)
        set_learning_rate(self.optimizer, lr, settings.weight_decay)
        grad_norms = [
            self._optimizer_step(minibatch, of_row, metrics)
            for _ in range(algorithm.epochs)
            for minibatch in minibatches
        ]
        if not self._has_logits:
            return None
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        mismatch = reduce_mismatch(self._responses(), group, self.recipe.rollout.mismatch.worst_tokens, self.device)
        result = metrics.reduce(group, grad_norms, algorithm.epochs, mismatch)
        where = self.where
        return None if where.tensor or where.context or where.data else result

    def compute_gradients(self, minibatch: Minibatch, advantages: Tensor, metrics: MetricSums) -> None:
        """Gradients of one minibatch in the chunks' buffers, summed over all ranks and not clipped."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        forward_backward(
            self.chunks,
            minibatch.packed,
            lambda index, logits: self._loss.loss(logits, minibatch.responses[index], advantages, metrics),
        )

    def _optimizer_step(self, minibatch: Minibatch, advantages: Tensor, metrics: MetricSums) -> float:
        self.compute_gradients(minibatch, advantages, metrics)
        _, grad_norm, _ = self.optimizer.step()
        if not math.isfinite(grad_norm):
            raise RankError(
                Problem(
                    "update: the gradient is not finite",
                    given=f"norm {grad_norm}",
                    fix="look at the last steps' metrics and lower train.optimizer.lr; checkpoints are not affected",
                )
            )
        return float(grad_norm)

    def _compute_logprobs(self, name: Literal["old_logprobs", "reference_logprobs"]) -> None:
        self._offload.require(["parameters"])
        responses = self._responses()
        forward(self.chunks, self._packed(), lambda index, logits: self._store(name, responses[index], logits))

    def _store(self, name: str, response: ResponseTokens, logits: Tensor) -> Tensor:
        logprobs = self._loss.logprobs(logits, response)
        setattr(response, name, logprobs)
        return logprobs.sum()

    def _stored(self, name: Literal["old_logprobs", "reference_logprobs"]) -> Tensor:
        parts = [getattr(response, name) for response in self._responses()]
        if any(part is None for part in parts):
            raise RankError(Problem(f"compute_{name} was not called for this batch"))
        return torch.cat(parts) if parts else torch.empty(0, device=self.device)

    def _packed(self) -> list[PackedTensors]:
        return [packed for minibatch in self._minibatches for packed in minibatch.packed]

    def _responses(self) -> list[ResponseTokens]:
        return [response for minibatch in self._minibatches for response in minibatch.responses]

    # --- weights out --------------------------------------------------------------------------------------------------

    def manifest(self) -> Manifest:
        """What this rank holds, in coordinates of the Hugging Face checkpoint."""
        return self.manifest_of(self.where)

    def manifest_of(self, where: RankCoordinates) -> Manifest:
        return self._side.manifest(self.architecture, self.layout, where, self._dtype_name)

    def tensors(self) -> dict[str, Tensor]:
        """The storages of `manifest`: the policy's weights themselves, not copies."""
        self._offload.require(["parameters"])
        return named_tensors(self.chunks)

    def weight_digests(self, placements: Iterable[Placement], dtype: str | None = None) -> dict[str, int]:
        """Partial digests by checkpoint tensor of these parts of the policy, as they would be in `dtype`."""
        return digests(self.tensors(), placements, dtype)

    def write_export(self, export: Export, plan: WeightPlan, source: int) -> None:
        """Writes the part of this rank, the plan's `source`-th, of a Hugging Face export. Raises CheckpointError."""
        write_part(export, plan, source, self.tensors())

    # --- checkpoints, memory, process ---------------------------------------------------------------------------------

    def save(self, directory: Path) -> tuple[SavedFile, ...]:
        """Writes this rank's part of the training state into an empty directory. Raises CheckpointError."""
        self._offload.require(["parameters", "optimizer"])
        return state.save(self._state, directory)

    def load(self, directory: Path) -> None:
        """Replaces the training state by a saved one, of any layout. Raises CheckpointError."""
        self._offload.require(["parameters", "optimizer"])
        state.load(self._state, directory)

    def release(self, parts: Iterable[Part]) -> None:
        """Moves parts to host memory until `restore`; what needs them raises RankError meanwhile."""
        self._offload.release(parts)

    def restore(self, parts: Iterable[Part]) -> None:
        self._offload.restore(parts)

    def close(self) -> None:
        process.stop()

    @property
    def _has_logits(self) -> bool:
        return self.where.pipeline == self.layout.pipeline - 1

    def _vocabulary_shard(self) -> VocabularyShard:
        columns = self.architecture.padded_vocab(self.layout.tensor) // self.layout.tensor
        group = parallel_state.get_tensor_model_parallel_group() if self.layout.tensor > 1 else None
        return VocabularyShard(self.architecture.vocab, self.where.tensor * columns, group)


def _objective_settings(recipe: Recipe) -> ObjectiveSettings:
    algorithm = recipe.algorithm
    return ObjectiveSettings(
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        kl_coefficient=algorithm.kl.coefficient if algorithm.kl.placement == "loss" else 0.0,
        kl_estimator=algorithm.kl.estimator,
        entropy_coefficient=algorithm.entropy_coefficient,
    )

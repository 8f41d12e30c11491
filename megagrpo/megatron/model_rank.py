"""The base of every training rank: its process in the group, the policy and its weights; and the rank of fine-tuning.

Every method is collective: all ranks call the same ones in the same order. It knows neither Ray nor torchrun.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from megatron.core import parallel_state
from torch import Tensor

from megagrpo.batching.rank_batches import RankBatch
from megagrpo.checkpoint.store import SavedFile
from megagrpo.layout.parallel import rank_grid
from megagrpo.megatron import process
from megagrpo.megatron.batch import Batch, Minibatch, ResponseTokens, as_tensors, sum_over_ranks
from megagrpo.megatron.heads import Head, VocabularyShard, head_scale, output_weight
from megagrpo.megatron.kept_head import kept_logprobs
from megagrpo.megatron.model import unwrapped
from megagrpo.megatron.offload import Offload, Part
from megagrpo.megatron.replay import RoutesOnRank
from megagrpo.megatron.snapshot import Contents
from megagrpo.megatron.trained_model import TrainedModel
from megagrpo.processes.store import StoreAddress
from megagrpo.rank_results import SftUpdate, TokenLoss
from megagrpo.recipe.defaults import dtype_name, train_config
from megagrpo.recipe.schema import AnyRecipe
from megagrpo.recipe.schema.train import COMPILED
from megagrpo.weights.boxes import Manifest
from megagrpo.weights.families import read_architecture
from megagrpo.weights.files.export import Copies, Export, copies_for, write_copies, write_part
from megagrpo.weights.plan import WeightPlan, require_own

POLICY = "policy"
PLACES = {POLICY: "", "critic": "critic"}
"""Directories of the models' states, inside a checkpoint's directory."""


class ModelRank:
    def __init__(
        self, recipe: AnyRecipe, rank: int, meeting: StoreAddress | str, model_directory: str, device: str
    ) -> None:
        """Joins the other ranks and loads this rank's weights of the policy.

        device: cpu, cuda or cuda:N. Raises RankError, ModelError or RecipeError.
        """
        self.layout = recipe.train.layout.parallel()
        self.where = rank_grid(self.layout)[rank]
        cluster, train = recipe.cluster, train_config(recipe)
        process.start(rank, self.layout.ranks, meeting, device, cluster.start_timeout_seconds)
        # Models are loaded together as well. The driver ends a phase of a step that is too long, and names its ranks.
        self.timeout_seconds = max(cluster.start_timeout_seconds, cluster.step_timeout_seconds)
        process.start_parallel(self.layout, recipe.seed, self.timeout_seconds)
        self.device = torch.device("cpu") if device == "cpu" else torch.device("cuda", torch.cuda.current_device())
        self.dtype: torch.dtype = getattr(torch, dtype_name(recipe, self.device.type))
        if self.device.type == "cuda" and train.recomputed.modules & COMPILED:
            process.compile_storage_sharing()
        self.policy = TrainedModel(
            read_architecture(model_directory),
            train,
            self.where,
            model_directory,
            self.dtype,
            device,
            adapters=train.lora,
            seed=recipe.seed,
        )
        self.models: dict[str, TrainedModel] = {POLICY: self.policy}
        self.batch = Batch()
        self.copied: dict[int, Copies] = {}  # of an export, by file
        self.routes: RoutesOnRank | None = None  # of the policy; None: its routers choose
        self.microbatches_at_once = 1  # in a pass without gradients
        self.temperature = 1.0  # by which logits are divided

    def load_batch(self, batch: RankBatch) -> None:
        """Takes this data rank's part of a step, and forgets the one before."""
        self.batch = as_tensors(
            batch,
            self.layout,
            self.where.context,
            self.device,
            has_logits=self.has_logits,
            at_once=self.microbatches_at_once,
            routes=self.routes,
        )

    def logprobs(
        self, output: Tensor, response: ResponseTokens, *, entropy: bool, sharpening: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Returns the response's logprobs and entropies (0 if unwanted): float32 [tokens]. output: the last stage's.
        sharpening: divides the temperature."""
        head, where = self.head(self.temperature / sharpening), (response.positions, response.labels, response.kept)
        return kept_logprobs(output, *where, head, entropy=entropy)

    def head(self, temperature: float) -> Head:
        """Returns the policy's head at a temperature. For ranks with logits."""
        architecture = self.policy.architecture
        weight = output_weight(unwrapped(self.policy.chunks[-1]))
        return Head(weight, self.shard(architecture.vocab), head_scale(architecture, temperature))

    def shard(self, vocab: int) -> VocabularyShard:
        """Returns the rows of the policy's output matrix that this rank has, of ids below `vocab`."""
        architecture, tensor = self.policy.architecture, self.layout.tensor
        first = self.where.tensor * (architecture.padded_vocab(tensor) // tensor)
        return VocabularyShard(vocab, first, parallel_state.get_tensor_model_parallel_group() if tensor > 1 else None)

    @property
    def has_logits(self) -> bool:
        """Returns whether this rank is on the last pipeline stage, which computes logits and the loss."""
        return self.where.pipeline == self.layout.pipeline - 1

    @property
    def answers(self) -> bool:
        """Returns whether this rank answers the driver for all: it is the first rank of the last pipeline stage."""
        where = self.where
        return self.has_logits and not (where.tensor or where.context or where.data)

    # --- weights out --------------------------------------------------------------------------------------------------

    def manifest(self) -> Manifest:
        """Returns this rank's part of the policy, in coordinates of the Hugging Face checkpoint."""
        return self.policy.manifest()

    def adapter_manifest(self) -> Manifest:
        """Returns this rank's part of the policy's adapters, in coordinates of a PEFT checkpoint."""
        return self.policy.trained_adapters.manifest

    def tensors(self) -> dict[str, Tensor]:
        """Returns the storages of `manifest`: the policy's weights themselves; merged copies of those with adapters."""
        return self.policy.tensors()

    def write_export(self, export: Export, plan: WeightPlan, source: int, adapters: bool) -> None:
        """Writes this rank's part of an export of the policy, or of its adapters alone. Raises CheckpointError.

        This rank is the plan's `source`-th, with its manifest or its adapter_manifest.
        """
        require_own(plan.sources[source], self.adapter_manifest() if adapters else self.manifest())
        self.policy.offload.require(["parameters"])
        write_part(export, plan, source, self.policy.trained_adapters.tensors() if adapters else self.tensors())

    def copy_export(self, export: Export, plan: WeightPlan, source: int) -> None:
        """Copies this rank's part of an export of the policy to host memory, for write_copied_export."""
        require_own(plan.sources[source], self.manifest())
        self.policy.offload.require(["parameters"])
        tensors, files = self.tensors(), plan.destinations_of(source)
        self.copied = {index: list(copies_for(export, plan, source, index, tensors)) for index in files}

    def write_copied_export(self, export: Export) -> None:
        """Writes what was copied. Not collective, and for any thread. Raises CheckpointError."""
        copied, self.copied = self.copied, {}
        for index, copies in copied.items():
            write_copies(export, index, copies)

    def broken(self) -> dict[str, str]:
        """Returns a description of each weight that is not finite, by its name in checkpoints."""
        return {
            weight if name == POLICY else f"the {name}'s {weight}": given
            for name, model in self.models.items()
            for weight, given in model.broken().items()
        }

    # --- checkpoints, memory, process ---------------------------------------------------------------------------------

    def take_snapshot(self) -> None:
        """Copies this rank's part of the training state to host memory. Raises CheckpointError."""
        for model in self.models.values():
            model.take_snapshot()

    def write_snapshot(self, directory: Path) -> tuple[tuple[SavedFile, ...], dict[str, Contents]]:
        """Writes the copied state. Returns files with checksums, and their contents by model, for finish_snapshot.

        Not collective, and for any thread: training goes on meanwhile. Raises CheckpointError.
        """
        written = {name: model.snapshot.write(directory, PLACES[name]) for name, model in self.models.items()}
        return tuple(file for file, _ in written.values()), {name: contents for name, (_, contents) in written.items()}

    def finish_snapshot(self, directory: Path, *of_ranks: Mapping[str, Contents]) -> tuple[SavedFile, ...]:
        """Writes the lists of contents, when every rank has written; one rank does. Raises CheckpointError."""
        files: list[SavedFile] = []
        for name, model in self.models.items():
            files += model.snapshot.finish(directory, PLACES[name], [contents[name] for contents in of_ranks])
        return tuple(files)

    def load(self, directory: Path) -> None:
        """Replaces the training state by a saved one, of any layout. Raises CheckpointError."""
        for name, model in self.models.items():
            model.load(directory / PLACES[name])

    def release(self, parts: Iterable[Part | Literal["critic"]]) -> None:
        """Moves parts to host memory until `restore`; what needs them raises RankError meanwhile. `critic` is all of
        the critic."""
        for offload, held in self._memory(list(parts)):
            offload.release(held)

    def restore(self, parts: Iterable[Part | Literal["critic"]]) -> None:
        for offload, held in self._memory(list(parts)):
            offload.restore(held)

    def _memory(self, parts: Sequence[Part | Literal["critic"]]) -> Iterator[tuple[Offload, Sequence[Part]]]:
        """Yields each model's Offload with its own parts of these."""
        yield self.policy.offload, [part for part in parts if part != "critic"]
        if "critic" in self.models and "critic" in parts:
            yield self.models["critic"].offload, ("parameters", "gradients", "optimizer")

    def close(self) -> None:
        process.stop()


class SftRank(ModelRank):
    """A training rank of supervised fine-tuning, which loads a step's batch as one minibatch."""

    def update(self, lr: float) -> SftUpdate | None:
        """Takes one optimizer step on the loaded batch. One rank returns loss and gradient norm, the others None.

        Raises RankError as TrainedModel.optimizer_step does.
        """
        nats = self.compute_gradients()
        grad_norm = self.policy.optimizer_step(lr)
        loss = self._over_ranks(nats)
        return None if loss is None else SftUpdate(loss, grad_norm)

    def evaluate(self) -> TokenLoss | None:
        """Returns the loss of the loaded batch on one rank, None on the others."""
        total = self._zero()
        for nats in self.policy.read_tokens(self.batch, self._nats):
            total += nats.sum()
        return self._over_ranks(total)

    def compute_gradients(self) -> Tensor:
        """Computes the gradients of the mean loss of the batch's tokens, summed over all ranks and not clipped.

        Returns the sum of this rank's tokens' losses.
        """
        batch, total = self._minibatch, self._zero()

        def loss(index: int, output: Tensor) -> Tensor:
            nats = self._nats(output, batch.responses[index])
            total.add_(nats.detach().sum())
            return nats.sum() / max(batch.tokens, 1)  # of all ranks and microbatches

        self.policy.compute_gradients(batch.packed, loss)
        return total

    def _nats(self, output: Tensor, response: ResponseTokens) -> Tensor:
        """Returns -log p of each of the assistant's tokens of one microbatch, float32 [tokens]."""
        return -self.logprobs(output, response, entropy=False)[0]

    @property
    def _minibatch(self) -> Minibatch:
        (minibatch,) = self.batch.minibatches
        return minibatch

    def _zero(self) -> Tensor:
        return torch.zeros((), dtype=torch.float64, device=self.device)

    def _over_ranks(self, total: Tensor) -> TokenLoss | None:
        """Returns the loss of all ranks' tokens on the rank that answers, None on the others."""
        if self.has_logits:
            sum_over_ranks(total)
        return TokenLoss(total.item(), self._minibatch.tokens) if self.answers else None

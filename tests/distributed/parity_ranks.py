"""Functions that tests run on every rank with a model alone: build it in a layout, load it, compute logits."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megagrpo.batching.rank_batches import Microbatch, TrainSequence
from megagrpo.layout.parallel import ParallelLayout, rank_grid
from megagrpo.megatron import model, process
from megagrpo.megatron.batch import Packed, pack
from megagrpo.megatron.heads import Head, VocabularyShard, head_scale, output_weight, scaled, vocabulary_logprobs
from megagrpo.megatron.trained_model import TrainedModel
from megagrpo.recipe.schema import LayoutConfig, TrainConfig
from megagrpo.weights.families import read_architecture
from megagrpo.weights.families.architecture import Architecture
from tests.distributed.step_ranks import Parts, gradients_of
from tests.distributed.te_ranks import build_as_on_gpus
from tests.methods import rows_of


def load_model(directory: Path, layout: ParallelLayout, dtype: str = "float32", **train: Any) -> TrainedModel:
    """Loads this rank's part of the model; `train` sets other fields of the recipe's train section."""
    settings = TrainConfig(layout=LayoutConfig(**vars(layout)), distributed_optimizer=False, **train)
    where = rank_grid(layout)[dist.get_rank()]
    return TrainedModel(read_architecture(directory), settings, where, directory, getattr(torch, dtype), "cpu")


@dataclass(frozen=True)
class RankLogits:
    """Logits [tokens, padded vocab / tensor] that one rank computed, and which sequence and position each is of."""

    tensor_rank: int
    rows: np.ndarray
    positions: np.ndarray
    logits: np.ndarray


def logits_of_models(
    directories: list[Path],
    layout: ParallelLayout,
    microbatches: list[list[list[int]]],
    dtype: str = "float32",
    layer_spec: str = "auto",
) -> list[RankLogits | None]:
    """For each model, this rank's logits of its part of `microbatches[m][sequence][token]`; None on earlier stages."""
    process.start_parallel(layout, seed=1)
    if layer_spec == "transformer_engine":
        build_as_on_gpus()
    models = (load_model(directory, layout, dtype, layer_spec=layer_spec) for directory in directories)
    return [logits_of_chunks(model.chunks, model.architecture, layout, microbatches) for model in models]


def logits_and_gradients(
    directories: list[Path], layout: ParallelLayout, microbatches: list[list[list[int]]]
) -> list[tuple[RankLogits | None, Parts]]:
    """For each model, this rank's logits, and its gradients of minus the sum of all logprobs."""
    process.start_parallel(layout, seed=1)
    packed, found = rank_microbatches(layout, microbatches), []
    for directory in directories:
        trained = load_model(directory, layout)
        arch, chunks = trained.architecture, trained.chunks
        logits = logits_of_chunks(chunks, arch, layout, microbatches)

        def loss(index: int, hidden: torch.Tensor, chunks: Any = chunks, arch: Architecture = arch) -> torch.Tensor:
            return -response_logprobs(chunks, arch, layout, packed[index], hidden)[0].sum()

        trained.compute_gradients(packed, loss)
        found.append((logits, gradients_of(trained)))
    return found


def logits_of_chunks(
    chunks: list[torch.nn.Module], arch: Architecture, layout: ParallelLayout, microbatches: list[list[list[int]]]
) -> RankLogits | None:
    """Returns the logits of this rank's part of the microbatches; None on earlier stages."""
    packed, outputs = rank_microbatches(layout, microbatches), []

    def keep(_: int, hidden: torch.Tensor) -> torch.Tensor:
        outputs.append(scaled(logits_of(chunks[-1], hidden).float(), arch.logit_scale, arch.logit_cap))
        return hidden.sum()

    model.forward(chunks, packed, keep)
    if not outputs:
        return None
    sequences = [micro.sequences for micro in rank_sequences(layout, microbatches)]
    rows = torch.cat([rows_of(micro, of_micro) for micro, of_micro in zip(packed, sequences, strict=True)])
    positions = torch.cat([micro.sequences.positions for micro in packed])
    real = rows >= 0
    return RankLogits(
        parallel_state.get_tensor_model_parallel_rank(),
        rows[real].numpy(),
        positions[real].numpy(),
        torch.cat(outputs)[real].numpy(),
    )


def logits_of(chunk: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """[tokens, padded vocab / tensor] from the last stage's output, neither scaled nor capped."""
    return hidden @ output_weight(model.unwrapped(chunk)).t()


def response_logprobs(
    chunks: list[torch.nn.Module],
    arch: Architecture,
    layout: ParallelLayout,
    packed: Packed,
    hidden: torch.Tensor,
    entropy: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs, and entropies where they are asked for, of the response tokens: [response tokens] each."""
    columns = arch.padded_vocab(layout.tensor) // layout.tensor
    group = parallel_state.get_tensor_model_parallel_group() if layout.tensor > 1 else None
    first = columns * rank_grid(layout)[dist.get_rank()].tensor
    (response,) = packed.responses
    weight, shard = output_weight(model.unwrapped(chunks[-1])), VocabularyShard(arch.vocab, first, group)
    head = Head(weight, shard, head_scale(arch, 1.0))
    return vocabulary_logprobs(hidden, response.positions, response.labels, head, entropy=entropy)


def rank_microbatches(layout: ParallelLayout, microbatches: list[list[list[int]]]) -> list[Packed]:
    where = rank_grid(layout)[dist.get_rank()]
    mine = rank_sequences(layout, microbatches)
    return [pack(micro, layout=layout, context_rank=where.context, device="cpu") for micro in mine]


def rank_sequences(layout: ParallelLayout, microbatches: list[list[list[int]]]) -> list[Microbatch]:
    """Each data rank takes every data-th sequence of each microbatch. Rows count the sequences in order."""
    where = rank_grid(layout)[dist.get_rank()]
    rows = count()
    numbered = [[train_sequence(tokens, next(rows)) for tokens in sequences] for sequences in microbatches]
    return [Microbatch(tuple(sequences[where.data :: layout.data])) for sequences in numbered]


def train_sequence(tokens: list[int] | np.ndarray, row: int) -> TrainSequence:
    return TrainSequence(
        tokens=np.array(tokens),
        loss_mask=np.arange(len(tokens)) > 0,
        rollout_logprobs=np.zeros(len(tokens)),
        row=row,
    )

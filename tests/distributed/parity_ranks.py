"""The ranks' side of the parity tests: build a model in a layout, load it, and run it on packed microbatches.

Not a test module, so that ranks need not import transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from megagrpo.batching.rank_batches import Microbatch, TrainSequence
from megagrpo.layout.parallel import ParallelLayout, rank_grid
from megagrpo.megatron import model, process
from megagrpo.megatron.batch import NO_ROW, PackedTensors, pack
from megagrpo.megatron.config import transformer_config
from megagrpo.megatron.heads import VocabularyShard, output_weight, vocabulary_logprobs
from megagrpo.recipe.schema import LayoutConfig, TrainConfig
from megagrpo.weights.families import read_architecture
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.files.loading import load_files
from megagrpo.weights.sides.megatron_rank import LOCAL_SPEC


@dataclass(frozen=True)
class RankLogits:
    """Logits [tokens, padded vocab / tensor] that one rank computed, and which sequence and position each is of."""

    tensor_rank: int
    rows: np.ndarray
    positions: np.ndarray
    logits: np.ndarray


def logits_of_models(
    directories: list[Path], layout: ParallelLayout, microbatches: list[list[list[int]]], dtype: str = "float32"
) -> list[RankLogits | None]:
    """For each model, this rank's logits of its part of `microbatches[m][sequence][token]`; None on earlier stages."""
    process.start_parallel(layout, seed=1)
    return [
        logits_of_chunks(load_model(directory, layout, getattr(torch, dtype))[0], layout, microbatches)
        for directory in directories
    ]


def logits_of_chunks(
    chunks: list[torch.nn.Module], layout: ParallelLayout, microbatches: list[list[list[int]]]
) -> RankLogits | None:
    """What this rank's model chunks compute of its part of the microbatches; None on earlier stages."""
    outputs: list[tuple[torch.Tensor, PackedTensors]] = []

    def forward_step(batches: Any, chunk: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        packed = next(batches)

        def keep(hidden: torch.Tensor, non_loss_data: bool) -> None:
            outputs.append((logits_of(chunk, hidden).float(), packed))

        return model.output_of(chunk, packed), keep

    with torch.no_grad():
        run_schedule(chunks, forward_step, rank_microbatches(layout, microbatches), forward_only=True)
    if not outputs:
        return None
    rows, positions = (torch.cat([getattr(packed, name) for _, packed in outputs]) for name in ("rows", "positions"))
    real = rows != NO_ROW
    return RankLogits(
        parallel_state.get_tensor_model_parallel_rank(),
        rows[real].numpy(),
        positions[real].numpy(),
        torch.cat([logits for logits, _ in outputs])[real].numpy(),
    )


def logits_of(chunk: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """[tokens, padded vocab / tensor] from the last stage's output."""
    return hidden @ output_weight(model.unwrapped(chunk)).t()


def load_model(
    directory: Path, layout: ParallelLayout, dtype: torch.dtype, **train: Any
) -> tuple[list[torch.nn.Module], Architecture]:
    """This rank's chunks of the model in `directory`; `train` sets other fields of the recipe's train section."""
    arch = read_architecture(directory)
    recipe = TrainConfig(layout=LayoutConfig(**vars(layout)), **train)
    chunks = model.build_chunks(arch, transformer_config(arch, recipe, dtype, "cpu"), layout)
    where = rank_grid(layout)[torch.distributed.get_rank()]
    manifest = LOCAL_SPEC.manifest(arch, layout, where, str(dtype).removeprefix("torch."))
    load_files(directory, manifest, model.named_tensors(chunks))
    return chunks, arch


def response_logprobs(
    chunks: list[torch.nn.Module],
    arch: Architecture,
    layout: ParallelLayout,
    packed: PackedTensors,
    hidden: torch.Tensor,
    entropy: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs, and entropies where they are asked for, of the response tokens: [response tokens] each."""
    columns = arch.padded_vocab(layout.tensor) // layout.tensor
    group = parallel_state.get_tensor_model_parallel_group() if layout.tensor > 1 else None
    first = columns * rank_grid(layout)[torch.distributed.get_rank()].tensor
    at = packed.mask.nonzero()[:, 0]
    return vocabulary_logprobs(
        hidden,
        at,
        packed.labels[at],
        output_weight(model.unwrapped(chunks[-1])),
        VocabularyShard(arch.vocab, first, group),
        temperature=1.0,
        entropy=entropy,
    )


def rank_microbatches(layout: ParallelLayout, microbatches: list[list[list[int]]]) -> list[PackedTensors]:
    """Each data rank takes every data-th sequence of each microbatch. Rows count the sequences in order."""
    where = rank_grid(layout)[torch.distributed.get_rank()]
    packed, row = [], 0
    for sequences in microbatches:
        mine = []
        for index, tokens in enumerate(sequences):
            if index % layout.data == where.data:
                mine.append(train_sequence(tokens, row))
            row += 1
        packed.append(pack(Microbatch(tuple(mine)), layout=layout, context_rank=where.context, device="cpu"))
    return packed


def train_sequence(tokens: list[int] | np.ndarray, row: int) -> TrainSequence:
    return TrainSequence(
        tokens=np.array(tokens),
        loss_mask=np.arange(len(tokens)) > 0,
        rollout_logprobs=np.zeros(len(tokens)),
        row=row,
    )


def run_schedule(
    chunks: list[torch.nn.Module], forward_step: Any, packed: list[PackedTensors], forward_only: bool, tokens: int = 1
) -> Any:
    """Megatron's pipeline schedule over `packed`; every model chunk sees all microbatches in order.

    `tokens` in each microbatch matters only where a test gives up variable_seq_lengths.
    """
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(packed) for _ in chunks] if len(chunks) > 1 else iter(packed),
        model=chunks,
        num_microbatches=len(packed),
        seq_length=tokens,
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )

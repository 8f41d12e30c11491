"""A small training rank for the tests of checkpoints and memory release: plain cross-entropy on fixed sequences."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from megagrpo.batching.rank_batches import Microbatch
from megagrpo.layout.parallel import ParallelLayout, rank_grid
from megagrpo.megatron import process
from megagrpo.megatron.batch import pack
from megagrpo.megatron.config import transformer_config
from megagrpo.megatron.model import build_chunks, forward_backward, named_tensors, sum_gradients
from megagrpo.megatron.state import TrainingState, parameters_of, shards_of
from megagrpo.megatron.trained_model import make_optimizer, set_learning_rate, wrap_chunks
from megagrpo.recipe import schema
from megagrpo.weights.families import read_architecture, tensors_of
from megagrpo.weights.files.loading import load_files
from megagrpo.weights.sides.megatron_rank import LOCAL_SPEC
from tests.distributed.parity_ranks import response_logprobs, train_sequence

LENGTHS = (9, 17, 5, 12)
ALONE = ParallelLayout()


@dataclass
class TinyTraining:
    """The model in `directory` in a layout on ranks that tests.rank_group has started."""

    directory: Path
    layout: ParallelLayout = ALONE
    distributed_optimizer: bool = True
    dtype: str = "float32"
    weights: bool = True  # load them; otherwise they are noise, for a checkpoint to replace
    state: TrainingState = field(init=False)

    def __post_init__(self) -> None:
        process.start_parallel(self.layout, seed=7)
        self.where = rank_grid(self.layout)[dist.get_rank()]
        self.architecture = read_architecture(self.directory)
        train = schema.TrainConfig(layout=schema.LayoutConfig(**vars(self.layout)), total_steps=1)
        dtype = getattr(torch, self.dtype)
        self.config = transformer_config(self.architecture, train, dtype, "cpu")
        chunks = build_chunks(self.architecture, self.config, self.layout)
        manifest = LOCAL_SPEC.manifest(self.architecture, self.layout, self.where, self.dtype)
        tensors = named_tensors(chunks)
        if self.weights:
            load_files(self.directory, manifest, tensors)
        else:
            for tensor in tensors.values():
                tensor.normal_()
        self.wrapped = wrap_chunks(chunks, self.config, self.distributed_optimizer)
        settings = schema.OptimizerConfig(lr=1e-2, weight_decay=0.1, clip_grad=1.0)
        self.optimizer = make_optimizer(self.wrapped, settings, self.distributed_optimizer, dtype)
        sum_gradients(self.config)
        self.state = TrainingState(self.wrapped, self.optimizer, tensors_of(self.architecture), self.layout, manifest)

    def step(self) -> tuple[float, float]:
        """One Adam step on all sequences: loss (mean over tokens) and gradient norm, on every rank."""
        sequences = [
            train_sequence(np.random.default_rng(row).integers(0, self.architecture.vocab, length), row)
            for row, length in enumerate(LENGTHS)
        ]
        total = sum(length - 1 for length in LENGTHS)
        mine = [
            pack(Microbatch((sequence,)), layout=self.layout, context_rank=self.where.context, device="cpu")
            for sequence in sequences[self.where.data :: self.layout.data]
        ]
        losses = torch.zeros(1, dtype=torch.float64)

        def loss(index: int, hidden: torch.Tensor) -> torch.Tensor:
            logprobs, _ = response_logprobs(self.wrapped, self.architecture, self.layout, mine[index], hidden)
            part = -logprobs.sum() / total
            losses.add_(part.detach().double() / self.layout.tensor)
            return part

        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        forward_backward(self.wrapped, mine, loss)
        set_learning_rate(self.optimizer, 1e-2, 0.1)
        _, norm, _ = self.optimizer.step()
        dist.all_reduce(losses)
        return losses.item(), float(norm)

    def steps(self, count: int) -> list[tuple[float, float]]:
        return [self.step() for _ in range(count)]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Copies of all weights and states of this rank."""
        shards = shards_of(self.optimizer)
        found = {name: parameter.detach().clone() for name, parameter in parameters_of(self.wrapped).items()}
        for name, parameter in parameters_of(self.wrapped).items():
            if parameter in shards:
                found |= {f"{kind}.{name}": flat.clone() for kind, flat in shards[parameter].tensors.items()}
        return found

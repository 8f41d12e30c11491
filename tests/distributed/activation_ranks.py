"""Memory that a training rank allocates above its model during passes over packed sequences, on the CPU's allocator."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megagrpo.batching.rank_batches import Microbatch, TrainSequence
from megagrpo.layout.parallel import rank_grid
from megagrpo.megatron import process
from megagrpo.megatron.batch import PackedTensors, pack
from megagrpo.megatron.config import transformer_config
from megagrpo.megatron.heads import VocabularyShard, output_weight, vocabulary_logprobs
from megagrpo.megatron.lora import Adapters
from megagrpo.megatron.model import build_chunks, forward, forward_backward, sum_gradients, unwrapped
from megagrpo.megatron.trained_model import wrap_chunks
from megagrpo.recipe import schema
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.sides.megatron_rank import LOCAL_SPEC

RUNS = 2
"""Of several ranks: what gloo's threads free is not recorded, so that too much may seem to be held, never less."""


@dataclass(frozen=True)
class Measured:
    """Most bytes held at once beyond what was there before."""

    update: int
    logprobs: int


def measure(
    arch: Architecture, train: schema.TrainConfig, dtype: str, lengths: Sequence[int], microbatches: int
) -> Measured:
    """Forward and backward passes of some microbatches, each of sequences of these lengths, all response tokens."""
    layout = train.layout.parallel()
    process.start_parallel(layout, seed=1)
    where = rank_grid(layout)[dist.get_rank()]
    config = transformer_config(arch, train, getattr(torch, dtype), "cpu")
    chunks = build_chunks(arch, config, layout)
    if train.lora is not None:
        Adapters(chunks, arch, LOCAL_SPEC.manifest(arch, layout, where, dtype), train.lora, seed=1)
    sum_gradients(config)
    wrapped = wrap_chunks(chunks, config, train.distributed_optimizer)
    columns = arch.padded_vocab(layout.tensor) // layout.tensor
    group = parallel_state.get_tensor_model_parallel_group() if layout.tensor > 1 else None
    shard = VocabularyShard(arch.vocab, columns * where.tensor, group)

    batch: list[PackedTensors] = []

    def loss(index: int, hidden: torch.Tensor) -> torch.Tensor:
        at = batch[index].mask.nonzero()[:, 0]
        weight = output_weight(unwrapped(wrapped[-1]))
        labels = batch[index].labels[at]
        with_gradient = torch.is_grad_enabled()
        logprobs, entropy = vocabulary_logprobs(
            hidden, at, labels, weight, shard, temperature=1.0, entropy=with_gradient
        )
        return (logprobs + entropy).sum()

    def update() -> None:
        for chunk in wrapped:
            chunk.zero_grad_buffer()
        forward_backward(wrapped, batch, loss)

    def pack_anew() -> None:
        batch[:] = [
            pack(_microbatch(arch, lengths, seed), layout=layout, context_rank=where.context, device="cpu")
            for seed in range(microbatches)
        ]

    peaks = []
    for run in (update, partial(forward, wrapped, batch, loss)):
        pack_anew()
        run()  # what is kept from pass to pass is not counted
        found = []
        for _ in range(RUNS if dist.get_world_size() > 1 else 1):
            pack_anew()
            found.append(peak_bytes(run))
        peaks.append(min(found))
    return Measured(*peaks)


def peak_bytes(run: Callable[[], object]) -> int:
    """The most that `run` had allocated at once, beyond what there was before.

    A block whose address is given out again was freed, also if that was not recorded.
    """
    blocks: dict[int, int] = {}
    held = peak = 0
    for address, size in allocations(run):
        if size > 0:
            held += size - blocks.get(address, 0)
            blocks[address] = size
            peak = max(peak, held)
        else:
            held -= blocks.pop(address, 0)
    return peak


def allocations(run: Callable[[], object]) -> list[tuple[int, int]]:
    """Address and bytes of every allocation, and of every block that is freed with bytes below 0, in order."""
    profile: AbstractContextManager[torch.profiler.profile] = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    )
    with profile as found:
        run()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        found.export_chrome_trace(str(path))
        events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("name") == "[memory]"]
    return [(event["args"]["Addr"], event["args"]["Bytes"]) for event in sorted(events, key=lambda event: event["ts"])]


def _microbatch(arch: Architecture, lengths: Sequence[int], seed: int) -> Microbatch:
    random = np.random.default_rng(seed)
    sequences = []
    for row, length in enumerate(lengths):
        mask = np.ones(length, dtype=bool)
        mask[0] = False
        tokens = random.integers(0, arch.vocab, length)
        sequences.append(TrainSequence(tokens, mask, np.zeros(length, dtype=np.float32), row=row))
    return Microbatch(tuple(sequences))

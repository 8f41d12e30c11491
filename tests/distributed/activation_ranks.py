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

from megagrpo.batching.rank_batches import Microbatch
from megagrpo.layout.parallel import rank_grid
from megagrpo.megatron import process
from megagrpo.megatron.batch import Packed, pack
from megagrpo.megatron.config import transformer_config
from megagrpo.megatron.lora import Adapters
from megagrpo.megatron.model import build_chunks, forward, forward_backward, sum_gradients
from megagrpo.megatron.trained_model import wrap_chunks
from megagrpo.recipe import schema
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.sides.megatron_rank import LOCAL_SPEC
from tests.distributed.parity_ranks import response_logprobs, train_sequence

RUNS = 2
"""With several ranks. What gloo's threads free is not recorded: a run may seem to hold too much, never too little."""


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
    wrapped = wrap_chunks(chunks, config, train)
    batch: list[Packed] = []

    def loss(index: int, hidden: torch.Tensor) -> torch.Tensor:
        with_gradient = torch.is_grad_enabled()
        logprobs, entropy = response_logprobs(wrapped, arch, layout, batch[index], hidden, entropy=with_gradient)
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
    return Microbatch(
        tuple(train_sequence(random.integers(0, arch.vocab, length), row) for row, length in enumerate(lengths))
    )

"""Peak memory of everything between the last hidden states and their gradients, by several ways.

    python benchmarks/logits_memory.py [--device cuda --dtype bfloat16 --tokens 16384 --vocab 151936 --hidden 4096]

In multiples of one [tokens, vocabulary] float32 tensor, forward and backward, gradients of hidden states and output
matrix included. Every allocation counts: on CPUs by torch's profiler, on CUDA by the allocator's own peak.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megagrpo.batching.rank_batches import TrainSequence
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.megatron import process
from megagrpo.megatron.heads import Head, HeadScale, VocabularyShard, vocabulary_logprobs
from megagrpo.megatron.kept_head import KeptTokens, kept_logprobs, kept_tokens
from megagrpo.types import KeptSets

ROUNDS = 3
Way = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(hidden [tokens, hidden], weight [vocab, hidden], labels [tokens]) -> a loss, made of logprobs of the labels."""


def ours(entropy: bool, prompt_share: float = 0.0) -> Way:
    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        first = int(prompt_share * len(hidden))
        positions = torch.arange(first, len(hidden), device=hidden.device)
        shard = VocabularyShard(len(weight), 0, None)
        logprobs, entropies = vocabulary_logprobs(
            hidden, positions, labels[first:], Head(weight, shard, HeadScale()), entropy=entropy
        )
        return -(logprobs.sum() + entropies.sum()) if entropy else -logprobs.sum()

    return loss


def kept(ids: int) -> Way:
    """Over `ids` of each token, its label and others drawn at random, as top_p and top_k leave them."""

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        tokens = len(hidden)
        if (found := sets.get(tokens)) is None:
            others = np.random.default_rng(0).integers(0, len(weight), (tokens, ids - 1))
            of_tokens = [np.union1d(row, label) for row, label in zip(others, labels.cpu().numpy(), strict=True)]
            plain = np.ones(tokens, bool), np.zeros(tokens, np.float32)
            sequence = TrainSequence(labels.cpu().numpy(), *plain, row=0, kept=KeptSets.of(of_tokens))
            found = sets[tokens] = kept_tokens([sequence], np.arange(tokens), hidden.device)
        positions, shard = torch.arange(tokens, device=hidden.device), VocabularyShard(len(weight), 0, None)
        head = Head(weight, shard, HeadScale())
        logprobs, _ = kept_logprobs(hidden, positions, labels, found, head, entropy=False)
        return -logprobs.sum()

    sets: dict[int, KeptTokens | None] = {}
    return loss


def of_megatron(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Its output layer's product and its vocabulary-parallel cross-entropy, as GPTModel.forward(labels=...) does."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce

    logits = linear_with_grad_accumulation_and_async_allreduce(hidden[:, None], weight, None, False, False, False)
    return vocab_parallel_cross_entropy(logits.float(), labels[:, None]).sum()


def of_torch(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = (hidden @ weight.t()).float()
    return -logits.log_softmax(-1).gather(1, labels[:, None]).sum()


WAYS: dict[str, Way] = {
    "megagrpo": ours(entropy=False),
    "megagrpo, with entropy": ours(entropy=True),
    "megagrpo, half are prompts": ours(entropy=False, prompt_share=0.5),
    "megagrpo, 8 kept of each": kept(8),
    "megagrpo, 512 kept of each": kept(512),
    "megagrpo, 2048 kept of each": kept(2048),
    "Megatron: logits, cross-entropy": of_megatron,
    "torch: logits, log_softmax": of_torch,
}


def peak_bytes(run: Callable[[], None], device: str) -> int:
    """The most that `run` had allocated at once, beyond what there was before."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("name") == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event["ts"]):
        held += event["args"]["Bytes"]
        peak = max(peak, held)
    return peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    for name, value in {"tokens": 4096, "vocab": 32768, "hidden": 256}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        process.start(0, 1, f"file://{directory}/store", given.device, 60.0)
        process.start_parallel(ParallelLayout(), seed=1)
        try:
            measure(given)
        finally:
            process.stop()


def measure(given: argparse.Namespace) -> None:
    torch.manual_seed(0)
    options = {"device": given.device, "dtype": getattr(torch, given.dtype)}
    hidden = torch.randn(given.tokens, given.hidden, **options)
    weight = torch.randn(given.vocab, given.hidden, **options) * 0.02
    labels = torch.randint(0, given.vocab, (given.tokens,), device=given.device)
    unit = 4 * given.tokens * given.vocab
    print(
        f"{given.tokens} tokens, vocabulary {given.vocab}, hidden {given.hidden}, {given.dtype} on {given.device}; "
        f"one [tokens, vocabulary] in float32 is {unit / 2**20:.0f} MiB"
    )
    if given.device == "cpu":
        print(f"{torch.get_num_threads()} threads, load average {os.getloadavg()[0]:.1f}; seconds: least of {ROUNDS}")
    print(f"{'':34s} {'x tensor':>9s} {'seconds':>9s}")
    for name, way in WAYS.items():

        def run(way: Way = way) -> None:
            inputs = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
            way(*inputs, labels).backward()
            if given.device == "cuda":
                torch.cuda.synchronize()

        run()
        seconds = []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
        least = min(seconds) if given.device == "cpu" else statistics.median(seconds)
        print(f"{name:34s} {peak_bytes(run, given.device) / unit:9.2f} {least:9.3f}")


if __name__ == "__main__":
    main()

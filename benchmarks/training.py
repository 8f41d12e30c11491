"""Tokens per second of the training step alone: packed, padded, and in a plain transformers loop.

    python benchmarks/training.py                   # CPU: one rank, all threads
    python benchmarks/training.py --device cuda     # one GPU: model FLOPs utilisation of models from 0.5B to 8B, 8k to
                                                    # 64k tokens, by what the backward pass computes again
    python benchmarks/training.py --table           # that table of a tiny model on CPUs: shows only that it runs

Everyone trains the same random model on the same sequences, whose lengths have a long tail, with the same loss
(REINFORCE, mean over tokens) and AdamW. Tokens are those of the sequences, padding not counted.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megagrpo.batching.rank_batches import RankBatch, TrainSequence, count_response_tokens, make_rank_batches
from megagrpo.batching.work import head_work, work_of
from megagrpo.megatron import process
from megagrpo.megatron.rank import TrainRank
from megagrpo.plan.case import GPUS
from megagrpo.recipe.schema import Recipe
from megagrpo.weights.families import read_architecture
from megagrpo.weights.families.architecture import Architecture

LR = 1e-5
CPU_MODEL = {
    "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 8192,
}  # fmt: skip
CPU_TOKENS_PER_MICROBATCH = 4096
GPU_MODELS: dict[str, dict[str, int]] = {
    "0.5B": {
        "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
        "num_key_value_heads": 2, "vocab_size": 151936,
    },
    "1.5B": {
        "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
        "num_key_value_heads": 2, "vocab_size": 151936,
    },
    "3B": {
        "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
        "num_key_value_heads": 2, "vocab_size": 151936,
    },
    "8B, 8 of its 32 layers": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 8, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256,
    },
}  # fmt: skip
"""One GPU does not hold the optimizer of 8B parameters; its layers are all alike."""
GPU_TOKENS_PER_MICROBATCH = (8192, 16384, 32768, 65536)
CPU_TABLE = {"tiny": CPU_MODEL | {"num_hidden_layers": 2, "vocab_size": 512}}, (512,)


def recompute_ways(layers: int) -> dict[str, Any]:
    """Values of train.recompute for a model of so many layers, at least 2, by their names in the table."""
    half = layers // 2
    ways = {"none": "none", "selective": "selective", "mlp": {"modules": ["mlp"]}}
    return ways | {f"layers: {half}": {"layers": half}, "full": "full"}


def peak_flops(name: str) -> float | None:
    """Dense bfloat16 of the card that torch names so, from the planner's data sheets; None if they have none."""
    words = name.replace("-", " ").split()
    known = [gpu for gpu in GPUS.values() if set(gpu.name.replace("-", " ").split()) <= set(words)]
    return max(known, key=lambda gpu: len(gpu.name)).flops if known else None


def make_model(directory: Path, sizes: dict[str, int], dtype: torch.dtype) -> None:
    import transformers

    config = transformers.Qwen2Config(**sizes, max_position_embeddings=65536, tie_word_embeddings=False)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(directory)


def make_recipe(dtype: str, tokens_per_microbatch: int, recompute: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "benchmark-training",
            "model": {"path": "unused", "dtype": dtype},
            "data": {"train": [{"path": "unused"}]},
            "rollout": {"prompts_per_step": 8, "samples_per_prompt": 8},
            "reward": {"functions": [{"function": "gsm8k"}]},
            "algorithm": {"kl": {"coefficient": 0.0}},
            "train": {
                "total_steps": 1,
                "tokens_per_microbatch": tokens_per_microbatch,
                "recompute": recompute,
                "optimizer": {"lr": LR},
            },
        }
    )


def long_tailed(count: int, vocab: int, longest: int) -> list[TrainSequence]:
    """Prompts of 32 tokens; responses of log-normal length, whose longest are about ten times the median."""
    random = np.random.default_rng(0)
    responses = np.clip(random.lognormal(np.log(longest / 10), 1.0, count).astype(int), 4, longest - 32)
    return [
        TrainSequence(
            tokens=random.integers(0, vocab, 32 + n),
            loss_mask=np.arange(32 + n) >= 32,
            rollout_logprobs=np.zeros(32 + n, np.float32),
            row=row,
        )
        for row, n in enumerate(responses.tolist())
    ]


def of_rank(rank: TrainRank, batches: Sequence[RankBatch], rows: int) -> Callable[[], None]:
    advantages = np.random.default_rng(1).normal(size=rows).astype(np.float32)

    def step() -> None:
        (batch,) = batches
        rank.load_batch(batch)
        rank.update(advantages, LR, 0.0, 1)

    return step


def of_transformers(directory: Path, sequences: Sequence[TrainSequence], tokens_per_batch: int) -> Callable[[], None]:
    """Returns a step as written without a framework: like lengths side by side, padded to the longest of a batch."""
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    advantages = torch.from_numpy(np.random.default_rng(1).normal(size=len(sequences)).astype(np.float32))
    batches: list[list[TrainSequence]] = [[]]
    for sequence in sorted(sequences, key=lambda s: -len(s.tokens)):
        if batches[-1] and len(batches[-1][0].tokens) * (len(batches[-1]) + 1) > tokens_per_batch:
            batches.append([])
        batches[-1].append(sequence)
    total = sum(int(s.loss_mask.sum()) for s in sequences)

    def step() -> None:
        for batch in batches:
            width = max(len(s.tokens) for s in batch)
            ids, mask, real = (torch.zeros(len(batch), width, dtype=torch.long) for _ in range(3))
            for row, s in enumerate(batch):
                ids[row, : len(s.tokens)] = torch.from_numpy(s.tokens)
                mask[row, : len(s.tokens)] = torch.from_numpy(s.loss_mask)
                real[row, : len(s.tokens)] = 1
            logits = model(input_ids=ids, attention_mask=real, use_cache=False).logits[:, :-1]
            logprobs = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
            weights = advantages[[s.row for s in batch], None] * mask[:, 1:]
            (-(logprobs * weights).sum() / total).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def seconds_of(steps: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each step by round. Steps take turns, to run under the same load. A first round does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if number:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def on_cpu(rounds: int, threads: int) -> None:
    torch.set_num_threads(threads)
    sequences = long_tailed(64, CPU_MODEL["vocab_size"], 1024)
    tokens = sum(len(s.tokens) for s in sequences)
    with tempfile.TemporaryDirectory() as parent:
        directory = Path(parent) / "model"
        make_model(directory, CPU_MODEL, torch.float32)
        recipe = make_recipe("float32", CPU_TOKENS_PER_MICROBATCH, "none")
        rank = TrainRank(recipe, 0, f"file://{parent}/store", str(directory), "cpu")
        torch.set_num_threads(threads)
        packed = batches_of(recipe, directory, sequences)
        full = batches_of(recipe, directory, widened(sequences))
        steps = {
            "megagrpo, packed": of_rank(rank, packed, len(sequences)),
            "megagrpo, padded to the longest": of_rank(rank, full, len(sequences)),
            "transformers, padded by batch": of_transformers(directory, sequences, CPU_TOKENS_PER_MICROBATCH),
        }
        seconds = seconds_of(steps, rounds)
        rank.close()
    lengths = np.array([len(s.tokens) for s in sequences])
    print(
        f"{len(sequences)} sequences, {tokens} tokens, median {np.median(lengths):.0f}, longest {lengths.max()}; "
        f"up to {CPU_TOKENS_PER_MICROBATCH} tokens at once; {threads} threads, load average {os.getloadavg()[0]:.1f}; "
        f"medians of {rounds}"
    )
    print(f"{'':34s} {'s/step':>8s} {'tokens/s':>9s} {'packed is':>10s}")
    first = seconds["megagrpo, packed"]
    for name, of_way in seconds.items():
        ratio = statistics.median(b / a for a, b in zip(first, of_way, strict=True))
        middle = statistics.median(of_way)
        print(f"{name:34s} {middle:8.3f} {tokens / middle:9.0f} {ratio:9.2f}x")


def batches_of(recipe: Recipe, directory: Path, sequences: Sequence[TrainSequence]) -> list[RankBatch]:
    return make_rank_batches(
        sequences,
        layout=recipe.train.layout.parallel(),
        minibatches=1,
        tokens_per_microbatch=recipe.train.tokens_per_microbatch,
        seed=0,
        work=work_of(read_architecture(directory)),
    )


def widened(sequences: Sequence[TrainSequence]) -> list[TrainSequence]:
    """Every sequence as long as the longest, with padding that is not trained on."""
    longest = max(len(s.tokens) for s in sequences)

    def wide(values: np.ndarray) -> np.ndarray:
        return np.pad(values, (0, longest - len(values)))

    return [
        replace(s, tokens=wide(s.tokens), loss_mask=wide(s.loss_mask), rollout_logprobs=wide(s.rollout_logprobs))
        for s in sequences
    ]


def table(device: str, models: dict[str, dict[str, int]], capacities: Sequence[int], rounds: int) -> None:
    """MFU: forward_operations, three times for forward and backward, over what the GPU could have done."""
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    peak = peak_flops(name)
    print(f"{name}; 4 microbatches a step, sequences with a long tail, medians of {rounds} steps")
    print(
        f"{'':24s} {'tokens/microbatch':>18s} {'recompute':>10s} {'s/step':>8s} {'tokens/s':>9s} {'MFU':>6s} "
        f"{'peak GiB':>9s}"
    )
    for model, sizes in models.items():
        with tempfile.TemporaryDirectory() as parent:
            directory = Path(parent) / "model"
            make_model(directory, sizes, torch.bfloat16)
            ways = recompute_ways(sizes["num_hidden_layers"])
            for number, (capacity, way) in enumerate(product(capacities, ways)):
                print(f"{model:24s} {capacity:18d} {way:>10s} ", end="", flush=True)
                store = f"file://{parent}/store{number}"
                recipe = make_recipe("bfloat16", capacity, ways[way])
                found = measure(device, directory, sizes, recipe, store, rounds)
                print(found.row(peak) if found else "out of memory")
                gc.collect()  # a rank refers to itself: its memory is free only then
                if device == "cuda":
                    torch.cuda.empty_cache()
                    torch.cuda.reset_peak_memory_stats()


@dataclass(frozen=True)
class Measured:
    """`operations` are floating-point operations of a step, forward and backward; `held_bytes` the most on the GPU."""

    seconds: float
    tokens: int
    operations: float
    held_bytes: int

    def row(self, peak: float | None) -> str:
        used = "" if peak is None else f"{self.operations / self.seconds / peak:6.1%}"
        return f"{self.seconds:8.3f} {self.tokens / self.seconds:9.0f} {used:>6s} {self.held_bytes / 2**30:9.1f}"


def measure(
    device: str, directory: Path, sizes: dict[str, int], recipe: Recipe, store: str, rounds: int
) -> Measured | None:
    """A step of 4 microbatches. None if the GPU is too small."""
    capacity = recipe.train.tokens_per_microbatch
    sequences = filling(long_tailed(4096, sizes["vocab_size"], capacity // 2), 4 * capacity)
    tokens = sum(len(s.tokens) for s in sequences)
    try:
        rank = TrainRank(recipe, 0, store, str(directory), device)
        step = of_rank(rank, batches_of(recipe, directory, sequences), len(sequences))
        middle = statistics.median(seconds_of({"": step}, rounds)[""])
    except torch.OutOfMemoryError:
        return None
    finally:
        process.stop()  # as rank.close does, also where the GPU is too small to make a rank
    held = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    return Measured(middle, tokens, 3 * forward_operations(read_architecture(directory), sequences), held)


def forward_operations(architecture: Architecture, sequences: Sequence[TrainSequence]) -> float:
    """Floating-point operations of a forward pass: work_of's, with the output layer at response tokens only."""
    lengths = np.array([len(s.tokens) for s in sequences])
    without_logits = int(lengths.sum()) - count_response_tokens(sequences)
    return float(work_of(architecture).of(lengths).sum()) - head_work(architecture) * without_logits


def filling(sequences: Sequence[TrainSequence], tokens: int) -> list[TrainSequence]:
    """Returns as many as fit into 19/20 of `tokens`, so that packing them needs no further microbatch."""
    ends = np.cumsum([len(s.tokens) for s in sequences])
    return list(sequences[: int(np.searchsorted(ends, 0.95 * tokens))])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--table", action="store_true", help="on CPUs the table of --device cuda, of a tiny model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    given = parser.parse_args()
    if given.device == "cuda":
        table("cuda", GPU_MODELS, GPU_TOKENS_PER_MICROBATCH, given.rounds)
    elif given.table:
        table("cpu", *CPU_TABLE, given.rounds)
    else:
        on_cpu(given.rounds, given.threads)


if __name__ == "__main__":
    main()

"""Seconds that training waits for a checkpoint: for a copy in host memory, or for its files too.

    python benchmarks/checkpoints.py

One training rank on this machine's CPUs. The rounds take turns: steps alone, then steps beside the files of a save.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from training import long_tailed, make_model, make_recipe, of_rank

from megagrpo.batching.rank_batches import make_rank_batches
from megagrpo.checkpoint.store import CheckpointStore
from megagrpo.checkpoint.trainer_state import TrainerState
from megagrpo.megatron.rank import TrainRank

MODEL = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 16384,
}
ROUNDS = 5


def seconds_of(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main() -> None:
    with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor(1) as files:
        directory = Path(place)
        make_model(directory / "model", MODEL, torch.float32)
        recipe = make_recipe("float32", 1024, "none")
        rank = TrainRank(recipe, 0, f"file://{directory}/store", str(directory / "model"), "cpu")
        sequences = long_tailed(8, MODEL["vocab_size"], 128)
        layout = recipe.train.layout.parallel()
        step = of_rank(
            rank, make_rank_batches(sequences, layout=layout, minibatches=1, tokens_per_microbatch=1024, seed=1), 8
        )
        store = CheckpointStore(directory / "checkpoints", keep_last=1)

        def write(number: int) -> None:
            saving = store.begin(number)
            written, contents = rank.write_snapshot(saving)
            store.commit(TrainerState(number, number, {}, {}), written + rank.finish_snapshot(saving, contents))

        step()
        first = seconds_of(rank.take_snapshot)
        copies, writes, alone, beside = [], [], [], []
        for number in range(1, ROUNDS + 1):
            alone.append(seconds_of(step))
            copies.append(seconds_of(rank.take_snapshot))
            writes.append(seconds_of(partial(write, 2 * number - 1)))
            rank.take_snapshot()
            saving = files.submit(write, 2 * number)
            beside.append(seconds_of(step))
            saving.result()
        size = sum(path.stat().st_size for path in (directory / "checkpoints").rglob("*") if path.is_file()) / 2
    copy, written = statistics.median(copies), statistics.median(writes)
    print(f"{size / 1e6:.0f} MB a checkpoint; medians of {ROUNDS}; the first copy, with its plan, took {first:.3f} s")
    print("| training waits for | s |\n|---|---|")
    print(f"| the copy and the files | {copy + written:.3f} |")
    print(f"| the copy | {copy:.3f} |")
    print(f"\nratio {(copy + written) / copy:.1f}")
    print(
        f"a step alone {statistics.median(alone):.3f} s, beside the writing of files {statistics.median(beside):.3f} s"
    )


if __name__ == "__main__":
    main()

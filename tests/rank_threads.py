"""Ranks as threads of one process, for arithmetic that only needs sums over ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

DEADLINE_SECONDS = 300.0  # only there to end a test that hangs
SumOverRanks = Callable[[torch.Tensor], None]


def on_threads(ranks: int, function: Callable[[int, SumOverRanks], Any]) -> list[Any]:
    """Results by rank of `function`(rank, a sum over ranks in place). All ranks must sum in the same order."""
    barrier = threading.Barrier(ranks)
    summands = [torch.empty(0)] * ranks

    def run(rank: int) -> Any:
        def sum_over_ranks(tensor: torch.Tensor) -> None:
            summands[rank] = tensor.clone()
            barrier.wait(DEADLINE_SECONDS)
            tensor.copy_(torch.stack(summands).sum(0))
            barrier.wait(DEADLINE_SECONDS)

        try:
            return function(rank, sum_over_ranks)
        except Exception:
            barrier.abort()
            raise

    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(run, range(ranks)))

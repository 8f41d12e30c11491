"""One check in the processes that torchrun starts: `run_one CHECK DEVICE DIRECTORY FOUND`. Figures go to FOUND, a JSON
object in each line, as soon as they are known."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from tools.gpu_check.figures import Figure

if TYPE_CHECKING:
    from tools.gpu_check.training import Setting

DETERMINISTIC = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
ENVIRONMENT: dict[str, dict[str, str]] = {
    "attention": {"NVTE_DEBUG": "1", "NVTE_DEBUG_LEVEL": "1"},
    "offload": DETERMINISTIC,
    "checkpoints": DETERMINISTIC,
}
"""Environment variables of a check's processes."""


def check(name: str) -> Callable[[Setting], Iterator[Figure]]:
    if name == "rollouts":
        from tools.gpu_check.rollouts import rollouts

        return rollouts
    from tools.gpu_check import training

    found: Callable[[Setting], Iterator[Figure]] = getattr(training, name)
    return found


def main(name: str, device: str, directory: str, found: str) -> None:
    own = Path(directory) / name
    own.mkdir(exist_ok=True)
    from tools.gpu_check.training import Setting  # imports Megatron, which takes seconds

    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    setting = Setting(device, own, rank, ranks)
    if name in ("offload", "checkpoints"):
        import torch

        torch.use_deterministic_algorithms(True)  # as a deterministic recipe does: with warn_only attention is not
    for figure in check(name)(setting):
        if rank == 0:
            with Path(found).open("a") as lines:
                lines.write(json.dumps(asdict(figure)) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

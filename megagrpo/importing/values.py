"""Answers that several frameworks share: names of evaluation sets, layouts, microbatches, warm-ups."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from pathlib import PurePosixPath
from typing import Any

from megagrpo.importing.rows import Answer, Missing, Write, whole

PLAIN_NAMES = ("train", "test", "val", "valid", "validation", "eval", "dev", "data")


def set_name(path: str) -> str:
    """Returns a name for an evaluation set, from its file: gsm8k for gsm8k/test.parquet, aime for aime.jsonl."""
    file = PurePosixPath(path)
    stem = file.name.split(".")[0]
    named = file.parent.name if stem.lower() in PLAIN_NAMES and file.parent.name else stem
    return re.sub(r"[^A-Za-z0-9_-]+", "_", named).strip("_-") or "held_out"


def layout_of(gpus: int, sizes: Mapping[str, int], engine: int, engines: int | None = None) -> Answer:
    """Returns data ranks and engines on `gpus` GPUs that both use in turn. sizes: of tensor, pipeline and context;
    engine: GPUs of one engine. engines: their number, if they have GPUs of their own."""
    ranks = prod(sizes.values())
    if gpus % ranks:
        product = " x ".join(f"{name} {size}" for name, size in sizes.items())
        return Missing(f"{gpus} GPUs are no multiple of {product}: give train.layout")
    if engines is None and gpus % engine:
        return Missing(f"{gpus} GPUs are no multiple of engines of {engine}: give rollout.engines")
    return Write({"train.layout.data": gpus // ranks, "rollout.engines": engines or gpus // engine})


def microbatches(longest: int) -> tuple[int, str]:
    """Returns the tokens of a microbatch that holds the longest sequence, and why."""
    return max(longest, 8192), "as many as the longest sequence, at least"


def warmup(share: float, steps: Any) -> Answer:
    """Returns the steps of a warm-up that is a share of all. steps: None if unknown before the data is counted."""
    if not share:
        return Write({"train.optimizer.warmup_steps": 0})
    if steps is None:
        return Missing(f"a share of all steps ({share:g}): give their number in train.optimizer.warmup_steps")
    return Write({"train.optimizer.warmup_steps": round(share * whole(steps))})

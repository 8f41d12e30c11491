"""Options that several frameworks share: names, entries of data, layouts, microbatches, warm-ups."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from megagrpo.importing.rows import Answer, Missing, Options, Write, text, whole

MICROBATCH_TOKENS = 16384
"""Most tokens of a microbatch that is given in responses: results do not depend on it, memory does."""
CHECKPOINTS_KEPT = 2
"""checkpoint.keep_last of a recipe that does not set it."""
PLAIN_NAMES = ("train", "test", "val", "valid", "validation", "eval", "dev", "data")


def run_name(value: Any) -> str:
    """Returns a name that a run may have: other characters become underscores."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text(value)).strip("._-")[:100] or "imported"


def set_name(path: str) -> str:
    """Returns a name for an evaluation set, from its file: gsm8k for gsm8k/test.parquet, aime for aime.jsonl."""
    file = PurePosixPath(path)
    stem = file.name.split(".")[0]
    named = file.parent.name if stem.lower() in PLAIN_NAMES and file.parent.name else stem
    return re.sub(r"[^A-Za-z0-9_-]+", "_", named).strip("_-") or "held_out"


def data_entries(paths: Sequence[str], columns: Mapping[str, Any], amount: Any = None) -> list[dict[str, Any]]:
    """Returns entries of data.train, or of a set's files. amount: rows of each; None, 0 or below: all."""
    own: dict[str, Any] = {"columns": dict(columns)} if columns else {}
    if amount is not None and (isinstance(amount, float) or whole(amount) > 0):
        own["amount"] = amount
    return [{"path": path, **own} for path in paths]


def layout_of(gpus: int, sizes: Mapping[str, int], engine: int, engines: int | None = None) -> Answer:
    """Returns data ranks and engines on `gpus` GPUs that both use in turn. sizes: of tensor, pipeline and context;
    engine: GPUs of one engine. engines: their number, if they have GPUs of their own."""
    each = 1
    for size in sizes.values():
        each *= size
    if gpus % each:
        product = " x ".join(f"{name} {size}" for name, size in sizes.items())
        return Missing(f"{gpus} GPUs are no multiple of {product}: give train.layout")
    if engines is None and gpus % engine:
        return Missing(f"{gpus} GPUs are no multiple of engines of {engine}: give rollout.engines")
    return Write({"train.layout.data": gpus // each, "rollout.engines": engines or gpus // engine})


def kept(value: Any, _: Options) -> Answer:
    """Answers for the number of checkpoints that are kept, which are all there if it is None or below 1."""
    if value is None or whole(value) < 1:
        return Missing(f"all are kept there, the last {CHECKPOINTS_KEPT} here: give checkpoint.keep_last a number")
    return Write({"checkpoint.keep_last": whole(value)})


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

"""Data that the pictures of runs are drawn from."""

from __future__ import annotations

import json
from pathlib import Path


def curve(metrics: Path, name: str) -> tuple[list[int], list[float]]:
    """Steps and values of a metric in a metrics.jsonl."""
    entries = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    logged = [entry for entry in entries if name in entry]
    return [entry["step"] for entry in logged], [entry[name] for entry in logged]

"""A reward that differs between samples of an untrained model already: the share of digits in a response."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any


def share_of_digits(
    data_source: str, response: str, ground_truth: str, extra_info: dict[str, Any], hold: str = ""
) -> dict[str, float]:
    """hold: a JSON file of {"metrics": a run's metrics.jsonl, "lines": n}. While it exists and the run has logged n
    steps, this waits, and says so by another file."""
    while hold and is_held(Path(hold)):
        Path(f"{hold}.reached").touch()
        time.sleep(0.02)
    digits = sum(character.isdigit() for character in response)
    return {"score": digits / max(len(response), 1), "digits": float(digits)}


def is_held(hold: Path) -> bool:
    try:
        asked = json.loads(hold.read_text())
        return Path(asked["metrics"]).read_text().count("\n") == asked["lines"]
    except FileNotFoundError:
        return False

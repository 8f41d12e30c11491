"""A recipe for tests of trackers. Nothing in it has to exist."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megagrpo.recipe.schema import Recipe


def make_recipe(directory: Path, **track: Any) -> Recipe:
    """A recipe whose run lies in directory/runs/adder; `track` are fields of its track section."""
    return Recipe.model_validate(
        {
            "name": "adder",
            "model": {"path": "model"},
            "data": {"train": [{"path": "train.parquet"}]},
            "rollout": {"prompts_per_step": 2},
            "reward": {"functions": [{"function": "gsm8k"}]},
            "train": {"total_steps": 10},
            "track": {"directory": str(directory / "runs"), "console": "off", "mlflow": None} | track,
        }
    )

"""What reward.models take of their devices."""

from __future__ import annotations

import math
from functools import lru_cache
from pathlib import Path

from megagrpo.errors import ModelError
from megagrpo.recipe.schema import Recipe
from megagrpo.weights.sides.checkpoint import read_header, weight_files


def weight_bytes(recipe: Recipe, name: str, device: str) -> int | None:
    """Weights of one of reward.models on each of its devices; None if its files are not on this machine."""
    config = recipe.reward.models[name]
    parameters = stored_parameters(config.path)
    if parameters is None:
        return None
    item = 4 if config.dtype == "float32" or (config.dtype == "auto" and device == "cpu") else 2
    return parameters * item // max(1, config.devices)


@lru_cache
def stored_parameters(path: str) -> int | None:
    """Elements of all tensors of a model's directory; None if it is not there."""
    try:
        files = weight_files(Path(path))
        return sum(math.prod(entry.shape) for file in files for entry in read_header(file).values())
    except ModelError:
        return None

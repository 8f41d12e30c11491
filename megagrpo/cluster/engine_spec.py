"""What an engine is made from: all that travels from the driver to the process that will hold it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from megagrpo.recipe.schema import Recipe


@dataclass(frozen=True)
class EngineSpec:
    """What engine `index` of a recipe is made from. `gpus` are its devices as its node counts them, none on CPUs.

    `api_key` is for a server that somebody else runs.
    """

    recipe: Recipe
    index: int
    model_directory: str
    tokenizer_directory: str
    device: str
    gpus: tuple[int, ...]
    api_key: str | None = field(repr=False)

    @property
    def name(self) -> str:
        return f"engine {self.index}"

    @property
    def threads(self) -> int:
        """This engine's part of the cores of the node where it is asked, as if all engines were there."""
        return max(1, (os.cpu_count() or 1) // self.recipe.rollout.engines)

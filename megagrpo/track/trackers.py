"""The trackers by their names. A recipe has a field in `track:` for each, and setup.py an extra for its package.

Every recipe imports this module. So trackers import their libraries when they are opened.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from megagrpo.track.mlflow import MLflow
from megagrpo.track.tensorboard import TensorBoard
from megagrpo.track.tracked_run import TrackedRun
from megagrpo.track.wandb import WandB

if TYPE_CHECKING:
    from megagrpo.recipe.schema import AnyRecipe

TRACKERS: dict[str, type[TrackedRun]] = {"mlflow": MLflow, "wandb": WandB, "tensorboard": TensorBoard}


def trackers_of(recipe: AnyRecipe) -> Mapping[str, type[TrackedRun]]:
    """Returns the trackers that the recipe has on."""
    return {name: tracker for name, tracker in TRACKERS.items() if getattr(recipe.track, name)}


def without_trackers() -> dict[str, bool | None]:
    """Returns the fields of `track:` that switch all trackers off."""
    return {name: False if tracker.section is bool else None for name, tracker in TRACKERS.items()}

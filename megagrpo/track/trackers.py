"""The trackers. The key of each is its field in `track:` of a recipe, and its extra of the package."""

from __future__ import annotations

from collections.abc import Mapping

from megagrpo.recipe.schema import AnyRecipe
from megagrpo.track.mlflow import MLflow
from megagrpo.track.tensorboard import TensorBoard
from megagrpo.track.tracked_run import TrackedRun
from megagrpo.track.wandb import WandB

TRACKERS: dict[str, type[TrackedRun]] = {"mlflow": MLflow, "wandb": WandB, "tensorboard": TensorBoard}


def trackers_of(recipe: AnyRecipe) -> Mapping[str, type[TrackedRun]]:
    """Returns the trackers that the recipe has on."""
    return {name: tracker for name, tracker in TRACKERS.items() if tracker.place_of(recipe)}


def without_trackers(recipe: AnyRecipe) -> dict[str, bool | None]:
    """Returns the fields of `track:` that switch all trackers off."""
    return {name: False if isinstance(getattr(recipe.track, name, None), bool) else None for name in TRACKERS}

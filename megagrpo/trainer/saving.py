"""A run's checkpoints and its final model, written and read by all ranks together."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

from megagrpo.checkpoint.recipe_changes import allow_changes
from megagrpo.checkpoint.store import Checkpoint, CheckpointStore
from megagrpo.checkpoint.trainer_state import TrainerState
from megagrpo.cluster.policy import Policy
from megagrpo.errors import CheckpointError, MegagrpoError, Problem
from megagrpo.recipe.defaults import checkpoint_directory
from megagrpo.recipe.schema import Recipe
from megagrpo.weights.executors.checkpoint_export import begin_export, finish_export
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.plan import make_plan


def open_store(recipe: Recipe) -> CheckpointStore:
    saving = recipe.checkpoint
    return CheckpointStore(checkpoint_directory(recipe), keep_last=saving.keep_last, keep_best=saving.keep_best)


def checkpoint_to_resume(store: CheckpointStore, recipe: Recipe) -> Checkpoint | None:
    """The newest complete checkpoint of this run; None if there is none.

    Raises CheckpointError if there is one and the recipe says never to resume, RecipeError if the recipe has changed in
    a way that the checkpoint cannot continue with.
    """
    store.remove_leftovers()
    found = store.latest_complete()
    if found is None:
        return None
    if recipe.checkpoint.resume == "never":
        raise CheckpointError(
            Problem(
                where=f"{found.path}: this run has a checkpoint already",
                given="checkpoint.resume: never",
                needed="a run without checkpoints",
                fix="give the recipe another name, delete the directory, or set checkpoint.resume to auto",
            )
        )
    allow_changes(found.state.recipe, recipe_values(recipe))
    return found


def recipe_values(recipe: Recipe) -> dict[str, Any]:
    """The resolved recipe as JSON values, as checkpoints remember it."""
    return recipe.model_dump(mode="json")


def save(policy: Policy, store: CheckpointStore, state: TrainerState) -> Path:
    """Writes a complete checkpoint of `state.step`. Raises CheckpointError; older ones are then untouched."""
    directory = store.begin(state.step)
    try:
        written = policy.call("save", directory)
    except MegagrpoError:
        store.abandon(state.step)
        raise
    return store.commit(state, chain.from_iterable(written)).path


def export(policy: Policy, architecture: Architecture, model_directory: Path, directory: Path, dtype: str) -> None:
    """Writes the policy as a Hugging Face model: every rank its own boxes, nothing gathered. Raises CheckpointError."""
    begun = begin_export(directory, model_directory, architecture, dtype)
    plan = make_plan(policy.manifests(), begun.files)
    policy.write_export(begun, plan)
    finish_export(begun)

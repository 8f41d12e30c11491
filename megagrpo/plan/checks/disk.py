"""Room for checkpoints on the file system that they go to."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from math import prod
from pathlib import Path

from megagrpo.errors import Problem
from megagrpo.plan.parameters import total_parameters
from megagrpo.plan.units import byte_text
from megagrpo.recipe.defaults import checkpoint_directory
from megagrpo.recipe.schema import AnyRecipe, Recipe
from megagrpo.weights.families.architecture import Architecture, critic_of

STATE_BYTES = 12  # float32: the main weight and Adam's two moments (megatron/state.py)


def checkpoint_bytes(recipe: AnyRecipe, architecture: Architecture, critic: Architecture | None = None) -> int:
    """One checkpoint: what is trained, with its optimizer; a reference that follows; a critic. Files' headers apart."""
    lora = recipe.train.lora
    trained = total_parameters(architecture)
    if lora is not None:
        from megagrpo.weights.files.adapters import adapted_matrices, adapter_tensors  # imports torch: a second

        trained = sum(prod(t.shape) for t in adapter_tensors(adapted_matrices(architecture, lora.targets), lora.rank))
    total = STATE_BYTES * trained
    if isinstance(recipe, Recipe):
        algorithm = recipe.algorithm
        if algorithm.kl.coefficient and algorithm.reference.update_every_steps is not None:
            total += 4 * trained
        if algorithm.critic is not None:
            total += STATE_BYTES * total_parameters(critic_of(critic or architecture))
    return total


def runs_here(recipe: AnyRecipe) -> bool:
    """Whether a plan may take this machine's file systems for the run's, as far as it can tell."""
    return recipe.cluster.gpu is None and Path(recipe.model.path).is_dir()


def disk_problems(
    recipe: AnyRecipe, architecture: Architecture, critic: Architecture | None = None
) -> Iterator[Problem]:
    """Not even one checkpoint fits where they go, on this machine."""
    each, free = checkpoint_bytes(recipe, architecture, critic), free_bytes(recipe)
    if each > free:
        yield Problem(
            "checkpoint.directory",
            given=f"{byte_text(free)} free in {checkpoint_directory(recipe)}",
            needed=f"{byte_text(each)} for one checkpoint",
            fix="a directory on a larger file system",
        )


def disk_advice(recipe: AnyRecipe, architecture: Architecture, critic: Architecture | None = None) -> Iterator[Problem]:
    """Not all of the checkpoints that are kept fit; the new one is written before the oldest is deleted."""
    if not runs_here(recipe) and not Path(recipe.checkpoint.directory or "no such directory").is_dir():
        return
    keep, best = recipe.checkpoint.keep_last, recipe.checkpoint.keep_best is not None
    each, free = checkpoint_bytes(recipe, architecture, critic), free_bytes(recipe)
    directory = checkpoint_directory(recipe)
    saved = len(list(directory.glob("step_*"))) if directory.is_dir() else 0
    needed = max(1, keep + best + 1 - saved) * each
    if needed > free:
        kept = f"{keep} checkpoints{', the best' if best else ''} and the next"
        yield Problem(
            "checkpoint.keep_last",
            given=f"{byte_text(free)} free in {directory}, on this machine",
            needed=f"{byte_text(needed)} more for {kept}, of {byte_text(each)} each",
            fix="a directory on a larger file system, or a lower keep_last",
        )


def free_bytes(recipe: AnyRecipe) -> int:
    """Free space of the file system that checkpoints go to."""
    directory = checkpoint_directory(recipe).absolute()
    return shutil.disk_usage(next(path for path in (directory, *directory.parents) if path.exists())).free

"""What a recipe's open values mean on this machine."""

from __future__ import annotations

from pathlib import Path

from megagrpo.recipe.schema import AnyRecipe, Recipe


def dtype_name(recipe: AnyRecipe, device: str) -> str:
    """float32 or bfloat16: of weights and activations, in ranks and engines alike."""
    if recipe.model.dtype != "auto":
        return recipe.model.dtype
    return "bfloat16" if device == "cuda" else "float32"


def with_absolute_directories(recipe: Recipe) -> Recipe:
    """The same run for processes whose working directory is another."""
    track = recipe.track.model_copy(update={"directory": str(Path(recipe.track.directory).absolute())})
    sync = {"directory": str(Path(recipe.weights.directory).absolute())} if recipe.weights.directory else {}
    return recipe.model_copy(update={"track": track, "weights": recipe.weights.model_copy(update=sync)})


def engine_devices(recipe: Recipe) -> int:
    """Devices of one engine; 0 if somebody else runs it."""
    return {"transformers": 1, "sglang": recipe.rollout.layout.tensor, "external": 0}[recipe.rollout.engine]


def run_directory(recipe: AnyRecipe) -> Path:
    return Path(recipe.track.directory) / recipe.name


def checkpoint_directory(recipe: AnyRecipe) -> Path:
    return Path(recipe.checkpoint.directory) if recipe.checkpoint.directory else run_directory(recipe) / "checkpoints"


def export_directory(recipe: AnyRecipe) -> Path:
    """Where the final Hugging Face model goes."""
    return run_directory(recipe) / "hugging_face"


def adapter_directory(recipe: AnyRecipe) -> Path:
    """Where the final adapter of a run with train.lora goes, as PEFT's files."""
    return run_directory(recipe) / "adapter"


def sync_directory(recipe: Recipe) -> Path:
    """Where weights lie on their way to engines with weights.transfer: disk."""
    return (
        Path(recipe.weights.directory) / recipe.name if recipe.weights.directory else run_directory(recipe) / "weights"
    )

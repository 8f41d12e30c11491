"""A run's checkpoints and its final model, written and read by all ranks together."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from megagrpo.checkpoint.store import Checkpoint, CheckpointStore
from megagrpo.checkpoint.trainer_state import TrainerState, allow_changes
from megagrpo.cluster.train_ranks import TrainRanks
from megagrpo.errors import MegagrpoError, Problem, RecipeError
from megagrpo.preflight.preflight import Preflight
from megagrpo.recipe.defaults import adapter_directory, export_directory
from megagrpo.recipe.schema import AnyRecipe
from megagrpo.weights.files.adapters import adapted_matrices, adapter_tensors, peft_config
from megagrpo.weights.files.export import begin_adapter_export, begin_export, finish_export
from megagrpo.weights.plan import make_plan

EXPORTED_BY = "megagrpo.json"


def checkpoint_to_resume(store: CheckpointStore, recipe: AnyRecipe) -> Checkpoint | None:
    """The newest complete checkpoint of this run; None if there is none.

    Raises RecipeError if there is one though checkpoint.resume is never, or if the recipe has changed so that the
    checkpoint cannot continue with it.
    """
    store.remove_leftovers()
    found = store.latest_complete()
    if found is None:
        return None
    if recipe.checkpoint.resume == "never":
        given = "checkpoint.resume: never"
        needed = "a run without checkpoints"
        fix = "give the recipe another name, delete the directory, or set checkpoint.resume to auto"
        raise RecipeError(Problem(f"{found.path}: this run has a checkpoint already", given, needed, fix))
    allow_changes(found.state.recipe, recipe.model_dump(mode="json"))
    return found


def save(ranks: TrainRanks, store: CheckpointStore, state: TrainerState) -> Path:
    """Writes a complete checkpoint of `state.step`. Raises CheckpointError, leaving older ones untouched."""
    directory = store.begin(state.step)
    try:
        written = ranks.save(directory)
    except MegagrpoError:
        store.abandon(state.step)
        raise
    return store.commit(state, written).path


def export(
    ranks: TrainRanks, checked: Preflight[AnyRecipe], tokenizer: PreTrainedTokenizerBase, step: int, dtype: str
) -> Path:
    """Writes the policy as a Hugging Face model. Every rank writes its own boxes; nothing is gathered.

    Adapters are merged into its weights, and also written as PEFT files beside it. Raises CheckpointError.
    """
    recipe, lora = checked.recipe, checked.recipe.train.lora
    if lora is not None:
        matrices = adapted_matrices(checked.architecture, lora.targets)
        config = peft_config(matrices, lora.rank, lora.alpha, recipe.model.path)
        adapter = begin_adapter_export(adapter_directory(recipe), adapter_tensors(matrices, lora.rank), config, dtype)
        ranks.write_export(adapter, make_plan(ranks.adapter_manifests(), adapter.files), adapters=True)
        finish_export(adapter)
    begun = begin_export(export_directory(recipe), checked.model_directory, checked.architecture, dtype)
    ranks.write_export(begun, make_plan(ranks.manifests(), begun.files))
    if recipe.model.tokenizer or recipe.model.chat_template:  # else begin_export has copied the model's own files
        tokenizer.save_pretrained(begun.partial)
    (begun.partial / EXPORTED_BY).write_text(json.dumps({"run": recipe.name, "step": step}) + "\n", encoding="utf-8")
    finish_export(begun)
    return export_directory(recipe)


def exported_step(recipe: AnyRecipe) -> int | None:
    """The step whose weights are in the run's export directory; None if there is no export."""
    try:
        written = json.loads((export_directory(recipe) / EXPORTED_BY).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return written.get("step") if isinstance(written, dict) else None

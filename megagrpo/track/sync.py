"""Sends the files in a run's directory to its trackers: `megagrpo track sync`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pydantic

from megagrpo.errors import Problem, RecipeError, ReportError, TrackError, first_line
from megagrpo.recipe.defaults import checkpoint_directory
from megagrpo.recipe.load import KINDS, load_any
from megagrpo.recipe.schema import AnyRecipe, MLflowConfig
from megagrpo.recipe.yaml12 import parse
from megagrpo.track.delivered import Delivered, without_password
from megagrpo.track.metric_lines import MetricLines
from megagrpo.track.mlflow import MLflowRemote, database_problems, tracking_uri
from megagrpo.track.run_lock import only_process_of
from megagrpo.track.sink import RunStart
from megagrpo.track.status import read_status
from megagrpo.track.summary import newest_checkpoint
from megagrpo.track.tensorboard import TensorBoardRemote
from megagrpo.track.wandb import WandBRemote


def sync(directory: Path, mlflow_uri: str | None, say: Callable[[str], None]) -> None:
    """Sends each tracker of the run's recipe what it lacks; leaves what it has unchanged.

    mlflow_uri: another MLflow server than the recipe's. `say` gets a line for each tracker. Raises ReportError if no
    run is in `directory`, RecipeError if it is still running, and TrackError if a tracker cannot be reached.
    """
    saved = directory / "recipe.yaml"
    if not saved.is_file():
        needed = "the directory of a run: track.directory and name of its recipe, such as runs/NAME"
        raise ReportError(Problem(str(directory), "no recipe.yaml", needed))
    recipe = _recipe_of(saved, say)
    track = recipe.track.model_copy(update={"directory": str(directory.absolute().parent)})
    if mlflow_uri is not None:
        track = track.model_copy(
            update={"mlflow": (track.mlflow or MLflowConfig()).model_copy(update={"uri": mlflow_uri})}
        )
    recipe = recipe.model_copy(update={"track": track})
    if track.mlflow and (problems := [*database_problems("mlflow", tracking_uri(recipe))]):
        raise TrackError(problems)
    metrics = directory / "metrics.jsonl"
    if not MetricLines(metrics, after=-1).ahead() and metrics.exists() and b"\n" in metrics.read_bytes():
        raise ReportError(Problem(str(metrics), "no line that can be read", "JSON objects with step and time"))
    with only_process_of(directory):
        delivered, starts = Delivered(directory, anew=False), len(list(directory.glob("recipe.*.yaml")))
        named = {} if delivered.found else _named_in_checkpoint(recipe)
        run = RunStart(recipe, directory, total_steps=0, number=starts, run_ids=named)
        ended = read_status(directory)
        remotes: dict[str, MLflowRemote | WandBRemote | TensorBoardRemote] = {}
        if track.mlflow:
            remotes[f"mlflow, {without_password(tracking_uri(recipe))}"] = MLflowRemote(
                run, track.mlflow, delivered, live=False
            )
        if track.wandb:
            remotes["wandb"] = WandBRemote(run, track.wandb, delivered)
        if track.tensorboard:
            remotes["tensorboard"] = TensorBoardRemote(run, delivered, live=False)
        problems = []
        for name, remote in remotes.items():
            try:
                remote.bring()
                remote.finish(ended.for_trackers if ended else "interrupted")
            except Exception as error:  # noqa: BLE001  (files, databases and servers fail in many ways)
                fix = "start the tracker, or make room there, then try it again: it brings what is missing"
                problems.append(Problem(name, without_password(first_line(error)), "a tracker that takes the run", fix))
            else:
                lacks = remote.lacks if isinstance(remote, WandBRemote) else ""
                has = f"it lacks {lacks}" if lacks else "it has everything"
                say(f"{name}: {remote.brought} steps brought; {has}")
    if problems:
        raise TrackError(problems)
    if not remotes:
        say("the run's recipe has no trackers besides files: name a server with --mlflow URI")


def _recipe_of(saved: Path, say: Callable[[str], None]) -> AnyRecipe:
    """Loads the run's recipe. Leaves out and reports fields that this version of megagrpo lacks; params keep them.

    Raises RecipeError if the rest is no recipe.
    """
    try:
        return load_any(saved, []).recipe
    except RecipeError:
        tree = parse(saved.read_text(encoding="utf-8", errors="replace"), lambda line: f"{saved}:{line}").tree
        left_out = _without_unknown(tree) if isinstance(tree, dict) else []
        if not left_out:
            raise
        try:
            recipe = KINDS[str(tree.get("kind", "grpo"))].model_validate(tree)
        except (pydantic.ValidationError, KeyError):
            recipe = None
        if recipe is None:
            raise
    say(f"{saved}: of another version of megagrpo; this one does not know {', '.join(left_out)}")
    return recipe


def _without_unknown(tree: dict[str, Any]) -> list[str]:
    """Removes the fields that the schema lacks from the recipe; returns their paths."""
    try:
        KINDS[str(tree.get("kind", "grpo"))].model_validate(tree)
    except KeyError:
        return []
    except pydantic.ValidationError as error:
        unknown = [found["loc"] for found in error.errors() if found["type"] == "extra_forbidden"]
    else:
        return []
    removed = list[str]()
    for *outer, last in unknown:
        section: Any = tree
        for key in outer:
            # Where a section may be of several kinds, the place names the kind too, which is no key.
            if key in section if isinstance(section, dict) else isinstance(section, list):
                section = section[key]
        if isinstance(section, dict) and section.pop(last, removed) is not removed:
            removed.append(".".join(map(str, (*outer, last))))
    return removed


def _named_in_checkpoint(recipe: AnyRecipe) -> dict[str, str]:
    """Reads the run's id by tracker from the newest checkpoint."""
    newest = newest_checkpoint(checkpoint_directory(recipe))
    try:
        state = json.loads((newest / "trainer.json").read_text(encoding="utf-8")) if newest else {}
        return {str(name): str(run_id) for name, run_id in (state.get("tracker_runs") or {}).items()}
    except (OSError, ValueError, AttributeError, RecursionError):
        return {}

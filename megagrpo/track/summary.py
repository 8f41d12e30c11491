"""The result of a run, in a few lines: its end, held-out scores, the places of its files, and the next commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megagrpo.progress import clock
from megagrpo.recipe.defaults import adapter_directory, checkpoint_directory, export_directory, run_directory
from megagrpo.recipe.schema import AnyRecipe, Recipe
from megagrpo.track.status import HeldOut, RunStatus, held_out_scores
from megagrpo.track.trackers import trackers_of

SAVED = re.compile(r"step_(\d{6,})")
"""A complete checkpoint's directory."""
SCORES_SHOWN = 4


@dataclass(frozen=True)
class Summary:
    """The result at the end of a run's process.

    places: paths and addresses that exist, by name. after: commands, by what they are for.
    """

    status: RunStatus
    held_out: Sequence[HeldOut]
    places: dict[str, str]
    after: dict[str, str]

    def lines(self) -> Iterator[str]:
        status = self.status
        took = clock((status.ended or status.started) - status.started)
        of_total = f"{status.step:,} of {status.total_steps:,} steps"
        yield f"{status.state} after {took}, {of_total}"
        for score in self.held_out[:SCORES_SHOWN]:
            best = f"; best {score.best:.3f} at step {score.best_step}" if score.best_step != score.last_step else ""
            yield f"held-out {score.name} {score.last:.3f} at step {score.last_step}{best}"
        yield from table(list(self.places.items()))
        if self.after:
            yield "next:"
            yield from (f"  {line}" for line in table(list(self.after.items())))

    def as_json(self) -> dict[str, Any]:
        """Returns the summary as values for JSON."""
        return {
            **asdict(self.status),
            "held_out": [asdict(score) for score in self.held_out],
            "places": self.places,
            "next": self.after,
        }


def summary_of(recipe: AnyRecipe, status: RunStatus) -> Summary:
    """Returns the summary of a run with this recipe, from its directories. status: with its end."""
    directory, exported = run_directory(recipe), export_directory(recipe)
    saved = newest_checkpoint(checkpoint_directory(recipe))
    whole = status.state == "finished" and exported.is_dir()
    places = {"run directory": str(directory)}
    if saved is not None:
        places["checkpoint"] = str(saved)
    if whole:
        places["Hugging Face model"] = str(exported)
    if whole and recipe.train.lora is not None and adapter_directory(recipe).is_dir():
        places["adapters, for PEFT"] = str(adapter_directory(recipe))
    for name, tracker in trackers_of(recipe).items():
        if shown := tracker.shown_at(getattr(recipe.track, name), recipe):
            places[tracker.title] = shown
    if status.state == "failed":
        places["logs"] = str(directory / "logs")
    after = {what: shlex.join(words) for what, words in _next(recipe, status, saved, exported if whole else None)}
    return Summary(status, held_out_scores(directory), places, after)


def newest_checkpoint(directory: Path) -> Path | None:
    """Returns the newest complete checkpoint, by its name: its files are not read."""
    steps = {int(name[1]): path for path in directory.glob("step_*") if (name := SAVED.fullmatch(path.name))}
    return steps[max(steps)] if steps else None


def _next(
    recipe: AnyRecipe, status: RunStatus, saved: Path | None, exported: Path | None
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yields the next commands, each with what it is for."""
    directory = run_directory(recipe)
    written = str(directory / "recipe.yaml")
    again = "train" if isinstance(recipe, Recipe) else "sft"
    if status.step:
        yield "look at it", ("megagrpo", "report", str(directory))
    if recipe.checkpoint.resume != "never":
        if status.state != "finished":
            yield "continue", ("megagrpo", again, written)
        elif status.step >= status.total_steps:  # else a rule has ended it, and would again
            yield "train longer", ("megagrpo", again, written, longer(recipe, status.total_steps))
    evaluates = isinstance(recipe, Recipe) and recipe.eval.sets and recipe.rollout.kind.started_by_us
    if exported is not None and evaluates:
        yield "evaluate", ("megagrpo", "eval", str(directory), "--recipe", written)
    if exported is not None:
        to = ("--output", str(directory / "torch_dist"))
        yield "for Megatron-LM", ("megagrpo", "convert", "hf-to-megatron", "--source", str(exported), *to)
    elif saved is not None:
        to = ("--output", str(directory / f"{saved.name}_hugging_face"))
        yield "as a model", ("megagrpo", "convert", "megatron-to-hf", "--source", str(saved), *to)


def longer(recipe: AnyRecipe, total_steps: int) -> str:
    """Returns the override that makes a run twice as long."""
    if recipe.train.total_epochs is not None:
        return f"train.total_epochs={2 * recipe.train.total_epochs:g}"
    if isinstance(recipe, Recipe) and recipe.train.total_episodes is not None:
        return f"train.total_episodes={2 * recipe.train.total_episodes}"
    return f"train.total_steps={2 * total_steps}"


def table(rows: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Formats two columns, the first as wide as its longest text."""
    width = max((len(first) for first, _ in rows), default=0)
    return (f"{first:{width}}  {second}" for first, second in rows)

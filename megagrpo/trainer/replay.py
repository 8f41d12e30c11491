"""`megagrpo replay`: trains a step of a run again from its saved batch, by training ranks alone, and compares it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from megagrpo.checkpoint.store import CheckpointStore
from megagrpo.cluster import runtime
from megagrpo.errors import Problem, UnusableCheckpointError
from megagrpo.preflight.preflight import Preflight
from megagrpo.recipe.defaults import checkpoint_directory, plan_devices
from megagrpo.recipe.load import LoadedRecipe, load
from megagrpo.recipe.schema import Recipe
from megagrpo.track.trackers import without_trackers
from megagrpo.trainer.batches import ranges, read_batch, require_fitting, saved_steps
from megagrpo.trainer.one_half import start_train_run
from megagrpo.trainer.run import PhaseClock
from megagrpo.trainer.schedule import trained_step
from megagrpo.trainer.setup import first_kl_coefficient

NOT_COMPARED = ("seconds/", "tokens_per_second", "time", "eval/", "engines/", "trainer/", "memory/", "restarts")
"""Prefixes of metrics that measure the machine, or that engines made after the step."""
REPLAY = "replay"


@dataclass(frozen=True)
class Comparison:
    """Metrics of a step as logged and as trained again, both without NOT_COMPARED."""

    logged: Mapping[str, float]
    again: Mapping[str, float]

    @property
    def different(self) -> list[str]:
        return [name for name in self.again if name in self.logged and not _same(self.logged[name], self.again[name])]

    def lines(self) -> list[str]:
        """Returns a table of the metrics that both have; rows that differ show the difference."""
        both = sorted(self.logged.keys() & self.again.keys())
        wide = max(map(len, both), default=0)
        lines = [f"{'metric':{wide}}  {'logged':>14}  {'trained again':>14}  difference"]
        for name in both:
            before, after = self.logged[name], self.again[name]
            difference = f"{after - before:+.3g}" if name in self.different else ""
            lines.append(f"{name:{wide}}  {before:14.8g}  {after:14.8g}  {difference}".rstrip())
        differ = f"{len(self.different)} of {len(both)} metrics differ"
        lines.append(differ if self.different else f"all {len(both)} metrics are equal, bit for bit")
        left = sorted(self.logged.keys() ^ self.again.keys())
        not_compared = "not compared: seconds, idle shares, tokens_per_second, evaluations"
        lines.append(", ".join([not_compared, *left]))
        return lines


def load_replay(directory: Path, step: int, overrides: Sequence[str]) -> LoadedRecipe[Recipe]:
    """Loads the recipe that trained this step of the run in `directory`, with overrides. It writes logs of training
    ranks alone, to REPLAY in that directory. Raises RecipeError or UnusableCheckpointError."""
    loaded = load(directory / read_batch(directory, step).recipe, overrides)
    recipe, place = loaded.recipe, directory.absolute()
    track = recipe.track.model_copy(update={"directory": str(place), "rollouts": None, **without_trackers(recipe)})
    checkpoints = recipe.checkpoint.directory or str(place / "checkpoints")
    checkpoint = recipe.checkpoint.model_copy(update={"keep_batches": 0, "directory": checkpoints})
    return replace(loaded, recipe=recipe.model_copy(update={"name": REPLAY, "track": track, "checkpoint": checkpoint}))


def replay(checked: Preflight[Recipe], directory: Path, step: int, say: Callable[[str], None]) -> bool:
    """Trains the steps after the newest checkpoint before `step`, up to `step`, of the run in `directory` again.

    Reports the step's metrics beside those that the run has logged. Writes only to REPLAY in the run's directory.
    Returns True if no metric differs. Raises MegagrpoError.
    """
    recipe = checked.recipe
    found = CheckpointStore(checkpoint_directory(recipe).absolute(), keep_last=1).latest_complete(before=step)
    state = found.state if found else None
    steps = range(state.step + 1 if state else 1, step + 1)
    if absent := sorted(set(steps) - set(saved_steps(directory))):
        given = f"the newest checkpoint before it is {f'of step {state.step}' if state else 'none'}"
        fix = "train with a checkpoint.keep_batches of at least checkpoint.every_steps, or replay another step"
        where = f"{directory}: step {step} cannot be replayed"
        raise UnusableCheckpointError(Problem(where, given, f"the batches of {ranges(absent)}, too", fix))
    logged = logged_metrics(directory, step)
    say(f"step {step} of {directory}, from {found.path if found else checked.model_directory}")
    for line in found.warnings if found else ():
        say(line)
    with ExitStack() as closing:
        ray = runtime.start(recipe, devices_of=partial(plan_devices, engines_too=False))
        closing.callback(runtime.stop, ray)
        last = read_batch(directory, step)
        total = recipe.train.total_steps or last.total_steps
        run = start_train_run(checked, total, ray, closing, PhaseClock(), found)
        coefficient = first_kl_coefficient(recipe, state)
        for number in steps:
            batch = last if number == step else read_batch(directory, number)
            require_fitting(batch.sampled, recipe, checked.architecture.vocab, f"step {number} of {directory}")
            if batch.recipe != last.recipe:
                say(f"step {number} was trained with {batch.recipe}, and is now trained with {last.recipe}")
            done = trained_step(run, batch.sampled, number, coefficient)
            metrics, coefficient = done.metrics, done.kl_coefficient or 0.0
            if number < step:
                say(f"trained step {number}")
    if logged is None:
        say(f"the run has logged no step {step}: it may have ended in it")
        logged = {}
    compared = Comparison(logged, metrics)
    for line in compared.lines() if logged else [f"{name}: {value:.8g}" for name, value in sorted(metrics.items())]:
        say(line)
    return not compared.different


def logged_metrics(directory: Path, step: int) -> dict[str, float] | None:
    """Reads the line of this step in metrics.jsonl, without NOT_COMPARED; null becomes NaN. None: no such line."""
    path = directory / "metrics.jsonl"
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        needed = "the directory of a run, such as runs/NAME"
        raise UnusableCheckpointError(Problem(str(path), error.strerror or str(error), needed)) from error
    for line in reversed(lines):
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):  # cut off by the end of the run
            continue
        if isinstance(entry, dict) and entry.get("step") == step:
            return {
                name: math.nan if value is None else float(value)
                for name, value in entry.items()
                if name != "step" and not name.startswith(NOT_COMPARED) and isinstance(value, int | float | None)
            }
    return None


def _same(logged: float, again: float) -> bool:
    return logged == again or (math.isnan(logged) and not math.isfinite(again))

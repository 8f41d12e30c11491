"""One half of a run: sampling without training, or training on saved samples, of another run or of the run itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from megagrpo.batching.work import work_of
from megagrpo.checkpoint.store import Checkpoint, CheckpointStore
from megagrpo.checkpoint.trainer_state import TrainerState
from megagrpo.cluster import runtime
from megagrpo.cluster.runtime import Runtime, check_files
from megagrpo.cluster.stopping import StopRequested
from megagrpo.data.prompts import prompt_reader
from megagrpo.errors import Problem, RunStopped, UnusableCheckpointError
from megagrpo.preflight.preflight import Preflight
from megagrpo.recipe.defaults import checkpoint_directory, plan_devices, run_directory, with_absolute_directories
from megagrpo.recipe.load import LoadedRecipe, load
from megagrpo.recipe.schema import Recipe
from megagrpo.recipe.schema.eval import EvalConfig
from megagrpo.track.jsonl import step_entries
from megagrpo.track.rollout_files import TRAIN
from megagrpo.track.trackers import without_trackers
from megagrpo.trainer.batches import (
    Sampled,
    SavedBatch,
    ranges,
    read_batch,
    require_another_directory,
    require_fitting,
    save_batch,
    saved_steps,
)
from megagrpo.trainer.run import PhaseClock, SampleSource, TrainRun
from megagrpo.trainer.run_loop import run_to_end
from megagrpo.trainer.schedule import Live, grpo_step
from megagrpo.trainer.setup import Setup, first_kl_coefficient
from megagrpo.trainer.step_metrics import rollout_metrics, sampling_metrics
from megagrpo.trainer.train import GrpoTraining, PolicyTraining, model_and_critic, start_policy, start_training
from megagrpo.types import Prompt

NOT_COMPARED = ("seconds/", "tokens_per_second", "time", "eval/", "engines/", "trainer/", "memory/", "restarts")
"""Prefixes of metrics that measure the machine, or that engines made after the step."""
REPLAY = "replay"

# --- samples without training -----------------------------------------------------------------------------------------


class Untrained(Live):
    """The samples of all steps by the first weights: the ranks wait in host memory until the run ends."""

    @contextmanager
    def engines_alone(self) -> Iterator[None]:
        yield


def rollout_only(checked: Preflight[Recipe]) -> int:
    """Generates and scores responses for all steps with the weights that the run starts from, and saves the batches.

    Training ranks start as in a whole run: engines get their weights from them. Raises as `run_to_end` does.
    """
    kept = {"resume": "never", "export_hugging_face": False, "keep_best": None}
    start = partial(start_training, source_of=lambda run, _: Untrained(run))
    return run_to_end(_changed(checked, kept), prompt_reader(checked.recipe), start, sample_all)


def sample_all(setup: Setup[Recipe, Prompt], training: GrpoTraining, state: TrainerState) -> TrainerState:
    """Generates, scores and saves the batches of all steps. Raises RunStopped if the run is told to stop."""
    run, steps = training.run, setup.total_steps
    try:
        for step in range(1, steps + 1):
            if run.cursor.exhausted:
                setup.tracker.say(f"stopped after step {state.step}: every prompt is set aside")
                break
            with run.clock.phase("step"):
                sampled = training.source.next(step)
            with run.clock.phase("save_batch"):
                save_batch(run.recipe, step, sampled, steps, keep=steps)
            setup.tracker.rollouts(step, {TRAIN: sampled.groups}, run.weights.version)
            metrics = rollout_metrics(sampled.all, run.recipe.reward.scores) | sampling_metrics(run.recipe, sampled)
            setup.tracker.log(step, metrics | run.clock.take())
            state = replace(state, step=step)
    except StopRequested:
        training.give_up()
        batches = ranges(saved_steps(run_directory(setup.recipe)))
        given, fix = f"the batches of {batches} are saved", "start the same command again: it samples all steps anew"
        raise RunStopped(Problem("told to stop", given, fix=fix)) from None
    return state


# --- training on saved samples ----------------------------------------------------------------------------------------


class Saved(SampleSource):
    """The samples in the batches that a run has kept. Nothing samples for later steps."""

    def __init__(self, directory: Path, checked: Preflight[Recipe]) -> None:
        self._directory, self._checked = directory, checked
        self._batches: dict[int, SavedBatch] = {}
        """Batches that are read and not yet trained on, by step."""

    def batch(self, step: int) -> SavedBatch:
        """Reads the batch of `step`, which `next` then returns. Raises UnusableCheckpointError."""
        if step not in self._batches:
            batch, recipe = read_batch(self._directory, step), self._checked.recipe
            where = f"step {step} of {self._directory}"
            require_fitting(batch.sampled, recipe, self._checked.architecture.vocab, where)
            self._batches[step] = batch
        return self._batches[step]

    def next(self, step: int) -> Sampled:
        self.batch(step)
        return self._batches.pop(step).sampled

    def sync(self, version: int, *, changed: bool) -> None:
        """Does nothing: there are no engines."""


def train_only(checked: Preflight[Recipe], source: Path) -> int:
    """Trains step by step on the batches that the run in `source` has saved; starts no engines and evaluates nothing.
    Raises as `run_to_end` does; UnusableCheckpointError if a step has no batch.
    """
    require_another_directory(checked.recipe, "--train-only", source)

    def start(setup: Setup[Recipe, Prompt], ray: Runtime, closing: ExitStack) -> PolicyTraining:
        steps = saved_steps(source)
        if absent := sorted(set(range(1, setup.total_steps + 1)) - set(steps)):
            given, needed = f"batches of {ranges(steps)}", f"a batch for each of {setup.total_steps} steps"
            fix = "train fewer steps (train.total_steps), or sample again with a larger checkpoint.keep_batches"
            raise UnusableCheckpointError(Problem(f"{source}: no batch of {ranges(absent)}", given, needed, fix))
        setup.tracker.say(f"starting {setup.recipe.train.layout.parallel().ranks} training ranks, and no engines")
        ends, placed = closing.enter_context(ExitStack()), with_absolute_directories(setup.recipe)
        run = start_train_run(setup.checked, setup.total_steps, ray, ends, setup.clock, setup.resumed)
        return PolicyTraining(setup, run, Saved(source, setup.checked), ray, placed, ends)

    return run_to_end(_changed(checked, {"keep_best": None}), prompt_reader(checked.recipe), start, engines_too=False)


def start_train_run(
    checked: Preflight[Recipe],
    steps: int,
    ray: Runtime,
    ends: ExitStack,
    clock: PhaseClock,
    saved: Checkpoint | None,
) -> TrainRun:
    """Starts training ranks alone. steps: of the whole run."""
    check_files(ray, checked.recipe, read=(*model_and_critic(checked), *checked.teachers.values()))
    policy = start_policy(checked, with_absolute_directories(checked.recipe), ray, ends, saved)
    return TrainRun(checked.recipe, steps, policy, clock, work_of(checked.architecture))


def _changed(checked: Preflight[Recipe], kept: dict[str, object]) -> Preflight[Recipe]:
    """Returns `checked` with a recipe without evaluations, and with the settings `kept` of its `checkpoint`."""
    recipe = checked.recipe
    checkpoint = recipe.checkpoint.model_copy(update=kept)
    return replace(checked, recipe=recipe.model_copy(update={"eval": EvalConfig(), "checkpoint": checkpoint}))


# --- a step of a run, trained again -----------------------------------------------------------------------------------


def compared(logged: Mapping[str, float], again: Mapping[str, float]) -> tuple[list[str], list[str]]:
    """Returns the names of metrics that differ, and a table of those that both have, in lines. Both are without
    NOT_COMPARED."""
    both = sorted(logged.keys() & again.keys())
    pairs = {name: (logged[name], again[name]) for name in both}  # a number that is not finite is logged as null
    different = [name for name, (a, b) in pairs.items() if a != b and not (math.isnan(a) and not math.isfinite(b))]
    wide = max(map(len, both), default=0)
    lines = [f"{'metric':{wide}}  {'logged':>14}  {'trained again':>14}  difference"]
    for name, (before, after) in pairs.items():
        difference = f"{after - before:+.3g}" if name in different else ""
        lines.append(f"{name:{wide}}  {before:14.8g}  {after:14.8g}  {difference}".rstrip())
    differ = f"{len(different)} of {len(both)} metrics differ"
    lines.append(differ if different else f"all {len(both)} metrics are equal, bit for bit")
    not_compared = "not compared: seconds, idle shares, tokens_per_second, evaluations"
    lines.append(", ".join([not_compared, *sorted(logged.keys() ^ again.keys())]))
    return different, lines


def load_replay(directory: Path, step: int, overrides: Sequence[str]) -> LoadedRecipe[Recipe]:
    """Loads the recipe that trained this step of the run in `directory`, with overrides. It writes logs of training
    ranks alone, to REPLAY in that directory. Raises RecipeError or UnusableCheckpointError."""
    loaded = load(directory / read_batch(directory, step).recipe, overrides)
    recipe, place = loaded.recipe, directory.absolute()
    track = recipe.track.model_copy(update={"directory": str(place), "rollouts": None, **without_trackers()})
    checkpoints = recipe.checkpoint.directory or str(place / "checkpoints")
    checkpoint = recipe.checkpoint.model_copy(update={"keep_batches": 0, "directory": checkpoints})
    return replace(loaded, recipe=recipe.model_copy(update={"name": REPLAY, "track": track, "checkpoint": checkpoint}))


def replay(checked: Preflight[Recipe], directory: Path, step: int, say: Callable[[str], None]) -> bool:
    """Trains the steps after the newest checkpoint before `step`, up to `step`, of the run in `directory` again.

    Prints a table of logged and recomputed metrics. Writes only to REPLAY in the run's directory.
    Returns True if no metric differs. Raises MegagrpoError.
    """
    recipe = checked.recipe
    checkpoint = CheckpointStore(checkpoint_directory(recipe).absolute(), keep_last=1).latest_complete(before=step)
    state = checkpoint.state if checkpoint else None
    steps = range(state.step + 1 if state else 1, step + 1)
    if absent := sorted(set(steps) - set(saved_steps(directory))):
        given = f"the newest checkpoint before it is {f'of step {state.step}' if state else 'none'}"
        fix = "train with a checkpoint.keep_batches of at least checkpoint.every_steps, or replay another step"
        where = f"{directory}: step {step} cannot be replayed"
        raise UnusableCheckpointError(Problem(where, given, f"the batches of {ranges(absent)}, too", fix))
    logged = logged_metrics(directory, step)
    say(f"step {step} of {directory}, from {checkpoint.path if checkpoint else checked.model_directory}")
    for line in checkpoint.warnings if checkpoint else ():
        say(line)
    with ExitStack() as closing:
        ray = runtime.start(recipe, devices_of=partial(plan_devices, engines_too=False))
        closing.callback(runtime.stop, ray)
        source = Saved(directory, checked)
        last = source.batch(step)
        total = recipe.train.total_steps or last.total_steps
        run = start_train_run(checked, total, ray, closing, PhaseClock(), checkpoint)
        coefficient = first_kl_coefficient(recipe, state)
        for number in steps:
            trained_with = source.batch(number).recipe
            if trained_with != last.recipe:
                say(f"step {number} was trained with {trained_with}, and is now trained with {last.recipe}")
            done = grpo_step(run, source, number, coefficient)
            metrics, coefficient = done.metrics, done.kl_coefficient or 0.0
            if number < step:
                say(f"trained step {number}")
    different, lines = compared(logged, metrics)
    if not logged:
        say(f"the run has logged no step {step}: it may have ended in it")
        lines = [f"{name}: {value:.8g}" for name, value in sorted(metrics.items())]
    for line in lines:
        say(line)
    return not different


def logged_metrics(directory: Path, step: int) -> dict[str, float]:
    """Reads the line of this step in metrics.jsonl, without NOT_COMPARED; null becomes NaN. {}: no such line."""
    path = directory / "metrics.jsonl"
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        needed = "the directory of a run, such as runs/NAME"
        raise UnusableCheckpointError(Problem(str(path), error.strerror or str(error), needed)) from error
    entries = [entry for entry in step_entries(lines) if entry["step"] == step]
    return {
        name: math.nan if value is None else float(value)
        for name, value in (entries[-1].items() if entries else ())
        if name != "step" and not name.startswith(NOT_COMPARED) and isinstance(value, int | float | None)
    }

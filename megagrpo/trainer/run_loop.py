"""A run of either kind: start or resume, step by step, evaluate, save when due, stop on a signal, export a model.

train.py and sft.py define the differences: how a run reads its data and starts its processes (`run_to_end`), and what
its started processes do in a step (`Training`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite, isnan
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar

from transformers import PreTrainedTokenizerBase

from megagrpo.checkpoint.pending import Pending, pending_of
from megagrpo.checkpoint.store import Checkpoint, CheckpointStore
from megagrpo.checkpoint.trainer_state import TrainerState, changes
from megagrpo.cluster import runtime
from megagrpo.cluster.runtime import Runtime
from megagrpo.cluster.train_ranks import TrainRanks
from megagrpo.data import report as data_report
from megagrpo.data.cursor import Cursor
from megagrpo.data.mixture import AnyItem, Mixture
from megagrpo.errors import (
    DIVERGED_FIX,
    EngineError,
    MachineError,
    MegagrpoError,
    MismatchError,
    NodeLostError,
    Problem,
    RankError,
    RankLostError,
    RecipeError,
    RewardError,
    WeightSyncError,
)
from megagrpo.plan.plan import plan_of
from megagrpo.plan.show.as_json import plan_json
from megagrpo.preflight.preflight import Preflight
from megagrpo.progress import progress as under_way
from megagrpo.recipe.defaults import (
    checkpoint_directory,
    dtype_name,
    plan_devices,
    run_directory,
    total_steps,
)
from megagrpo.recipe.load import Kind
from megagrpo.recipe.schema import AnyRecipe, Recipe
from megagrpo.tokenizer import load_chat_tokenizer
from megagrpo.track.run_lock import only_process_of
from megagrpo.track.sink import PLAN_FILE
from megagrpo.track.tracker import Tracker
from megagrpo.trainer.alerts import Alerts
from megagrpo.trainer.early_stopping import EarlyStopping
from megagrpo.trainer.exports import Exports
from megagrpo.trainer.profiling import profiled
from megagrpo.trainer.run import PhaseClock
from megagrpo.trainer.saving import Saving, checkpoint_to_resume, export, exported_step
from megagrpo.trainer.stopping import Stopping, StopRequested, until_stopped
from megagrpo.weights.families import read_architecture


@dataclass(frozen=True)
class Setup(Generic[Kind, AnyItem]):
    """The state of a run before its processes start."""

    checked: Preflight[Kind]
    tokenizer: PreTrainedTokenizerBase
    cursor: Cursor[AnyItem]
    held_out: Mapping[str, Sequence[AnyItem]]  # by evaluation set
    total_steps: int
    last_step: int  # this process ends after it, or before
    saving: Saving
    exports: Exports
    resumed: Checkpoint | None
    tracker: Tracker
    stopping: Stopping
    clock: PhaseClock
    alerts: Alerts | None  # fine-tuning has none

    @property
    def recipe(self) -> Kind:
        return self.checked.recipe


@dataclass(frozen=True)
class StepDone:
    """The results of a step."""

    metrics: dict[str, float]
    tokens: int  # prompts and responses, or examples: for tokens_per_second
    responses: int = 0  # generated for training
    kl_coefficient: float | None = None  # of the next step
    failure: MegagrpoError | None = None  # ends the run once the step is saved
    pending: Pending | None = None  # what is sampled in the background after it


class Training(Protocol):
    """The started processes of a run, and their operations in each kind of run."""

    @property
    def ranks(self) -> TrainRanks: ...

    def step(self, step: int, kl_coefficient: float | None) -> StepDone:
        """Trains step `step`, timed as phase `step`. Raises StopRequested if it gives up, as if it never began."""

    def evaluate(self, step: int, sets: Sequence[str]) -> dict[str, float]:
        """Returns metrics of these sets' held-out items, without `eval/`. step: of the weights; 0: before training."""

    def saving(self, step: int, *, goes_on: bool) -> AbstractContextManager[None]:
        """Makes the ranks ready to save inside the context. goes_on: another step follows."""

    def exporting(self) -> AbstractContextManager[None]:
        """Makes the ranks' parameters ready to export inside the context; no step follows."""

    def with_new_ranks(self, saved: Checkpoint | None) -> Self:
        """Returns the training with new ranks for lost ones: from a saved state, or from the model as the run began."""

    def give_up(self) -> None:
        """Cancels the work that a stop has interrupted, so that the ranks can be saved."""


AnyTraining = TypeVar("AnyTraining", bound=Training)
Read = Callable[[Sequence[Any], PreTrainedTokenizerBase, str | None], Mixture[AnyItem]]
"""Reads entries of the data (EntryConfig) of a recipe: of one of its evaluation sets, or those to train on (None)."""


@dataclass(frozen=True)
class Progress:
    """The progress of a run, as its next checkpoint records it. A step that is given up leaves it unchanged."""

    kl_coefficient: float | None  # of the next step; None in fine-tuning
    data_cursor: Mapping[str, Any]
    step: int = 0
    episodes: int = 0
    evaluation: dict[str, float] | None = None  # of exactly these weights
    unlogged: dict[str, float] | None = None  # of the step, if it still waits for its evaluation
    early: EarlyStopping | None = None  # None: the recipe has no rule
    pending: Pending | None = None  # groups that no step has trained on; None: no schedule samples in the background


def run_to_end(
    checked: Preflight[Kind],
    read: Read[AnyItem],
    start: Callable[[Setup[Kind, AnyItem], Runtime, ExitStack], AnyTraining],
    take_steps: Callable[[Setup[Kind, AnyItem], AnyTraining, Progress], Progress] | None = None,
    *,
    engines_too: bool = True,
    last_step: int | None = None,
) -> int:
    """Runs the recipe to its end, from its newest checkpoint if it has one; returns 0.

    `read` reads data.train, then each evaluation set, whose name it gets. `start` starts the processes on the reserved
    devices and registers their ends on the stack. `take_steps`, by default `run_despite_losses`, takes all steps. The
    run has devices for engines if `engines_too`. It ends after `last_step`, if that is less than its length. Raises
    MegagrpoError; RunStopped if the process was sent SIGTERM or SIGUSR1, once everything is saved.
    """
    recipe = checked.recipe
    directory = checkpoint_directory(recipe).absolute()  # ranks may have other working directories
    kept = recipe.checkpoint
    store = CheckpointStore(directory, keep_last=kept.keep_last, keep_best=kept.keep_best)
    with until_stopped(store.newest) as stopping, ExitStack() as closing:
        closing.enter_context(only_process_of(run_directory(recipe)))

        def start_ray() -> Runtime:
            with stopping.giving_up(), stopping.while_ray_starts(), under_way("starting Ray"):
                devices_of = partial(plan_devices, engines_too=engines_too)
                started = runtime.start(recipe, stopping.check, devices_of=devices_of)
            closing.callback(runtime.stop, started)
            store.verify = partial(runtime.damage_on_nodes, started, recipe.cluster.step_timeout_seconds)
            return started

        # Large checkpoints are verified by all nodes, which takes Ray; on one machine this process reads as fast.
        ray = start_ray() if store.newest() and runtime.joins_cluster(recipe) else None
        with stopping.giving_up(), under_way("looking for a checkpoint, and verifying it"):
            resumed = checkpoint_to_resume(store, recipe)
        tokenizer = load_chat_tokenizer(checked.tokenizer_directory, recipe.model.chat_template)
        data = read(recipe.data.train, tokenizer, None)
        evaluated = {name: read(files, tokenizer, name) for name, files in recipe.eval.files_of_sets().items()}
        cursor = Cursor(data.items, seed=recipe.seed, shuffle=recipe.data.shuffle)
        if resumed:
            cursor.restore(resumed.state.data_cursor)
        progress = first_progress(recipe, cursor, resumed)
        steps = total_steps(recipe, len(cursor))

        runs, unlogged = resumed.state.tracker_runs if resumed else None, progress.unlogged is not None
        changed = changes(resumed.state.recipe, recipe.model_dump(mode="json")) if resumed else []
        complete = bool(
            resumed
            and not unlogged
            and (progress.step >= steps or _reason_to_stop(progress, cursor))
            and (not recipe.checkpoint.export_hugging_face or exported_step(recipe) == progress.step)
        )
        tracked = Tracker(
            recipe,
            steps,
            progress.step,
            runs,
            tokenizer=tokenizer,
            unlogged=unlogged,
            changed=changed,
            complete=complete,
            console=checked.console,
        )
        tracker = closing.enter_context(tracked)
        noun = "prompts" if isinstance(recipe, Recipe) else "examples"
        mixtures = {"train": data, **{f"eval {name}": of_set for name, of_set in evaluated.items()}}
        data_report.write(mixtures, run_directory(recipe))
        _write_plan(checked, run_directory(recipe))
        for line in data_report.lines(mixtures, noun):
            tracker.say(line)
        if resumed:
            for line in (f"continuing after step {progress.step} from {resumed.path}", *resumed.warnings):
                tracker.say(line)
            for line in changed:
                tracker.say(f"changed: {line}")
        if complete:
            tracker.say("the run is complete: nothing to do")
            return 0

        clock, held_out = PhaseClock(), {name: of_set.items for name, of_set in evaluated.items()}
        saving = Saving(store, tracker.say, progress.step)
        exports = Exports(checked, tokenizer, tracker.say)
        closing.callback(exports.close)
        ends = min(steps, last_step or steps)
        alerts = Alerts(recipe.rollout.alerts, run_directory(recipe)) if isinstance(recipe, Recipe) else None
        setup = Setup(
            checked,
            tokenizer,
            cursor,
            held_out,
            steps,
            ends,
            saving,
            exports,
            resumed,
            tracker,
            stopping,
            clock,
            alerts,
        )
        with stopping.giving_up():
            tracker.say(f"starting {'Ray' if recipe.cluster.address is None else 'on the cluster'}, then the processes")
        ray = ray or start_ray()
        with stopping.giving_up():
            training = start(setup, ray, closing)
        with saving, waiting_for(exports):
            if take_steps:
                progress = take_steps(setup, training, progress)
            else:
                training, progress = run_despite_losses(setup, training, progress)
        if recipe.checkpoint.export_hugging_face:
            with stopping.giving_up(), training.exporting(), under_way("exporting the model"):
                dtype = dtype_name(recipe, ray.device)
                directory = export(training.ranks, checked, tokenizer, progress.step, dtype)
            exports.start_command(directory)
    return 0


def _write_plan(checked: Preflight[Any], directory: Path) -> None:
    """Writes the recipe's plan, for the report. Skips a recipe with GPUs that are unknown to plans."""
    critic = read_architecture(checked.critic_directory) if checked.critic_directory else None
    with suppress(RecipeError):
        planned = plan_of(checked.recipe, checked.architecture, critic=critic, agent=checked.agent)
        (directory / PLAN_FILE).write_text(plan_json(planned) + "\n", encoding="utf-8")


def first_progress(recipe: AnyRecipe, cursor: Cursor[Any], saved: Checkpoint | None) -> Progress:
    """Returns the run's progress before its first step in this process. saved: the checkpoint resumed from.

    Early stopping keeps its best value only if it still watches the same metric.
    """
    coefficient, early, state = None, None, saved.state if saved else None
    if isinstance(recipe, Recipe):
        coefficient = first_kl_coefficient(recipe, state)
        rule = recipe.eval.early_stopping
        early = EarlyStopping(rule) if rule else None
        section = state.recipe.get("eval") if state else None
        before = section.get("early_stopping") if isinstance(section, dict) else None
        if state and rule and isinstance(before, dict) and before.get("metric") == rule.metric:
            early = EarlyStopping(rule, state.best_evaluation, state.evaluations_without_best)
    if state is None:
        return Progress(coefficient, cursor.state(), early=early)
    evaluation = dict(state.evaluation) if state.evaluation else None
    unlogged = dict(state.unlogged) if state.unlogged else None
    return Progress(
        coefficient, cursor.state(), state.step, state.episodes, evaluation, unlogged, early, pending_of(saved)
    )


def first_kl_coefficient(recipe: Recipe, state: TrainerState | None) -> float:
    """Returns the weight of the KL penalty in the first step after a checkpoint's state, or in the run's first."""
    if state and recipe.algorithm.kl.target is not None and state.kl_coefficient is not None:
        return state.kl_coefficient
    return recipe.algorithm.kl.coefficient


class RanksLost(Exception):  # noqa: N818  it carries the error
    """The loss of training ranks when the run had finished `step`."""

    def __init__(self, step: int, error: RankLostError) -> None:
        self.step, self.error = step, error


def run_despite_losses(setup: Setup[Any, Any], training: AnyTraining, begun: Progress) -> tuple[AnyTraining, Progress]:
    """Runs run_steps. After a loss of training ranks, restarts with new ones at the newest checkpoint, or at the run's
    start. Raises the first RankLostError if they are lost too often without a new step (cluster.restarts_max).
    """
    tracker, most, progress, furthest = setup.tracker, setup.recipe.cluster.restarts_max, begun, begun.step - 1
    errors: list[RankLostError] = []
    restarts = 0
    while True:
        try:
            if errors:
                training, progress = _with_new_ranks(setup, training, begun)
                restarts += 1
            with setup.saving.going_on_from_finite_weights(setup.recipe.train.optimizer.lr):
                return training, run_steps(setup, training, progress, restarts)
        except RanksLost as lost:
            if lost.step > furthest:
                errors, furthest = [], lost.step
            errors.append(lost.error)
        except RankLostError as error:  # of new ranks that do not start
            errors.append(error)
        if setup.stopping.requested or len(errors) > most:
            raise errors[0]
        for problem in errors[-1].problems:
            tracker.say(str(problem))
        tracker.say(
            f"warning: after step {furthest}: training ranks are lost; they are started again ({len(errors)} of {most})"
        )


def _with_new_ranks(setup: Setup[Any, Any], training: AnyTraining, begun: Progress) -> tuple[AnyTraining, Progress]:
    """Restarts at the newest checkpoint. begun: the run's progress when this process started."""
    training.ranks.end_lost()  # or the save that is under way would wait for a rank that is stopped
    saved = setup.saving.newest_again()
    step = saved.state.step if saved else 0
    setup.tracker.say(f"continuing after step {step} from {saved.path if saved else 'the model'}")
    with setup.stopping.giving_up():
        training = training.with_new_ranks(saved)
    setup.cursor.restore(saved.state.data_cursor if saved else begun.data_cursor)
    progress = first_progress(setup.recipe, setup.cursor, saved)
    setup.tracker.rewind(progress.step, unlogged=progress.unlogged is not None)
    setup.clock.take()
    return training, progress


def run_steps(setup: Setup[Any, Any], training: Training, progress: Progress, restarts: int) -> Progress:
    """Runs steps until the run's length or early stopping; evaluates and saves when due.

    A step is logged before it is saved: a run killed in between repeats the step, and its line is written again. Raises
    a step's failure once the step is saved, and StopRequested once all finished steps are saved. Errors of engines,
    weight syncs, rewards, files and nodes are raised after a save, if the ranks still hold the last step, else at once.
    Raises RanksLost if training ranks are lost.
    """
    recipe, tracker, cursor, saving = setup.recipe, setup.tracker, setup.cursor, setup.saving
    failure: MegagrpoError | None = None
    begun, taken = progress.step, progress.step  # taken: the newest step whose update was not skipped
    try:
        if progress.step == 0 and recipe.eval.due(0):
            progress = _evaluate_start(setup, training, progress)
        reason = _reason_to_stop(progress, cursor)
        while progress.unlogged is not None or (progress.step < setup.last_step and not reason):
            if progress.unlogged is None:
                progress, failure = _step(setup, training, progress)
                if failure and not isinstance(failure, MismatchError):  # nothing can be evaluated
                    raise failure
                made = progress.unlogged or {}
                if not isnan(made.get("grad_norm", 0.0)):
                    taken = progress.step
                elif progress.step == setup.last_step and (taken < progress.step - 1 or taken == begun):
                    raise _ended_diverged(taken, progress.step)
                if not made.get("skipped_steps"):  # its weights have made finite numbers
                    saving.confirm()
            last = progress.step == setup.last_step or cursor.exhausted
            progress = _evaluate(setup, training, progress, last=last)
            reason = _reason_to_stop(progress, cursor)
            if reason and not last:  # it is the last step after all
                progress = _evaluate(setup, training, progress, last=True)
            alarm = _log(setup, progress, restarts)
            failure = failure or alarm
            step, progress = progress.step, replace(progress, unlogged=None)
            due = last or reason or failure or step % recipe.checkpoint.every_steps == 0
            if due or _is_new_best(recipe.checkpoint.keep_best, progress.evaluation, saving):
                _save(setup, training, progress, goes_on=not (last or reason or failure))
                if progress.evaluation and all(map(isfinite, progress.evaluation.values())):
                    saving.confirm()
            _export(setup, training, step, begin=not failure, goes_on=not (last or reason))
            if failure:
                raise failure
    except StopRequested:
        with training.ranks.alone():
            if progress.step > saving.wait():
                training.give_up()
                _save(setup, training, progress, goes_on=False)
        if failure:
            raise failure from None
        raise
    except RankLostError as error:
        raise RanksLost(progress.step, error) from error
    except (EngineError, WeightSyncError, RewardError, MachineError, NodeLostError, OSError):
        _save_whole_step(setup, training, progress)
        raise
    if reason:
        tracker.say(f"stopped after step {progress.step}: {reason}")
    return progress


def _evaluate_start(setup: Setup[Any, Any], training: Training, progress: Progress) -> Progress:
    """Evaluates and logs the model as it was before the first step."""
    progress = _evaluate(setup, training, progress, last=False)
    metrics = _evaluation_metrics(progress)
    setup.tracker.log(0, metrics | setup.clock.take())
    if setup.alerts:
        setup.alerts.after(0, metrics)
    return progress


def _log(setup: Setup[Any, Any], progress: Progress, restarts: int) -> MegagrpoError | None:
    """Logs the newest step; returns the error of an alert that ends the run there."""
    metrics = (progress.unlogged or {}) | _evaluation_metrics(progress)
    raised = setup.alerts.after(progress.step, metrics) if setup.alerts else None
    counted = {"restarts": float(restarts)} | ({"alerts": raised.holding} if raised else {})
    setup.tracker.log(progress.step, metrics | counted | setup.clock.take())
    for line in raised.lines if raised else ():
        setup.tracker.say(line)
    return raised.failure if raised else None


def _save_whole_step(setup: Setup[Any, Any], training: Training, progress: Progress) -> None:
    """Saves the last step after an error outside the ranks, if they are whole and still hold it."""
    with training.ranks.alone():
        if progress.step > setup.saving.wait() and training.ranks.step == progress.step:
            try:
                training.give_up()
                _save(setup, training, progress, goes_on=False)
                setup.tracker.say(f"step {progress.step} is saved: the same command continues after it")
            except MegagrpoError as also:
                setup.tracker.say(f"step {progress.step} could not be saved: {also}")


def _ended_diverged(taken: int, last: int) -> RankError:
    """Makes the error of a run whose last updates were skipped, where it would end as if it were whole."""
    where = f"steps {taken + 1} to {last}: the loss or the gradient is not finite, and no step follows"
    return RankError(Problem(where, "no optimizer step taken", "a last step that trains", DIVERGED_FIX))


def _step(setup: Setup[Any, Any], training: Training, before: Progress) -> tuple[Progress, MegagrpoError | None]:
    """Takes the next step; returns the progress, not yet evaluated or logged, and the step's failure."""
    setup.stopping.stop_here()
    step = before.step + 1
    with under_way(f"step {step}"), profiled(setup.recipe, training.ranks, step, setup.tracker.say):
        done = training.step(step, before.kl_coefficient)
    if skipped := done.metrics.get("skipped_steps", 0.0) + done.metrics.get("critic/skipped_steps", 0.0):
        what = f"{skipped:g} optimizer step{'s' * (skipped > 1)} skipped"
        setup.tracker.say(f"warning: step {before.step + 1}: {what}: the loss or the gradient is not finite")
    seconds = setup.clock.take()
    speed = {"tokens_per_second": done.tokens / seconds["seconds/step"]}
    if done.responses:
        waited = seconds.get("seconds/rollout", 0.0) + seconds.get("seconds/reward", 0.0)
        speed |= {"trainer/idle_seconds": waited, "trainer/idle_share": waited / seconds["seconds/step"]}
    progress = replace(
        before,
        kl_coefficient=done.kl_coefficient,
        data_cursor=done.pending.cursor if done.pending else setup.cursor.state(),
        pending=done.pending,
        step=before.step + 1,
        episodes=before.episodes + done.responses,
        evaluation=None,
        unlogged=done.metrics | speed | seconds,
    )
    return progress, done.failure


def _evaluate(setup: Setup[Any, Any], training: Training, progress: Progress, *, last: bool) -> Progress:
    """Evaluates the sets that are due after the newest step and not evaluated yet."""
    there = {name.partition("/")[0] for name in progress.evaluation or ()}
    sets = [name for name in setup.recipe.eval.due(progress.step, last=last) if name not in there]
    if not sets:
        return progress
    with setup.stopping.giving_up(), setup.clock.phase("eval"):
        evaluation = training.evaluate(progress.step, sets)
    early = progress.early
    if early and early.watched_set in sets:
        early = early.after(evaluation)
    return replace(progress, evaluation=(progress.evaluation or {}) | evaluation, early=early)


def _evaluation_metrics(progress: Progress) -> dict[str, float]:
    return {f"eval/{name}": value for name, value in (progress.evaluation or {}).items()}


def _reason_to_stop(progress: Progress, cursor: Cursor[Any]) -> str | None:
    """Returns the reason to end the run before its length, or None. A run that solves all of its prompts ends without
    an error: its model is evaluated, saved and exported like any other.
    """
    if cursor.exhausted:
        return "every prompt is set aside (data.no_resampling_pass_rate)"
    return progress.early.reason_to_stop() if progress.early else None


def _is_new_best(metric: str | None, evaluation: Mapping[str, float] | None, saving: Saving) -> bool:
    """Returns whether these weights' evaluation beats that of every checkpoint that is kept."""
    if metric is None or evaluation is None or metric not in evaluation:  # not every step evaluates its set
        return False
    best = saving.best()
    return best is None or evaluation[metric] > best


def _save(setup: Setup[Any, Any], training: Training, progress: Progress, *, goes_on: bool) -> None:
    with setup.clock.phase("checkpoint"), training.saving(progress.step, goes_on=goes_on):
        state = TrainerState(
            step=progress.step,
            weight_version=progress.step,
            data_cursor=progress.data_cursor,
            recipe=setup.recipe.model_dump(mode="json"),
            episodes=progress.episodes,
            kl_coefficient=progress.kl_coefficient,
            evaluation=progress.evaluation,
            unlogged=progress.unlogged,
            best_evaluation=progress.early.best if progress.early else None,
            evaluations_without_best=progress.early.evaluations_without_best if progress.early else 0,
            tracker_runs=setup.tracker.run_ids,
        )
        setup.saving.begin(training.ranks, state, progress.pending)
    if not goes_on:
        setup.saving.finish()


def _export(setup: Setup[Any, Any], training: Training, step: int, *, begin: bool, goes_on: bool) -> None:
    """Reports exports that are over, and begins one if it is due."""
    if every := setup.recipe.checkpoint.export_every_steps:
        setup.exports.report()
        if step % every == 0 and begin:
            with setup.clock.phase("export"), training.saving(step, goes_on=goes_on):
                setup.exports.begin(training.ranks, step)


@contextmanager
def waiting_for(exports: Exports) -> Iterator[None]:
    """Waits, at the end of the context, for the export that is under way: the ranks write it."""
    try:
        yield
    finally:
        exports.wait()

"""The loop of a run of either kind: step by step, evaluate, log, save when due, stop on a signal, export a model.

train.py, one_half.py and sft.py define the differences: how a run reads its data and starts its processes
(`run_to_end`), and what its started processes do in a step (`Training`).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from math import isfinite, isnan
from typing import Any, Generic, Self, TypeVar

from megagrpo.checkpoint.groups import pending_of
from megagrpo.checkpoint.store import Checkpoint, CheckpointStore
from megagrpo.checkpoint.trainer_state import TrainerState
from megagrpo.cluster.runtime import Runtime
from megagrpo.cluster.stopping import StopRequested, until_stopped
from megagrpo.cluster.train_ranks import TrainRanks
from megagrpo.data.mixture import AnyItem
from megagrpo.data.prompts import Read
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
    RewardError,
    WeightSyncError,
)
from megagrpo.preflight.preflight import Preflight
from megagrpo.progress import progress
from megagrpo.recipe.defaults import checkpoint_directory, run_directory
from megagrpo.recipe.load import Kind
from megagrpo.recipe.schema import AnyRecipe
from megagrpo.timeline import TIMELINE, write_chrome_trace
from megagrpo.trainer.alerts import after_evaluation, early_stopping, reason_to_stop
from megagrpo.trainer.run import Step
from megagrpo.trainer.setup import Setup, first_state


class Training(ABC):
    """The started processes of a run, and their operations in each kind of run."""

    @property
    @abstractmethod
    def ranks(self) -> TrainRanks: ...

    @abstractmethod
    def step(self, step: int, kl_coefficient: float | None) -> Step:
        """Trains step `step`, timed as phase `step`. Raises StopRequested if it gives up, as if it never began."""

    def evaluate(self, step: int, sets: Sequence[str]) -> dict[str, float]:
        """Returns metrics of these sets' held-out items, without `eval/`. step: of the weights; 0: before training."""
        raise NotImplementedError("the recipe of such a run has no eval.sets")

    def saving(self, step: int, *, continues: bool) -> AbstractContextManager[None]:
        """Makes the ranks ready to save inside the context. continues: another step follows."""
        return nullcontext()

    def exporting(self) -> AbstractContextManager[None]:
        """Makes the ranks' parameters ready to export inside the context; no step follows."""
        return nullcontext()

    @abstractmethod
    def with_new_ranks(self, saved: Checkpoint | None) -> Self:
        """Returns the training with new ranks for lost ones: from a saved state, or from the model as the run began."""

    def give_up(self) -> None:  # noqa: B027  most kinds have nothing to cancel
        """Cancels the work that a stop has interrupted, so that the ranks can be saved."""


AnyTraining = TypeVar("AnyTraining", bound=Training)


def run_to_end(
    checked: Preflight[Kind],
    read: Read[AnyItem],
    start: Callable[[Setup[Kind, AnyItem], Runtime, ExitStack], AnyTraining],
    take_steps: Callable[[Setup[Kind, AnyItem], AnyTraining, TrainerState], TrainerState] | None = None,
    *,
    engines_too: bool = True,
    last_step: int | None = None,
) -> int:
    """Runs the recipe to its end, from its newest checkpoint if it has one; returns 0.

    `read` reads data.train, then each evaluation set, whose name it gets. `start` starts the processes on the reserved
    devices and registers their ends on the stack. `take_steps`, by default `Loop.run`, takes all steps. The run has
    devices for engines if `engines_too`. It ends after `last_step`, if that is less than its length. Raises
    MegagrpoError; RunStopped if the process was sent SIGTERM or SIGUSR1, once everything is saved.
    """
    recipe, kept = checked.recipe, checked.recipe.checkpoint
    directory = checkpoint_directory(recipe).absolute()  # ranks may have other working directories
    store = CheckpointStore(directory, keep_last=kept.keep_last, keep_best=kept.keep_best)
    with until_stopped(store.newest) as stopping, ExitStack() as closing:
        setup = Setup(checked, read, store, stopping, closing, engines_too=engines_too, last_step=last_step)
        if setup.complete:
            return 0
        with stopping.giving_up():
            where = "Ray" if recipe.cluster.address is None else "on the cluster"
            setup.tracker.say(f"starting {where}, then the processes")
        ray = setup.start_ray()
        with stopping.giving_up():
            loop = Loop(setup, start(setup, ray, closing))
        with setup.saving:
            try:
                if take_steps:
                    loop.state = take_steps(setup, loop.training, loop.state)
                else:
                    loop.run()
            finally:
                setup.exports.wait()  # the ranks write it
        if kept.export_hugging_face:
            training = loop.training
            with stopping.giving_up(), training.exporting(), progress("exporting the model"):
                exported = setup.exports.write_final(training.ranks, loop.state.step)
            setup.exports.start_command(exported)
    return 0


class Loop(Generic[AnyTraining]):
    """The steps of a run. `state` and `pending` are of the last whole step: one that is given up leaves them as they
    are."""

    def __init__(self, setup: Setup[Any, Any], training: AnyTraining) -> None:
        self.setup, self.training = setup, training
        self.state, self.pending = setup.state, setup.pending
        self.restarts = 0
        self._failure: MegagrpoError | None = None  # ends the run once the step is saved

    def run(self) -> None:
        """Runs all steps. After a loss of training ranks, restarts with new ones at the newest checkpoint, or at the
        run's start. Raises the first RankLostError if they are lost too often without a new step
        (cluster.restarts_max).
        """
        setup, most = self.setup, self.setup.recipe.cluster.restarts_max
        furthest, errors = self.state.step - 1, list[RankLostError]()
        while True:
            try:
                if errors:
                    self._restart()
                with setup.saving.going_on_from_finite_weights(setup.recipe.train.optimizer.lr):
                    return self.run_steps()
            except RankLostError as error:  # new ranks that do not start are at no new step
                if self.state.step > furthest:
                    errors, furthest = [], self.state.step
                errors.append(error)
            if setup.stopping.requested or len(errors) > most:
                raise errors[0]
            for problem in errors[-1].problems:
                setup.tracker.say(str(problem))
            again = f"they are started again ({len(errors)} of {most})"
            setup.tracker.say(f"warning: after step {furthest}: training ranks are lost; {again}")

    def _restart(self) -> None:
        """Restarts at the newest checkpoint, or in the state in which this process began."""
        setup = self.setup
        self.training.ranks.end_lost()  # or the save that is under way would wait for a rank that is stopped
        saved = setup.saving.newest_again()
        step = saved.state.step if saved else 0
        setup.tracker.say(f"continuing after step {step} from {saved.path if saved else 'the model'}")
        with setup.stopping.giving_up():
            self.training = self.training.with_new_ranks(saved)
        setup.cursor.restore(saved.state.data_cursor if saved else setup.state.data_cursor)
        self.state, self.pending = first_state(setup.recipe, setup.cursor, saved), pending_of(saved)
        setup.tracker.rewind(self.state.step, unlogged=self.state.unlogged is not None)
        setup.clock.take()
        self.restarts += 1

    def run_steps(self) -> None:
        """Runs steps until the run's length or early stopping; evaluates and saves when due.

        A step is logged before it is saved: a run killed in between repeats the step, and its line is written again.
        Raises a step's failure once the step is saved, and StopRequested once all finished steps are saved. Errors of
        engines, weight syncs, rewards, files and nodes are raised after a save, if the ranks still hold the last step,
        else at once. Raises RankLostError if training ranks are lost.
        """
        self._failure = None
        try:
            reason = self._run_steps()
        except StopRequested:
            with self.training.ranks.alone():
                if self.state.step > self.setup.saving.wait():
                    self.training.give_up()
                    self._save(continues=False)
            if self._failure:
                raise self._failure from None
            raise
        except (EngineError, WeightSyncError, RewardError, MachineError, NodeLostError, OSError):
            step, ranks, say = self.state.step, self.training.ranks, self.setup.tracker.say
            with ranks.alone():
                if step > self.setup.saving.wait() and ranks.step == step:
                    try:
                        self.training.give_up()
                        self._save(continues=False)
                        say(f"step {step} is saved: the same command continues after it")
                    except MegagrpoError as error:
                        say(f"step {step} could not be saved: {error}")
            raise
        if reason:
            self.setup.tracker.say(f"stopped after step {self.state.step}: {reason}")

    def _run_steps(self) -> str | None:
        """Runs steps; returns the reason to end before the run's length, if there is one."""
        setup, begun = self.setup, self.state.step
        taken = begun  # the newest step whose update was not skipped
        if begun == 0 and setup.recipe.eval.due(0):
            self._evaluate(last=False)
            metrics = self._evaluation_metrics()
            setup.tracker.log(0, metrics | setup.clock.take())
            if setup.alerts:
                setup.alerts.check(0, metrics)
        reason = reason_to_stop(setup.recipe, self.state, setup.cursor)
        while self.state.unlogged is not None or (self.state.step < setup.last_step and not reason):
            if self.state.unlogged is None:
                made, step = self._step(), self.state.step
                if not isnan(made.get("grad_norm", 0.0)):
                    taken = step
                elif step == setup.last_step and (taken < step - 1 or taken == begun):
                    where = f"steps {taken + 1} to {step}: the loss or the gradient is not finite, and no step follows"
                    needed = "a last step that trains"
                    raise RankError(Problem(where, "no optimizer step taken", needed, DIVERGED_FIX))
                if not made.get("skipped_steps"):  # its weights have made finite numbers
                    setup.saving.confirm()
            reason = self._after_step()
        return reason

    def _step(self) -> dict[str, float]:
        """Takes the next step, which is then not yet evaluated or logged; returns its metrics. Raises its failure,
        except a mismatch, which does not keep it from being evaluated."""
        setup, before = self.setup, self.state
        setup.stopping.stop_here()
        step = before.step + 1
        with progress(f"step {step}"), profiled(setup.recipe, self.training.ranks, step, setup.tracker.say):
            done = self.training.step(step, before.kl_coefficient)
        if skipped := done.metrics.get("skipped_steps", 0.0) + done.metrics.get("critic/skipped_steps", 0.0):
            what = f"{skipped:g} optimizer step{'s' * (skipped > 1)} skipped"
            setup.tracker.say(f"warning: step {step}: {what}: the loss or the gradient is not finite")
        seconds = setup.clock.take()
        speed = {"tokens_per_second": done.tokens / seconds["seconds/step"]}
        if done.responses:
            waited = seconds.get("seconds/rollout", 0.0) + seconds.get("seconds/reward", 0.0)
            speed |= {"trainer/idle_seconds": waited, "trainer/idle_share": waited / seconds["seconds/step"]}
        made = done.metrics | speed | seconds
        self.pending, self._failure = done.pending, done.failure
        self.state = replace(
            before,
            step=step,
            weight_version=step,
            data_cursor=done.pending.cursor if done.pending else setup.cursor.state(),
            episodes=before.episodes + done.responses,
            kl_coefficient=done.kl_coefficient,
            evaluation=None,
            unlogged=made,
        )
        if done.failure and not isinstance(done.failure, MismatchError):
            raise done.failure
        return made

    def _after_step(self) -> str | None:
        """Evaluates, logs, saves and exports the newest step, as far as it is due; returns the reason to end there, if
        there is one. Raises the step's failure, or an alert's."""
        setup, recipe, step = self.setup, self.setup.recipe, self.state.step
        last = step == setup.last_step or setup.cursor.exhausted
        self._evaluate(last=last)
        reason = reason_to_stop(recipe, self.state, setup.cursor)
        if reason and not last:  # it is the last step after all
            self._evaluate(last=True)
        self._log()
        ends = bool(last or reason or self._failure)
        if ends or step % recipe.checkpoint.every_steps == 0 or self._is_new_best():
            self._save(continues=not ends)
            if self.state.evaluation and all(map(isfinite, self.state.evaluation.values())):
                setup.saving.confirm()
        if every := recipe.checkpoint.export_every_steps:
            setup.exports.report()
            if step % every == 0 and not self._failure:
                with setup.clock.phase("export"), self.training.saving(step, continues=not (last or reason)):
                    setup.exports.begin(self.training.ranks, step)
        if self._failure:
            raise self._failure
        return reason

    def _evaluate(self, *, last: bool) -> None:
        """Evaluates the sets that are due after the newest step and not evaluated yet."""
        state, recipe = self.state, self.setup.recipe
        evaluated = {name.partition("/")[0] for name in state.evaluation or ()}
        sets = [name for name in recipe.eval.due(state.step, last=last) if name not in evaluated]
        if not sets:
            return
        with self.setup.stopping.giving_up(), self.setup.clock.phase("eval"):
            evaluation = self.training.evaluate(state.step, sets)
        rule = early_stopping(recipe)
        if rule and rule.metric.partition("/")[0] in sets:
            state = after_evaluation(state, rule, evaluation)
        self.state = replace(state, evaluation={**(state.evaluation or {}), **evaluation})

    def _evaluation_metrics(self) -> dict[str, float]:
        return {f"eval/{name}": value for name, value in (self.state.evaluation or {}).items()}

    def _log(self) -> None:
        """Logs the newest step. An alert that ends the run is its failure, if it has none."""
        setup, step = self.setup, self.state.step
        metrics = {**(self.state.unlogged or {}), **self._evaluation_metrics()}
        raised = setup.alerts.check(step, metrics) if setup.alerts else None
        counted = {"restarts": float(self.restarts)} | ({"alerts": raised.holding} if raised else {})
        setup.tracker.log(step, metrics | counted | setup.clock.take())
        for line in raised.lines if raised else ():
            setup.tracker.say(line)
        self._failure = self._failure or (raised.failure if raised else None)
        self.state = replace(self.state, unlogged=None)

    def _is_new_best(self) -> bool:
        """Returns whether these weights' evaluation beats that of every checkpoint that is kept."""
        metric, evaluation = self.setup.recipe.checkpoint.keep_best, self.state.evaluation or {}
        if metric not in evaluation:  # not every step evaluates its set
            return False
        best = self.setup.saving.best()
        return best is None or evaluation[metric] > best

    def _save(self, *, continues: bool) -> None:
        with self.setup.clock.phase("checkpoint"), self.training.saving(self.state.step, continues=continues):
            state = replace(self.state, tracker_runs=self.setup.tracker.run_ids)
            self.setup.saving.begin(self.training.ranks, state, self.pending)
        if not continues:
            self.setup.saving.finish()


@contextmanager
def profiled(recipe: AnyRecipe, ranks: TrainRanks, step: int, say: Callable[[str], None]) -> Iterator[None]:
    """Records `step`, taken inside the context, if the recipe names it (docs/profiling.md). The run continues if a
    profile cannot be written; a step that raises has none."""
    settings = recipe.train.profile
    if settings is None or step not in settings.steps:
        yield
        return
    directory = run_directory(recipe).absolute() / "profile" / f"step_{step:06d}"
    ranks.begin_profile(settings.ranks, settings.memory)
    began = time.monotonic()
    TIMELINE.begin()
    try:
        yield
    finally:
        spans = TIMELINE.take()
    problems = ranks.end_profile(settings.ranks, directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_chrome_trace(directory / "timeline.json", spans, began)
    except OSError as error:
        problems.append(str(error))
    for problem in problems:
        say(f"warning: the profile of step {step} is not whole: {problem}")
    say(f"profile of step {step}: open the files of {directory} at https://ui.perfetto.dev (docs/profiling.md)")

"""A run's checkpoints, written and read by all ranks together."""

from __future__ import annotations

import shlex
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from megagrpo.checkpoint.groups import PENDING, Pending, write_pending
from megagrpo.checkpoint.store import Checkpoint, CheckpointStore, describe
from megagrpo.checkpoint.trainer_state import TrainerState, allow_changes
from megagrpo.cluster.train_ranks import TrainRanks
from megagrpo.errors import DIVERGED_FIX, CheckpointError, MegagrpoError, Problem, RecipeError
from megagrpo.progress import progress
from megagrpo.recipe.schema import AnyRecipe


def checkpoint_to_resume(store: CheckpointStore, recipe: AnyRecipe) -> Checkpoint | None:
    """Returns the newest complete checkpoint of this run; None if there is none.

    Raises RecipeError if there is one though checkpoint.resume is never, or if the recipe has changed so that the
    checkpoint cannot continue with it.
    """
    store.remove_leftovers()
    newest = store.latest_complete()
    if newest is None:
        return None
    if recipe.checkpoint.resume == "never":
        given = "checkpoint.resume: never"
        needed = "a run without checkpoints"
        fix = "give the recipe another name, delete the directory, or set checkpoint.resume to auto"
        raise RecipeError(Problem(f"{newest.path}: this run has a checkpoint already", given, needed, fix))
    allow_changes(newest.state.recipe, recipe.model_dump(mode="json"))
    return newest


class Saving:
    """A run's checkpoints: training waits for a copy in the ranks' host memory; files are written while it continues.

    One thread writes, commits and deletes, one job after another. A save that fails is reported, leaves nothing behind
    and touches no older checkpoint; the run continues, and ends with the error only if it was the last save.
    """

    def __init__(self, store: CheckpointStore, say: Callable[[str], None], saved: int = 0) -> None:
        """Sets up the writing thread. saved: step after which the run resumes. say: called by the run's own thread."""
        self._store, self._say, self._saved = store, say, saved
        self._failure: MegagrpoError | OSError | None = None
        """Error of the last save."""
        self._said = True
        """False until the error is reported; `finish` raises it instead of reporting it."""
        self._thread = ThreadPoolExecutor(1, "checkpoints")
        self._jobs: deque[Future[None]] = deque()

    def begin(self, ranks: TrainRanks, state: TrainerState, pending: Pending | None = None) -> None:
        """Waits for the previous save, then copies the state of `state.step`; a thread then writes it as a checkpoint,
        with `pending`, the groups that no step has trained on."""
        self.wait()
        self._tell()
        self._failure = None
        try:
            directory = self._store.begin(state.step)
            ranks.call("take_snapshot")
        except MegagrpoError as error:
            self._store.abandon(state.step)
            if not isinstance(error, CheckpointError):
                raise
            self._failure, self._said = error, False
        else:
            self._jobs.append(self._thread.submit(self._write, ranks, state, directory, pending))

    def _write(self, ranks: TrainRanks, state: TrainerState, directory: Path, pending: Pending | None) -> None:
        try:
            with progress(f"writing the checkpoint of step {state.step}"):
                written = ranks.write_snapshot(directory)
            if pending is not None:
                write_pending(directory / PENDING, pending)
                written.append(describe(directory, directory / PENDING))
        except MegagrpoError:
            self._store.abandon(state.step)
            raise
        self._store.commit(state, written)
        self._saved = state.step

    def confirm(self) -> None:
        """Confirms, after the save under way, that the saved weights made finite numbers (CheckpointStore.confirm).

        Reports a save that has failed.
        """
        self._jobs.append(self._thread.submit(self._store.confirm))
        while self._jobs and self._jobs[0].done():
            self._settle(self._jobs.popleft())
        self._tell()

    @contextmanager
    def going_on_from_finite_weights(self, lr: float) -> Iterator[None]:
        """Adds to the error of a diverged run how to resume from the newest weights that made finite numbers."""
        try:
            yield
        except MegagrpoError as error:
            first, *others = error.problems
            if first.fix != DIVERGED_FIX:
                raise
            self.wait()
            usable, removed = self._store.since_confirmed()
            start = f"{usable}, whose weights have made finite numbers"
            if usable is None:  # an earlier version has confirmed none: of its checkpoints the older ones may be sound
                older, removed = removed[:-1], removed[-1:]
                start = str(older[-1]) if older else "the model"
            command = f"{shlex.join(['rm', '-r', *map(str, removed)])}, then " if removed else ""
            command += f"the same command with train.optimizer.lr={lr / 2:g}; it begins from {start}"
            once = [replace(other, fix="") if other.fix == DIVERGED_FIX else other for other in others]
            raise type(error)([replace(first, fix=f"{DIVERGED_FIX}. To go on: {command}"), *once]) from error

    def wait(self) -> int:
        """Waits for the save that is under way; returns the step of the newest checkpoint."""
        while self._jobs:
            self._settle(self._jobs.popleft())
        return self._saved

    def best(self) -> float | None:
        """Returns CheckpointStore.best, once the save that is under way is over."""
        self.wait()
        return self._store.best()

    def finish(self) -> None:
        """Waits for the save that is under way. Raises the error of the last save if it failed."""
        self.wait()
        if self._failure is not None:
            self._said = True
            raise self._failure

    def newest_again(self) -> Checkpoint | None:
        """Returns the newest checkpoint, from which the run restarts; None if there is none."""
        self.wait()
        self._store.remove_leftovers()
        newest = self._store.latest_complete()
        self._saved = newest.state.step if newest else 0
        return newest

    def __enter__(self) -> Saving:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()
        self._tell()
        self._thread.shutdown()

    def _settle(self, job: Future[None]) -> None:
        try:
            job.result()
        except (MegagrpoError, OSError) as error:
            self._failure, self._said = error, False

    def _tell(self) -> None:
        if not self._said:
            self._said = True
            self._say(f"warning: a checkpoint could not be saved, the one before stays: {self._failure}")

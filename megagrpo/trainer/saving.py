"""A run's checkpoints, written and read by all ranks together, and the Hugging Face models that it exports.

Models are exported at its end and while training continues, with the user's command on each.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from megagrpo.checkpoint.groups import PENDING, Pending, write_pending
from megagrpo.checkpoint.store import Checkpoint, CheckpointStore, describe
from megagrpo.checkpoint.trainer_state import TrainerState, allow_changes
from megagrpo.cluster.train_ranks import TrainRanks
from megagrpo.errors import DIVERGED_FIX, CheckpointError, MegagrpoError, Problem, RecipeError
from megagrpo.preflight.preflight import Preflight
from megagrpo.progress import progress
from megagrpo.recipe.defaults import adapter_directory, dtype_name, export_directory, run_directory
from megagrpo.recipe.schema import AnyRecipe
from megagrpo.track.jsonl import read_json
from megagrpo.weights.files.adapters import adapted_matrices, adapter_tensors, peft_config
from megagrpo.weights.files.export import Export, begin_adapter_export, begin_export, finish_export
from megagrpo.weights.plan import make_plan


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


# --- exported models --------------------------------------------------------------------------------------------------

EXPORTED_BY = "megagrpo.json"
SECRET = re.compile("TOKEN|KEY|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
"""Names of environment variables that are withheld from a command."""


class Exports:
    """The exports during a run, one at a time, and their commands. A failure is reported; the run continues."""

    def __init__(
        self, checked: Preflight[AnyRecipe], tokenizer: PreTrainedTokenizerBase, say: Callable[[str], None]
    ) -> None:
        """Sets up the thread that writes. say: called by the run's own thread."""
        self._checked, self._tokenizer, self._say = checked, tokenizer, say
        self._thread = ThreadPoolExecutor(1, "exports")
        self._job: Future[Path] | None = None
        self._commands: dict[Path, subprocess.Popen[bytes]] = {}

    def write_final(self, ranks: TrainRanks, step: int) -> Path:
        """Writes the policy as a Hugging Face model. Returns its directory. Raises CheckpointError.

        Every rank writes its own boxes; nothing is gathered. Adapters are merged into its weights, and also written as
        PEFT files beside it.
        """
        checked, recipe, lora = self._checked, self._checked.recipe, self._checked.recipe.train.lora
        dtype = dtype_name(recipe, ranks.device_type)
        if lora is not None:
            matrices = adapted_matrices(checked.architecture, lora.targets)
            config = peft_config(matrices, lora.rank, lora.alpha, recipe.model.path)
            tensors = adapter_tensors(matrices, lora.rank)
            adapter = begin_adapter_export(adapter_directory(recipe), tensors, config, dtype)
            ranks.export("write_export", adapter, make_plan(ranks.call("adapter_manifest"), adapter.files), True)
            finish_export(adapter)
        begun = begin_export(export_directory(recipe), checked.model_directory, checked.architecture, dtype)
        ranks.export("write_export", begun, make_plan(ranks.call("manifest"), begun.files), False)
        self._complete(begun, step)
        return begun.directory

    def begin(self, ranks: TrainRanks, step: int) -> None:
        """Copies the policy, whose parameters are on the device, to the ranks' host memory; a thread then writes it."""
        self.wait()
        recipe, checked = self._checked.recipe, self._checked
        directory = run_directory(recipe) / "hugging_face_steps" / f"step_{step:06d}"
        dtype = dtype_name(recipe, ranks.device_type)
        try:
            export = begin_export(directory, checked.model_directory, checked.architecture, dtype)
            ranks.export("copy_export", export, make_plan(ranks.call("manifest"), export.files))
        except CheckpointError as error:
            self._say(f"warning: step {step} could not be exported: {error}")
        else:
            self._job = self._thread.submit(self._write, ranks, export, step)

    def _write(self, ranks: TrainRanks, export: Export, step: int) -> Path:
        try:
            ranks.write_copied_export(export)
        except MegagrpoError:
            shutil.rmtree(export.partial, ignore_errors=True)
            raise
        self._complete(export, step)
        return export.directory

    def _complete(self, export: Export, step: int) -> None:
        """Completes a model whose weights every rank has written, and names it. Raises CheckpointError or OSError."""
        recipe = self._checked.recipe
        if recipe.model.tokenizer or recipe.model.chat_template:  # else begin_export has copied the model's own files
            self._tokenizer.save_pretrained(export.partial)
        name = json.dumps({"run": recipe.name, "step": step})
        (export.partial / EXPORTED_BY).write_text(f"{name}\n", encoding="utf-8")
        finish_export(export)

    def report(self) -> None:
        """Starts the command on a complete export, and reports the commands that have failed."""
        if self._job is not None and self._job.done():
            self.wait()
        for log, process in list(self._commands.items()):
            if (code := process.poll()) is not None:
                del self._commands[log]
                if code:
                    self._say(f"warning: checkpoint.after_export ended with {code}: its output is in {log}")

    def wait(self) -> None:
        """Waits for the export that is under way."""
        job, self._job = self._job, None
        try:
            if job is not None:
                self.start_command(job.result())
        except (MegagrpoError, OSError) as error:
            self._say(f"warning: a model could not be exported: {error}")

    def start_command(self, directory: Path) -> None:
        """Starts the user's command on an exported model, in a process group of its own."""
        recipe = self._checked.recipe
        command = [word.replace("{directory}", str(directory.absolute())) for word in recipe.checkpoint.after_export]
        if not command:
            return
        log = run_directory(recipe) / "logs" / f"after_export_{directory.name}.log"
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            environment = {name: value for name, value in os.environ.items() if not SECRET.search(name)}
            with log.open("wb") as output:
                self._commands[log] = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env=environment,
                )
        except OSError as error:
            self._say(f"warning: checkpoint.after_export could not be started: {error}")

    def close(self) -> None:
        """Waits for the export that is under way. Leaves commands that still run alone, and names them."""
        self.wait()
        self.report()
        self._thread.shutdown()
        for log, process in self._commands.items():
            self._say(f"checkpoint.after_export still runs as process {process.pid}, with its output in {log}")


def exported_step(recipe: AnyRecipe) -> int | None:
    """Returns the step whose weights are in the run's export directory; None if there is no export."""
    return read_json(export_directory(recipe) / EXPORTED_BY).get("step")

"""Hugging Face models that a run exports, at its end and while training continues, and the user's command on each."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from megagrpo.cluster.train_ranks import TrainRanks
from megagrpo.errors import CheckpointError, MegagrpoError
from megagrpo.preflight.preflight import Preflight
from megagrpo.recipe.defaults import adapter_directory, dtype_name, export_directory, run_directory
from megagrpo.recipe.schema import AnyRecipe
from megagrpo.track.jsonl import read_json
from megagrpo.weights.files.adapters import adapted_matrices, adapter_tensors, peft_config
from megagrpo.weights.files.export import Export, begin_adapter_export, begin_export, finish_export
from megagrpo.weights.plan import make_plan

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

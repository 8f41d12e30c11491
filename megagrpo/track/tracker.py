"""The files, console and gauges of a run as one object, and the record of the run's start."""

from __future__ import annotations

import json
import os
import platform
import shlex
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any

from transformers import PreTrainedTokenizerBase

from megagrpo.recipe.defaults import run_directory
from megagrpo.recipe.load import dump
from megagrpo.recipe.schema import AnyRecipe
from megagrpo.recipe.schema.run import ConsoleMode
from megagrpo.track.console import make_console, summary_of
from megagrpo.track.follower import FollowerProcess
from megagrpo.track.jsonl import METRICS_FILE, MISMATCH_FILE, SCHEDULE_FILE, MismatchRecord, StepLines
from megagrpo.track.metrics import PrometheusEndpoint, UndocumentedMetric, undocumented
from megagrpo.track.rollout_files import remove_later
from megagrpo.track.rollout_writer import Learned, RolloutWriter, StepRollouts, first_groups
from megagrpo.track.status import RunStatus, end_state, error_line
from megagrpo.track.tracked_run import Delivered, run_ids
from megagrpo.track.trackers import trackers_of
from megagrpo.types import Group

LIBRARIES = (
    "megagrpo", "torch", "megatron-core", "ray", "transformers", "tokenizers", "safetensors", "numpy", "pyarrow",
    "pydantic", "mlflow", "math-verify", "sglang", "transformer-engine", "apex", "flash-attn",
    "flash-attn-3", "flash-attn-4", "emerging-optimizers",
)  # fmt: skip
GIT_TIMEOUT_SECONDS = 10.0


class Tracker:
    """A context: leaving it ends the run's files and its trackers, with a status that reports an exception.

    MLflow and other trackers get the run from its files, by a process of their own (track/follower.py).
    """

    def __init__(
        self,
        recipe: AnyRecipe,
        total_steps: int,
        resumed_step: int = 0,
        run_ids: Mapping[str, str] | None = None,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        unlogged: bool = False,
        changed: Sequence[str] = (),
        complete: bool = False,
        console: ConsoleMode | None = None,
    ) -> None:
        """Writes recipe.yaml and environment.json to the run's directory, and for every start a numbered copy of both;
        starts the follower, if the recipe has trackers.

        resumed_step: the last step that the run keeps (0 for a new run). run_ids: what `run_ids` was after that step.
        tokenizer: of the samples to keep; None: none are kept.
        unlogged: the metrics of that step follow. changed: lines about differences from the recipe until then.
        complete: no step is left to do. Trackers that have the whole run are then left alone.
        console: the mode of the output; None: the recipe's.
        """
        self._recipe, self._tokenizer, self._total_steps = recipe, tokenizer, total_steps
        self._console = make_console(console or recipe.track.console)
        # First: where its port is taken, nothing has begun.
        self._endpoint = PrometheusEndpoint(port, recipe.name) if (port := recipe.track.prometheus_port) else None
        self._undocumented: set[str] = set()
        self._directory = directory = run_directory(recipe)
        directory.mkdir(parents=True, exist_ok=True)
        number = len(list(directory.glob("recipe.*.yaml"))) + 1
        described = json.dumps(environment(), indent=2) + "\n"
        for part in ("", f".{number}"):
            (directory / f"recipe{part}.yaml").write_text(dump(recipe), encoding="utf-8")
            (directory / f"environment{part}.json").write_text(described, encoding="utf-8")
        delivered = Delivered(directory, anew=resumed_step == 0, number=number, run_ids=run_ids)
        self._start(resumed_step, unlogged)
        self._status = RunStatus("running", total_steps, resumed_step)
        self._status.write(directory)
        self._follower: FollowerProcess | None = None
        if changed or not (complete and delivered.whole):
            start = {f"start_{number}_after_step_{resumed_step}": list(changed)} if changed else {}
            delivered.write(whole=False, changes={**delivered.changes, **start})
            self._follower = FollowerProcess(directory, self.say) if trackers_of(recipe) else None

    def _start(self, step: int, unlogged: bool) -> None:
        """Opens the files after `step`. unlogged: the metrics of that step follow."""
        directory, recipe = self._directory, self._recipe
        remove_later(directory, step)
        kept = self._tokenizer is not None and recipe.track.rollouts is not None
        self._writer = RolloutWriter(directory, self._tokenizer, self.say) if kept else None
        self._metrics = StepLines(directory / METRICS_FILE, step, self.say, unlogged)
        self._mismatches = StepLines(directory / MISMATCH_FILE, step, self.say)
        self._schedule = StepLines(directory / SCHEDULE_FILE, step, self.say)
        self._console.start(recipe.name, directory, self._total_steps, step)

    def rewind(self, step: int, *, unlogged: bool) -> None:
        """Rewinds to `step`: the run repeats the steps after it, as after a resume. unlogged: as at the start."""
        self._finish()
        self._status = replace(self._status, step=step)
        self._start(step, unlogged)

    @property
    def run_ids(self) -> dict[str, str]:
        """Returns the run's id by tracker, for a later start. A tracker that has not responded yet is missing."""
        return run_ids(self._directory)

    def say(self, line: str) -> None:
        """Prints a line that stays."""
        self._console.say(line)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs a step's metrics: a line of metrics.jsonl, from which trackers get it.

        Warns (UndocumentedMetric) of a name that is not in the table.
        """
        unknown = [name for name in undocumented(metrics) if name not in self._undocumented]
        if unknown:
            self._undocumented.update(unknown)
            warnings.warn(f"not in track/metrics.yaml: {', '.join(unknown)}", UndocumentedMetric, stacklevel=2)
        if self._writer and self._writer.left_out:
            metrics = {**metrics, "rollouts/left_out": float(self._writer.left_out)}
        self._status = replace(self._status, step=step)
        if self._endpoint:
            self._endpoint.log(step, metrics)
        values = {name: float(value) for name, value in metrics.items()}
        self._metrics.append({"step": step, "time": round(time.time(), 3), **values})
        self._console.log(step, metrics)  # last: it shows a step that is kept

    def rollouts(
        self, step: int, sets: Mapping[str, Sequence[Group]], version: int, learned: Learned | None = None
    ) -> None:
        """Keeps the step's first groups of each set, as many as the recipe sets: of TRAIN, or of evaluations.

        version: of the policy that they are for. learned: the results of training for all groups of TRAIN.
        """
        if self._writer and (settings := self._recipe.track.rollouts):
            kept = {name: first_groups(groups, settings.samples_per_step) for name, groups in sets.items()}
            self._writer.put(StepRollouts(step, kept, version, settings.token_samples_per_step, learned))

    def mismatch(self, record: MismatchRecord) -> None:
        """Adds the step's figures and worst tokens to mismatch.jsonl."""
        self._mismatches.append(asdict(record))

    def schedule(self, line: dict[str, Any]) -> None:
        """Adds a step's line to schedule.jsonl."""
        self._schedule.append(line)

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Closes the files, writes the run's status, waits a while for trackers, and prints the summary."""
        self._status = replace(
            self._status, state=end_state(error), ended=round(time.time(), 3), error=error_line(error)
        )
        self._finish()
        if self._endpoint:
            self._endpoint.close()
        with suppress(OSError):  # a full disk has an error of its own already
            self._status.write(self._directory)
        if self._follower:
            self._follower.finish()
        self._console.end(summary_of(self._recipe, self._status))

    def _finish(self) -> None:
        if self._writer:
            self._writer.close()
        for lines in (self._metrics, self._mismatches, self._schedule):
            lines.close()
        self._console.finish()


def environment() -> dict[str, Any]:
    """Returns the content of environment.json. Missing libraries and a missing checkout (`git`) are null."""
    checkout, git = Path(__file__).resolve().parents[2], None
    if (checkout / ".git").exists() and (commit := _git_output(checkout, "rev-parse", "HEAD")) is not None:
        changes = _git_output(checkout, "status", "--porcelain", "--untracked-files=no")
        git = {"commit": commit, "modified": changes != ""}
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": shlex.join(sys.argv),
        "directory": os.getcwd(),
        "git": git,
        "python": platform.python_version(),
        "libraries": {
            name: next((package.version for package in metadata.distributions(name=name)), None) for name in LIBRARIES
        },
        "host": {"name": socket.gethostname(), "system": platform.platform(), "cores": os.cpu_count()},
        "gpus": _gpus(),
    }


def _gpus() -> list[str]:
    """Returns the names of this node's GPUs if nvidia-smi's library lists them; torch would take memory on each."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        return [str(pynvml.nvmlDeviceGetName(handle)) for handle in handles]
    except ImportError:
        return []
    except pynvml.NVMLError:
        return []


def _git_output(checkout: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", "-C", str(checkout), *arguments],
            capture_output=True,
            text=True,
            timeout=GIT_TIMEOUT_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None

"""All trackers of a run as one object, and the record of what the run was started with."""

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
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any

from megagrpo.recipe.defaults import run_directory
from megagrpo.recipe.load import dump
from megagrpo.recipe.schema import AnyRecipe
from megagrpo.track.console import make_console
from megagrpo.track.jsonl import MISMATCH_FILE, SCHEDULE_FILE, JsonlMetrics, MismatchRecord, StepLines, rollout_line
from megagrpo.track.metrics import UndocumentedMetric, undocumented
from megagrpo.track.mlflow import MLflowTracker, tracking_uri
from megagrpo.track.sink import RunStart, Sink, SinkWithRun, Status, TensorBoardTracker, WandBTracker
from megagrpo.types import Group

LIBRARIES = (
    "megagrpo", "torch", "megatron-core", "ray", "transformers", "tokenizers", "safetensors", "numpy", "pyarrow",
    "pydantic", "mlflow", "math-verify", "sglang", "transformer-engine", "apex", "flash-attn",
    "flash-attn-3",
)  # fmt: skip
GIT_TIMEOUT_SECONDS = 10.0


class Tracker:
    """A context: leaving it finishes all trackers, with a status that says whether an exception ended the run."""

    def __init__(
        self,
        recipe: AnyRecipe,
        total_steps: int,
        resumed_step: int = 0,
        run_ids: Mapping[str, str] | None = None,
        *,
        unlogged: bool = False,
        changed: Sequence[str] = (),
    ) -> None:
        """Writes recipe.yaml and environment.json to the run's directory, and for every start a numbered copy of both;
        starts every tracker.

        resumed_step: the last step that the run keeps (0 for a new run). run_ids: what `run_ids` was after that step.
        unlogged: the metrics of that step are still to come. changed: what differs from the recipe until then, by line.
        """
        self._recipe = recipe
        self._console = make_console(recipe.track.console, sys.stdout)
        self._with_run: dict[str, SinkWithRun] = {}
        if recipe.track.mlflow:
            self._with_run["mlflow"] = MLflowTracker(recipe.track.mlflow, self.say)
        if recipe.track.wandb:
            self._with_run["wandb"] = WandBTracker(recipe.track.wandb)
        own_files = [TensorBoardTracker()] if recipe.track.tensorboard else []
        # The console is last: it shows a step once all other trackers have it.
        self._sinks: list[Sink] = [JsonlMetrics(self.say), *own_files, *self._with_run.values(), self._console]
        self._undocumented: set[str] = set()
        directory = run_directory(recipe)
        directory.mkdir(parents=True, exist_ok=True)
        number = len(list(directory.glob("recipe.*.yaml"))) + 1
        described = json.dumps(environment(), indent=2) + "\n"
        for part in ("", f".{number}"):
            (directory / f"recipe{part}.yaml").write_text(dump(recipe), encoding="utf-8")
            (directory / f"environment{part}.json").write_text(described, encoding="utf-8")
        self._start(RunStart(recipe, directory, total_steps, resumed_step, run_ids or {}, unlogged, number, changed))

    def _start(self, run: RunStart) -> None:
        self._run = run
        self._rollouts = StepLines(run.directory / "rollouts.jsonl", run.resumed_step, self.say)
        self._mismatches = StepLines(run.directory / MISMATCH_FILE, run.resumed_step, self.say)
        self._schedule = StepLines(run.directory / SCHEDULE_FILE, run.resumed_step, self.say)
        for sink in self._sinks:
            sink.start(run)

    def rewind(self, step: int, *, unlogged: bool) -> None:
        """The steps after `step` come again, as they do in a run that continues after it. unlogged: as at the start."""
        run_ids = self.run_ids
        self._finish("interrupted")
        self._start(replace(self._run, resumed_step=step, run_ids=run_ids, unlogged=unlogged, changed=()))

    @property
    def run_ids(self) -> dict[str, str]:
        """By tracker, the id with which it continues this run. A tracker that has not answered yet is missing."""
        return {name: sink.run_id for name, sink in self._with_run.items() if sink.run_id is not None}

    def say(self, line: str) -> None:
        """Prints a line that stays."""
        self._console.say(line)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Gives a step's metrics to every tracker. Warns (UndocumentedMetric) of a name that is not in the table."""
        unknown = [name for name in undocumented(metrics) if name not in self._undocumented]
        if unknown:
            self._undocumented.update(unknown)
            warnings.warn(f"not in track/metrics.py: {', '.join(unknown)}", UndocumentedMetric, stacklevel=2)
        for sink in self._sinks:
            sink.log(step, metrics)

    def rollouts(self, step: int, groups: Sequence[Group]) -> None:
        """Adds the step's first groups, as many as the recipe says, to rollouts.jsonl."""
        for group in groups[: self._recipe.track.rollouts_per_step]:
            self._rollouts.append(rollout_line(step, group))

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
        """Ends every tracker and prints where everything is."""
        status: Status = "finished"
        if kind is not None:
            status = "failed" if issubclass(kind, Exception) else "interrupted"
        self._finish(status)
        self.say(f"run directory: {run_directory(self._recipe)}")
        if self._recipe.checkpoint.resume != "never":
            self.say(
                "the same command continues it; to train longer, give it a larger train.total_steps or total_epochs"
            )
        if self._recipe.track.mlflow:
            self.say(f"metrics in MLflow: mlflow ui --backend-store-uri {tracking_uri(self._recipe)}")

    def _finish(self, status: Status) -> None:
        self._rollouts.close()
        self._mismatches.close()
        self._schedule.close()
        for sink in self._sinks:
            sink.finish(status)


def environment() -> dict[str, Any]:
    """What a run was started with, for environment.json. Missing libraries and a missing checkout (`git`) are null."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": shlex.join(sys.argv),
        "directory": os.getcwd(),
        "git": _git(Path(__file__).resolve().parents[2]),
        "python": platform.python_version(),
        "libraries": {name: _version(name) for name in LIBRARIES},
        "host": {"name": socket.gethostname(), "system": platform.platform(), "cores": os.cpu_count()},
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _git(checkout: Path) -> dict[str, Any] | None:
    if not (checkout / ".git").exists():
        return None
    commit = _git_output(checkout, "rev-parse", "HEAD")
    changes = _git_output(checkout, "status", "--porcelain", "--untracked-files=no")
    return None if commit is None else {"commit": commit, "modified": changes != ""}


def _git_output(checkout: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(checkout), *arguments], capture_output=True, text=True, timeout=GIT_TIMEOUT_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None

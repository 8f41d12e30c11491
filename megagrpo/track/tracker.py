"""All trackers of a run as one: what the trainer talks to."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

from megagrpo.recipe.defaults import run_directory
from megagrpo.recipe.load import dump
from megagrpo.recipe.schema import AnyRecipe
from megagrpo.track import environment
from megagrpo.track.console import make_console
from megagrpo.track.jsonl import JsonlMetrics, RolloutTraces
from megagrpo.track.metrics import UndocumentedMetric, undocumented
from megagrpo.track.mismatch import MismatchRecord, MismatchTraces
from megagrpo.track.mlflow import MLflowTracker, tracking_uri
from megagrpo.track.sink import RunStart, Sink, SinkWithRun, Status
from megagrpo.types import Group


class Tracker:
    """Leaving it as a context finishes all trackers, with the status that the exception tells."""

    def __init__(self, recipe: AnyRecipe, total_steps: int) -> None:
        self._recipe = recipe
        self._total_steps = total_steps
        self._console = make_console(recipe.track.console, sys.stdout)
        self._with_run = _sinks_with_run(recipe, self.say)
        # The console is last: it shows a step once everything else has it.
        self._sinks: list[Sink] = [JsonlMetrics(), *_other_sinks(recipe), *self._with_run.values(), self._console]
        self._traces: RolloutTraces | None = None
        self._mismatches: MismatchTraces | None = None
        self._undocumented: set[str] = set()

    def start(self, resumed_step: int = 0, run_ids: Mapping[str, str] | None = None, *, unlogged: bool = False) -> None:
        """Writes recipe.yaml and environment.json to the run's directory and starts every tracker.

        `resumed_step` is the last step that the run keeps (0 for a new run); `run_ids` is what `run_ids` was then.
        `unlogged`: the metrics of that step are still to come.
        """
        directory = run_directory(self._recipe)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "recipe.yaml").write_text(dump(self._recipe), encoding="utf-8")
        described = json.dumps(environment.describe(), indent=2) + "\n"
        (directory / "environment.json").write_text(described, encoding="utf-8")
        run = RunStart(self._recipe, directory, self._total_steps, resumed_step, run_ids or {}, unlogged)
        self._traces = RolloutTraces(run)
        self._mismatches = MismatchTraces(run)
        for sink in self._sinks:
            sink.start(run)

    @property
    def run_ids(self) -> dict[str, str]:
        """By tracker, the id to continue this run under. A tracker that has not answered yet has none."""
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
        if self._traces:
            self._traces.write(step, groups)

    def mismatch(self, record: MismatchRecord) -> None:
        """Adds the step's figures and worst tokens to mismatch.jsonl."""
        if self._mismatches:
            self._mismatches.write(record)

    def finish(self, status: Status) -> None:
        """Ends every tracker and says where everything is. Does nothing if it was not started, or a second time."""
        if self._traces is None or self._mismatches is None:
            return
        self._traces.close()
        self._mismatches.close()
        self._traces = self._mismatches = None
        for sink in self._sinks:
            sink.finish(status)
        self.say(f"run directory: {run_directory(self._recipe)}")
        self.say("to resume it, or to train longer: the same command continues from the newest checkpoint")
        if self._recipe.track.mlflow:
            self.say(f"metrics in MLflow: mlflow ui --backend-store-uri {tracking_uri(self._recipe)}")

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish("finished")
        else:
            self.finish("failed" if issubclass(kind, Exception) else "interrupted")


def _sinks_with_run(recipe: AnyRecipe, say: Callable[[str], None]) -> dict[str, SinkWithRun]:
    sinks: dict[str, SinkWithRun] = {}
    if recipe.track.mlflow:
        sinks["mlflow"] = MLflowTracker(recipe.track.mlflow, say)
    if recipe.track.wandb:
        from megagrpo.track.wandb import WandBTracker

        sinks["wandb"] = WandBTracker(recipe.track.wandb)
    return sinks


def _other_sinks(recipe: AnyRecipe) -> list[Sink]:
    if not recipe.track.tensorboard:
        return []
    from megagrpo.track.tensorboard import TensorBoardTracker

    return [TensorBoardTracker()]

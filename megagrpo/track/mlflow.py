"""MLflow, in a thread of its own so that no step waits for it. Failures are counted, reported once, and end nothing."""

from __future__ import annotations

import logging
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megagrpo.errors import first_line
from megagrpo.recipe import schema
from megagrpo.recipe.schema import AnyRecipe
from megagrpo.track.sink import RunStart, Status

FINISH_TIMEOUT_SECONDS = 60.0
RUN_ID_TIMEOUT_SECONDS = 30.0
PARAMS_PER_CALL = 100
PARAM_CHARACTERS = 6000
STATUSES: dict[Status, str] = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
LAST_STEP_METRIC = "seconds/step"


class MLflowTracker:
    """`say` receives the one line about failures."""

    def __init__(self, settings: schema.MLflowConfig, say: Callable[[str], None]) -> None:
        self._settings = settings
        self._say = say
        self._queue: queue.SimpleQueue[tuple[int, float, dict[str, float]] | Status] = queue.SimpleQueue()
        self._run_id: str | None = None
        self._run_id_deadline = 0.0
        self._started = threading.Event()  # or failed to start
        self.errors = 0

    @property
    def run_id(self) -> str | None:
        """Waits for the thread until 30 s after the start, because a first checkpoint needs it. None if it is late."""
        if self._run_id is None:
            self._started.wait(max(0.0, self._run_id_deadline - time.monotonic()))
        return self._run_id

    def start(self, run: RunStart) -> None:
        self._run_id = run.run_ids.get("mlflow")
        self._run_id_deadline = time.monotonic() + RUN_ID_TIMEOUT_SECONDS
        # A daemon, so that a server that never answers cannot keep a finished run alive.
        self._thread = threading.Thread(target=self._work, args=(run,), name="mlflow", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._queue.put((step, time.time(), dict(metrics)))

    def finish(self, status: Status) -> None:
        self._queue.put(status)
        self._thread.join(FINISH_TIMEOUT_SECONDS)
        if self._thread.is_alive():
            self._say(f"mlflow: no answer in {FINISH_TIMEOUT_SECONDS:.0f} s; metrics.jsonl has everything")
        elif self.errors:
            self._say(f"mlflow: {self.errors} failed calls; metrics.jsonl has everything")

    def _work(self, run: RunStart) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read when mlflow is imported
        logging.getLogger("alembic").setLevel(logging.WARNING)  # it logs every table of a new sqlite file
        logging.getLogger("mlflow.store").setLevel(logging.WARNING)
        try:
            mlflow_run = _MLflowRun(self._settings, run, self._run_id)
            self._run_id = mlflow_run.run_id
        except Exception as error:  # noqa: BLE001  (files, databases and servers fail in many ways; none ends the run)
            self._failed(error)
            return
        finally:
            self._started.set()
        while True:
            item = self._queue.get()
            try:
                if isinstance(item, str):
                    mlflow_run.finish(item)
                    return
                mlflow_run.log(*item)
            except Exception as error:  # noqa: BLE001  (as above)
                self._failed(error)
                if isinstance(item, str):
                    return

    def _failed(self, error: Exception) -> None:
        self.errors += 1
        if self.errors == 1:
            self._say(f"mlflow: {first_line(error)}; training goes on, and metrics.jsonl has everything")


class _MLflowRun:
    """One run on the tracking server, created or continued by its id. Methods raise what mlflow and its store raise."""

    def __init__(self, settings: schema.MLflowConfig, run: RunStart, run_id: str | None) -> None:
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(tracking_uri(run.recipe))
        self._logged_up_to = -1
        if run_id is not None:
            self._client.update_run(run_id, status="RUNNING")
            history = self._client.get_metric_history(run_id, LAST_STEP_METRIC)
            # Steps after the checkpoint come again; MLflow would show both values.
            self._logged_up_to = max((metric.step for metric in history), default=-1)
            self.run_id = run_id
            if run.changed:  # parameters cannot change: they stay those of the first start
                self._client.set_tag(run_id, run.label, "\n".join(run.changed)[:PARAM_CHARACTERS])
            self._client.log_artifact(run_id, str(run.directory / f"recipe.{run.number}.yaml"))
            return
        experiment = self._client.get_experiment_by_name(settings.experiment)
        experiment_id = experiment.experiment_id if experiment else self._make_experiment(settings, run)
        created = self._client.create_run(experiment_id, run_name=run.recipe.name)
        self.run_id = created.info.run_id
        self._log_recipe(run.recipe)
        self._client.log_artifact(self.run_id, str(run.directory / "recipe.yaml"))

    def _make_experiment(self, settings: schema.MLflowConfig, run: RunStart) -> str:
        # By default sqlite's is mlruns/ in whatever the current directory is.
        server = settings.uri or os.environ.get("MLFLOW_TRACKING_URI")
        local = None if server else (Path(run.recipe.track.directory).resolve() / "mlruns").as_uri()
        return self._client.create_experiment(settings.experiment, artifact_location=local)

    def _log_recipe(self, recipe: AnyRecipe) -> None:
        from mlflow.entities import Param

        params = [Param(key, value[:PARAM_CHARACTERS]) for key, value in flat(recipe.model_dump()).items()]
        for start in range(0, len(params), PARAMS_PER_CALL):
            self._client.log_batch(self.run_id, params=params[start : start + PARAMS_PER_CALL])

    def log(self, step: int, seconds: float, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        if step > self._logged_up_to:
            timestamp = int(seconds * 1000)
            points = [Metric(mlflow_name(name), value, timestamp, step) for name, value in metrics.items()]
            self._client.log_batch(self.run_id, metrics=points)

    def finish(self, status: Status) -> None:
        self._client.set_terminated(self.run_id, STATUSES[status])


def tracking_uri(recipe: AnyRecipe) -> str:
    """The recipe's server, that of MLFLOW_TRACKING_URI, or the sqlite file in track.directory."""
    uri = recipe.track.mlflow.uri if recipe.track.mlflow else None
    return (
        uri
        or os.environ.get("MLFLOW_TRACKING_URI")
        or f"sqlite:///{(Path(recipe.track.directory) / 'mlflow.db').resolve()}"
    )


def mlflow_name(name: str) -> str:
    """MLflow allows letters, digits and `_-./: ` in names."""
    return re.sub(r"[^\w\-./: ]", "_", name.replace("@", "_at_"))


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested values as {"train.layout.tensor": "2"}; lists of mappings are numbered."""
    leaves: dict[str, str] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, list) and any(isinstance(entry, Mapping) for entry in value):
            value = {str(index): entry for index, entry in enumerate(value)}
        if isinstance(value, Mapping) and value:
            leaves.update(flat(value, f"{name}."))
        else:
            leaves[name] = str(value)
    return leaves

"""A run in MLflow: params, tags, metrics by step, traces, files and the model.

A server that is killed or slow may carry out a request without a response. So a retry sends the same values, times
included, and MLflow's databases keep them once (stores of files, `file:`, may have a step's values twice then); a
unique tag finds the run again.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import posixpath
import re
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from megagrpo.errors import Problem
from megagrpo.section import NonNegativeInt, Section
from megagrpo.track.jsonl import PLAN_FILE, leaves, read_json
from megagrpo.track.status import Status
from megagrpo.track.tracked_run import Line, TrackedRun, without_password

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

    from megagrpo.recipe.schema import AnyRecipe

SQLITE, SQLITE_BEGIN = "sqlite:///", b"SQLite format 3\0"
PARAMS_PER_CALL = 100
TRACES_SHARE = 0.01
"""Share of a core that traces may take during a run; the others are sent at its end. MLflow takes some 10 ms for
one, which matters where steps are shorter than seconds."""
METRICS_PER_CALL = 999
"""With the tag 1000 entities, as many as a request takes: mlflow's client stores more than that in parts, tag first."""
NAME_CHARACTERS = 250
PARAM_CHARACTERS = 6000
TAG_CHARACTERS = 5000
ARTIFACT_BYTES_MAX = 64 * 2**20
"""Larger files of an exported model are not copied; its weights never are."""
WEIGHTS = (".safetensors", ".bin", ".pt", ".safetensors.index.json")
FILES = ("recipe*.yaml", "environment*.json", "data.json", PLAN_FILE, "report.html")
MODEL, LIBRARIES = "model", ("mlflow", "torch", "transformers", "safetensors")
"""The folder of a registered version, and the packages that load it."""
RUN_TAG, STEP_TAG = "megagrpo.run", "megagrpo.step"
EXPORT = "hugging_face"
"""The exported model's directory, and its folder among the artifacts."""
STATUSES: dict[Status, str] = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
}
"""Defaults: mlflow's own timeout is minutes, and the thread retries by itself."""


class MLflowConfig(Section):
    """MLflow tracking."""

    uri: str | None = None
    """Tracking server; the default is MLFLOW_TRACKING_URI, or else a sqlite file, mlflow.db, in track.directory."""

    experiment: str = "megagrpo"
    """Experiment's name."""

    system_metrics: bool = True
    """Also processor, memory and GPUs of the driver's node."""

    traces_per_step: NonNegativeInt = 4
    """Rollouts of each step that become MLflow traces: prompt, turns, tool calls, scores."""

    registered_model: str | None = None
    """Name in the model registry under which the exported model is registered."""


class MLflow(TrackedRun):
    """One run on a tracking server, created, or found again. Methods raise the errors of mlflow and its store."""

    title = "MLflow"
    section = MLflowConfig
    field = Field(MLflowConfig(), description="null switches it off.")
    takes_report = True
    settings: MLflowConfig
    _monitor: Any = None
    _traces_at: float | None = None
    """Time of the last call that sent traces, of time.monotonic()."""

    @classmethod
    def server(cls, settings: MLflowConfig, recipe: AnyRecipe) -> str:
        """Returns the recipe's server, that of MLFLOW_TRACKING_URI, or the sqlite file in track.directory."""
        if server := settings.uri or os.environ.get("MLFLOW_TRACKING_URI"):
            return server
        return f"{SQLITE}{(Path(recipe.track.directory) / 'mlflow.db').resolve()}"

    @classmethod
    def problems(cls, settings: MLflowConfig, recipe: AnyRecipe) -> Iterator[Problem]:
        written = settings.uri or ""
        if without_password(written) != written:
            needed = "an address without user and password: recipes are kept and shown"
            fix = "export MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or the whole as MLFLOW_TRACKING_URI"
            # No field's path: an override with the password would be printed as the place.
            yield Problem("track.mlflow.uri, with a user", without_password(written), needed, fix)
        if given := no_database(cls.server(settings, recipe)):
            yield Problem("track.mlflow", given, "a database, or none yet", "remove it, or name another")

    @classmethod
    def shown_at(cls, settings: MLflowConfig, recipe: AnyRecipe) -> str:
        uri = without_password(cls.server(settings, recipe))
        return uri if uri.startswith("http") else shlex.join(("mlflow", "ui", "--backend-store-uri", uri))

    def open(self) -> int:
        """Finds or creates the run. Its tag tells its last step: the run or the database may have been deleted."""
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)  # read when mlflow is imported, or at each request
        for quiet in ("alembic", "mlflow.store", "mlflow.system_metrics", "mlflow.pyfunc"):
            logging.getLogger(quiet).setLevel(logging.ERROR)
        self._uri = self.server(self.settings, self.recipe)
        if given := no_database(self._uri):  # MLflow would retry for 100 seconds
            raise OSError(given)
        from mlflow.tracking import MlflowClient

        self._client: MlflowClient = MlflowClient(self._uri)
        run = self._existing_or_created()
        self.run_id, self._experiment_id, tags = run.info.run_id, run.info.experiment_id, run.data.tags
        self._name = tags.get(RUN_TAG, self.delivered.run)  # another one if track.json was lost
        self.note(run_id=self.run_id)
        if self.live:
            if run.info.status != "RUNNING":
                self._client.update_run(self.run_id, status="RUNNING")
            # A process that was killed before its first checkpoint has left a run as running.
            for left in map(self._run, self.delivered.left(self.place)):
                if left and left.info.run_id != self.run_id and left.info.status == "RUNNING":
                    self._client.set_terminated(left.info.run_id, STATUSES["interrupted"])
        for name, value in self._tags().items():
            if tags.get(name) != value:
                self._client.set_tag(self.run_id, name, value)
        self._log_params(run.data.params)
        return int(tags.get(STEP_TAG, -1))

    def log(self, lines: Sequence[Line]) -> int:
        """Sends steps, each whole with the tag of its step: so a server keeps values and offset together."""
        from mlflow.entities import Metric, RunTag

        points, step = list[Metric](), lines[0].step

        def send() -> None:
            for start in range(0, max(1, len(points)), METRICS_PER_CALL):  # a step may have more than one call takes
                part, is_last = points[start : start + METRICS_PER_CALL], start + METRICS_PER_CALL >= len(points)
                tags = [RunTag(STEP_TAG, str(step))] if is_last else []
                self._client.log_batch(self.run_id, metrics=part, tags=tags)

        for line in lines:
            if points and len(points) + len(line.metrics) > METRICS_PER_CALL:
                send()
                points.clear()
            step, at_ms = line.step, int(line.seconds * 1000)
            points += [Metric(mlflow_name(name), value, at_ms, step) for name, value in line.metrics.items()]
        send()
        return step

    def update(self, step: int) -> None:
        if self.live:
            self._watch_system()
        now = time.monotonic()
        share, self._traces_at = (now - (self._traces_at or now)) * TRACES_SHARE, now
        self._step = step
        self._log_traces(step, time.thread_time() + share)
        self._log_files()

    def finish(self, status: Status) -> None:
        self._log_traces(self._step, math.inf)
        if self._monitor:
            self._monitor.finish()
        if self.live or self._client.get_run(self.run_id).info.status != STATUSES[status]:
            self._client.set_terminated(self.run_id, STATUSES[status])
        # Last: a server may have no registry.
        if self.settings.registered_model and (self.directory / EXPORT).is_dir():
            self.note(model_version=self._registered_version(self.settings.registered_model))

    # --- the run ------------------------------------------------------------------------------------------------------

    def _run(self, run_id: str) -> Run | None:
        from mlflow.exceptions import MlflowException

        try:
            return self._client.get_run(run_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
        return None

    def _existing_or_created(self) -> Run:
        """Returns the run that track.json names, or that has this run's tag; creates it if there is neither."""
        if existing := next(filter(None, map(self._run, self.delivered.run_ids(self.name))), None):
            return existing
        if experiment := self._client.get_experiment_by_name(self.settings.experiment):
            if tagged := self._runs_of(experiment.experiment_id):
                return tagged[0]
            experiment_id = experiment.experiment_id
        self.note(step=-1, traces_step=-1, files={})
        if not experiment:
            # By default sqlite's is mlruns/ in whatever the current directory is.
            server = self.settings.uri or os.environ.get("MLFLOW_TRACKING_URI")
            local = None if server else (Path(self.recipe.track.directory).resolve() / "mlruns").as_uri()
            experiment_id = self._client.create_experiment(self.settings.experiment, artifact_location=local)
        begun, tags = int(self.delivered.begun_seconds * 1000), {RUN_TAG: self.delivered.run}
        self._client.create_run(experiment_id, start_time=begun, run_name=self.recipe.name, tags=tags)
        # A server that was slow may have made one before, for a request that was given up.
        first, *others = self._runs_of(experiment_id)
        for other in others:
            self._client.delete_run(other.info.run_id)
        return first

    def _runs_of(self, experiment_id: str) -> list[Run]:
        with_tag = f"tags.`{RUN_TAG}` = '{self.delivered.run}'"
        return sorted(self._client.search_runs([experiment_id], with_tag), key=lambda run: str(run.info.run_id))

    def _watch_system(self) -> None:
        """Starts mlflow's own thread that logs system/...; a failed request ends it, and it is restarted."""
        if not self.settings.system_metrics or (self._monitor and not self._monitor.ended):
            return
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        class Monitor(SystemMetricsMonitor):
            ended = False

            def monitor(self) -> None:
                try:
                    super().monitor()
                finally:
                    self.ended = True

        self._monitor = Monitor(self.run_id, resume_logging=True, tracking_uri=self._uri)
        self._monitor.start()

    def _tags(self) -> dict[str, str]:
        tags = {RUN_TAG: self._name, "run_directory": str(self.directory.absolute())}
        tags |= description(self.recipe)
        tags |= environment_tags(read_json(self.directory / f"environment.{self.delivered.first_start}.json"))
        # Parameters cannot change: they stay those of the first start.
        tags |= {label: "\n".join(changed) for label, changed in self.delivered.changes.items()}
        return {mlflow_name(name): value[:TAG_CHARACTERS] for name, value in tags.items() if value}

    def _log_params(self, known: Mapping[str, str]) -> None:
        import yaml
        from mlflow.entities import Param

        first = self.directory / f"recipe.{self.delivered.first_start}.yaml"
        settings = yaml.safe_load(first.read_text(encoding="utf-8"))
        params = {mlflow_name(path): shortened(str(value)) for path, value in leaves(settings)}
        missing = [Param(key, value) for key, value in params.items() if key not in known]
        for start in range(0, len(missing), PARAMS_PER_CALL):
            self._client.log_batch(self.run_id, params=missing[start : start + PARAMS_PER_CALL])

    # --- the run's other data -----------------------------------------------------------------------------------------

    def _log_traces(self, last: int, until: float) -> None:
        """Sends the traces of the next steps up to `last`, unless this thread has used CPU time `until` by then."""
        from megagrpo.track.mlflow_traces import log_traces  # imports pyarrow
        from megagrpo.track.rollout_files import rollout_file, steps_between

        count, run = self.settings.traces_per_step, (self._experiment_id, self.run_id, self._name)
        if not count or not self.recipe.track.rollouts:
            return
        for step in steps_between(self.directory, int(self.delivered.of(self.place).get("traces_step", -1)), last):
            if time.thread_time() > until:
                return
            path = rollout_file(self.directory, step)
            try:
                log_traces(self._uri, *run, path, count)
            except FileNotFoundError:
                if path.exists():
                    raise
                return  # a rewind has removed it meanwhile: the run repeats the step
            self.note(traces_step=step)

    def _log_files(self) -> None:
        """Sends the files that have changed since they were last sent."""
        known = dict(self.delivered.of(self.place).get("files", {}))
        for path, folder in self._files():
            stat, name = path.stat(), posixpath.join(folder, path.name)
            state = f"{stat.st_size} {stat.st_mtime_ns}"
            if known.get(name) != state:
                self._client.log_artifact(self.run_id, str(path), folder or None)
                known[name] = state
                self.note(files=dict(known))

    def _files(self) -> Iterator[tuple[Path, str]]:
        """Yields each file with its folder among the artifacts. Looks at it only when those before it are sent."""
        for pattern in FILES:
            yield from ((path, "") for path in sorted(self.directory.glob(pattern)))
        for path in sorted((self.directory / EXPORT).glob("*")):
            if path.is_file() and not path.name.endswith(WEIGHTS) and path.stat().st_size <= ARTIFACT_BYTES_MAX:
                yield path, EXPORT

    # --- the exported model -------------------------------------------------------------------------------------------
    #
    # A version in the registry is a small MLflow model (MLmodel, signature, requirements and exported_model.py) among
    # the run's artifacts. Its weights stay where the run wrote them: MLflow's servers refuse sources outside of
    # artifacts, and copying weights to them would take as long as the run's own export. Loading the version reads the
    # export's directory, and fails where that has another step's model by then.

    def _registered_version(self, name: str) -> str:
        """Returns the version of model `name` for the exported model; registers it if there is none yet."""
        from mlflow.exceptions import MlflowException

        client, export = self._client, self.directory / EXPORT
        step = str(read_json(export / "megagrpo.json").get("step", ""))
        tags = {RUN_TAG: self._name, STEP_TAG: step}
        try:
            client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        for version in client.search_model_versions(f"name = '{name}'"):
            if version.run_id == self.run_id and tags.items() <= dict(version.tags).items():
                return str(version.version)
        folder = f"{MODEL}_step_{step}" if step else MODEL
        self._log_reference(export.absolute(), folder, step)
        source = f"{client.get_run(self.run_id).info.artifact_uri}/{folder}"
        return str(client.create_model_version(name, source, run_id=self.run_id, tags=tags).version)

    def _log_reference(self, export: Path, folder: str, step: str) -> None:
        import tempfile
        from importlib import metadata

        from mlflow import pyfunc
        from mlflow.models import ModelSignature
        from mlflow.types import ColSpec, ParamSchema, ParamSpec, Schema

        signature = ModelSignature(
            Schema([ColSpec("string", "prompt")]),
            Schema([ColSpec("string", "response")]),
            ParamSchema([ParamSpec("max_new_tokens", "integer", 256), ParamSpec("temperature", "float", 0.0)]),
        )
        with tempfile.TemporaryDirectory() as scratch:
            made = Path(scratch) / MODEL
            pyfunc.save_model(
                made,
                python_model=str(Path(__file__).with_name("exported_model.py")),
                model_config={"directory": str(export), "step": step},
                signature=signature,
                pip_requirements=[f"{library}=={metadata.version(library)}" for library in LIBRARIES],
            )
            self._client.log_artifacts(self.run_id, str(made), folder)


def no_database(uri: str) -> str:
    """Returns a text about an SQLite uri whose path is no database, or ""."""
    if not uri.startswith(SQLITE) or not (database := Path(uri.removeprefix(SQLITE))).exists():
        return ""
    if not database.is_file():
        return f"{database}, a directory, a device or a pipe"
    with database.open("rb") as file:
        begin = file.read(len(SQLITE_BEGIN))
    return f"{database}, a file that is no SQLite database" if begin not in (b"", SQLITE_BEGIN) else ""


def mlflow_name(name: str) -> str:
    """Returns a name that MLflow allows: of letters, digits and `_-./: `, a path that goes downwards only."""
    allowed = re.sub(r"[^\w\-./: ]", "_", name.replace("@", "_at_"))[:NAME_CHARACTERS]
    return "/".join("_" if part in ("", ".", "..") else part for part in allowed.split("/"))[:NAME_CHARACTERS]


def shortened(value: str) -> str:
    """Returns a param that MLflow accepts: a long one ends with a hash of the whole, which keeps it distinct."""
    if len(value) <= PARAM_CHARACTERS:
        return value
    end = f"… sha256:{hashlib.sha256(value.encode()).hexdigest()}"
    return value[: PARAM_CHARACTERS - len(end)] + end


def description(recipe: AnyRecipe) -> dict[str, str]:
    """Returns the properties that runs are compared by, such as {"layout": "TP2 PP1 CP1 EP1 DP1"}."""
    layout = recipe.train.layout.parallel()
    sizes = {"TP": layout.tensor, "PP": layout.pipeline, "CP": layout.context, "EP": layout.expert, "DP": layout.data}
    described = {
        "kind": recipe.kind,
        "layout": " ".join(f"{name}{size}" for name, size in sizes.items()),
        "device": " ".join(filter(None, (recipe.cluster.device, recipe.cluster.gpu))),
        "model": recipe.model.path,
    }
    if recipe.kind == "grpo":
        algorithm = recipe.algorithm
        described |= {
            "schedule": recipe.schedule.kind,
            "algorithm": f"{algorithm.advantage.name} {algorithm.loss.name} {algorithm.aggregation.name}",
            "engine": recipe.rollout.engine,
        }
    return described


def environment_tags(environment: Mapping[str, Any]) -> dict[str, str]:
    """Returns environment.json as tags; git's as mlflow's own UI shows it."""
    git, host = environment.get("git") or {}, environment.get("host") or {}
    libraries = environment.get("libraries") or {}
    return {
        "mlflow.source.name": str(environment.get("command") or ""),
        "mlflow.source.git.commit": str(git.get("commit") or ""),
        "git.modified": str(git.get("modified", "")),
        "host": str(host.get("name") or ""),
        "gpus": ", ".join(environment.get("gpus") or ()),
        "python": str(environment.get("python") or ""),
        **{f"version.{name}": str(version) for name, version in libraries.items() if version},
    }

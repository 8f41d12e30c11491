"""A run in MLflow: params, tags, metrics by step, traces, files, data and the model. track/behind.py calls it.

A server that is killed or slow may carry out a request without a response. So a retry sends the same values, times
included, and MLflow's stores keep them once; a unique tag finds the run again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import posixpath
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from megagrpo.errors import Problem
from megagrpo.recipe import schema
from megagrpo.recipe.schema import AnyRecipe
from megagrpo.track.delivered import Delivered, place
from megagrpo.track.jsonl import read_json
from megagrpo.track.metric_lines import Line, MetricLines
from megagrpo.track.mlflow_model import log_model
from megagrpo.track.sink import RunStart, Status

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

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
FILES = ("recipe*.yaml", "environment*.json", "data.json", "plan.json", "report.html")
RUN_TAG, STEP_TAG, TRACES_TAG = "megagrpo.run", "megagrpo.step", "megagrpo.traces_step"
STATUSES: dict[Status, str] = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
REQUESTS = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "30", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}
"""Defaults for the environment: mlflow's own timeout is minutes, and the thread retries by itself."""


class MLflowRemote:
    """One run on a tracking server, created, or found again. Methods raise the errors of mlflow and its store."""

    def __init__(self, run: RunStart, settings: schema.MLflowConfig, delivered: Delivered, *, live: bool) -> None:
        """Sets up mlflow. live: the run is running; else it has ended, and the rest is sent."""
        quiet_settings = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true"}
        for name, value in {**quiet_settings, **REQUESTS}.items():
            os.environ.setdefault(name, value)  # read when mlflow is imported, or at each request
        for quiet in ("alembic", "mlflow.store", "mlflow.system_metrics", "mlflow.pyfunc"):
            logging.getLogger(quiet).setLevel(logging.ERROR)
        self._run, self._settings, self._delivered, self._live = run, settings, delivered, live
        self._uri = tracking_uri(run.recipe)
        self._place = place("mlflow", self._uri)
        self._lines = MetricLines(run.directory / "metrics.jsonl", after=-1)
        self._connected = False
        self._traces_asked = time.monotonic()
        self._monitor: Any = None
        self.brought = 0
        """Steps sent."""

    def bring(self) -> None:
        connected, self._connected = self._connected, False
        if not connected:
            self._connect()
        if self._live:
            self._watch_system()
        self._bring_metrics()
        self._bring_traces(ended=not self._live)
        self._bring_data()
        self._bring_files()
        self._connected = True

    def rewind(self, step: int) -> None:
        """Reads metrics.jsonl anew. MLflow keeps its values of these steps: it can remove none."""
        self._lines.again(self._lines.after)

    def finish(self, status: Status) -> None:
        export = self._run.directory / "hugging_face"
        self._bring_traces(ended=True)
        if self._monitor:
            self._monitor.finish()
        if self._live or self._client.get_run(self.run_id).info.status != STATUSES[status]:
            self._client.set_terminated(self.run_id, STATUSES[status])
        # Last: a server may have no registry.
        if self._settings.registered_model and export.is_dir():
            model = log_model(self._client, self.run_id, export, self._settings.registered_model, self._delivered.run)
            self._delivered.note(self._place, model_version=model)

    # --- the run ------------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        from mlflow.tracking import MlflowClient

        self._client: MlflowClient = MlflowClient(self._uri)
        run = self._found() or self._created()
        self.run_id = run.info.run_id
        self._delivered.note(self._place, run_id=self.run_id)
        self._experiment_id = run.info.experiment_id
        if self._live:
            if run.info.status != "RUNNING":
                self._client.update_run(self.run_id, status="RUNNING")
            self._end_those_before()
        tags = run.data.tags
        wanted = self._tags()
        for name, value in wanted.items():
            if tags.get(name) != value:
                self._client.set_tag(self.run_id, name, value)
        self._log_params(run.data.params)
        self._lines.again(int(tags.get(STEP_TAG, -1)))
        self._traces_step = int(tags.get(TRACES_TAG, -1))
        self._drop_known_lines()

    def _end_those_before(self) -> None:
        """Ends runs that a process, killed before its first checkpoint, has left as running."""
        from mlflow.exceptions import MlflowException

        for run_id in self._delivered.left(self._place):
            try:
                if run_id != self.run_id and self._client.get_run(run_id).info.status == "RUNNING":
                    self._client.set_terminated(run_id, STATUSES["interrupted"])
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise

    def _found(self) -> Run | None:
        """Returns the run that track.json or a checkpoint names, or that has this run's tag."""
        from mlflow.exceptions import MlflowException

        named = [self._delivered.of(self._place).get("run_id"), self._run.run_ids.get("mlflow")]
        for run_id in filter(None, named):
            try:
                return self._client.get_run(run_id)
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
        experiment = self._client.get_experiment_by_name(self._settings.experiment)
        runs = [] if experiment is None else self._runs_of(experiment.experiment_id)
        return runs[0] if runs else None

    def _created(self) -> Run:
        experiment = self._client.get_experiment_by_name(self._settings.experiment)
        experiment_id = experiment.experiment_id if experiment else self._new_experiment()
        begun, tags = int(self._delivered.begun_seconds * 1000), {RUN_TAG: self._delivered.run}
        self._client.create_run(experiment_id, start_time=begun, run_name=self._run.recipe.name, tags=tags)
        # A server that was slow may have made one before, for a request that was given up.
        first, *others = self._runs_of(experiment_id)
        for other in others:
            self._client.delete_run(other.info.run_id)
        return first

    def _runs_of(self, experiment_id: str) -> list[Run]:
        asked = f"tags.`{RUN_TAG}` = '{self._delivered.run}'"
        return sorted(self._client.search_runs([experiment_id], asked), key=lambda run: str(run.info.run_id))

    def _new_experiment(self) -> str:
        # By default sqlite's is mlruns/ in whatever the current directory is.
        server = self._settings.uri or os.environ.get("MLFLOW_TRACKING_URI")
        local = None if server else (Path(self._run.recipe.track.directory).resolve() / "mlruns").as_uri()
        return str(self._client.create_experiment(self._settings.experiment, artifact_location=local))

    def _watch_system(self) -> None:
        """Starts mlflow's own thread that logs system/...; a failed request ends it, and it is restarted."""
        if not self._settings.system_metrics or (self._monitor and not self._monitor.ended):
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
        run, number = self._run, self._delivered.first_start
        tags = {RUN_TAG: self._delivered.run, "run_directory": str(run.directory.absolute())}
        tags |= description(run.recipe)
        tags |= environment_tags(read_json(run.directory / f"environment.{number}.json"))
        if run.changed:  # parameters cannot change: they stay those of the first start
            tags[run.label] = "\n".join(run.changed)
        return {mlflow_name(name): value[:TAG_CHARACTERS] for name, value in tags.items() if value}

    def _log_params(self, known: Mapping[str, str]) -> None:
        from mlflow.entities import Param

        first = self._run.directory / f"recipe.{self._delivered.first_start}.yaml"
        leaves = flat(yaml.safe_load(first.read_text(encoding="utf-8")))
        params = {mlflow_name(key): shortened(value) for key, value in leaves.items()}
        missing = [Param(key, value) for key, value in params.items() if key not in known]
        for start in range(0, len(missing), PARAMS_PER_CALL):
            self._client.log_batch(self.run_id, params=missing[start : start + PARAMS_PER_CALL])

    # --- metrics ------------------------------------------------------------------------------------------------------

    def _drop_known_lines(self) -> None:
        """Skips lines that the server has beyond the step of its tag. It stores all values of a step or none."""
        steps: dict[str, set[int]] = {}
        while lines := self._lines.ahead():
            line = lines[0]
            name = mlflow_name(list(line.metrics)[-1]) if line.metrics else ""
            if name and name not in steps:
                history = self._client.get_metric_history(self.run_id, name)
                steps[name] = {metric.step for metric in history}
            if name and line.step not in steps[name]:
                return
            self._lines.take(1)

    def _bring_metrics(self) -> None:
        from mlflow.entities import Metric, RunTag

        while lines := self._lines.ahead():
            count, points = 0, list[Metric]()
            for line in lines:
                if count and len(points) + len(line.metrics) > METRICS_PER_CALL:
                    break
                count, points = count + 1, [*points, *(Metric(*point) for point in _points(line))]
            step = lines[count - 1].step
            for start in range(0, len(points) - METRICS_PER_CALL, METRICS_PER_CALL):  # where a step has so many
                self._client.log_batch(self.run_id, metrics=points[start : start + METRICS_PER_CALL])
            rest = points[(len(points) - 1) // METRICS_PER_CALL * METRICS_PER_CALL :]
            self._client.log_batch(self.run_id, metrics=rest, tags=[RunTag(STEP_TAG, str(step))])
            self._lines.take(count)
            self.brought += count
            self._delivered.note(self._place, step=step)

    # --- what else the run has ----------------------------------------------------------------------------------------

    def _bring_traces(self, *, ended: bool) -> None:
        """Sends the traces of the next steps: as many as TRACES_SHARE allows since the last call, and all if the run
        has ended."""
        from megagrpo.track.mlflow_traces import log_traces  # imports pyarrow
        from megagrpo.track.rollout_files import rollout_file, steps_between

        count, known = self._settings.traces_per_step, (self._experiment_id, self.run_id, self._delivered.run)
        if not count or not self._run.recipe.track.rollouts:
            return
        now = time.monotonic()
        share, self._traces_asked = (now - self._traces_asked) * TRACES_SHARE, now
        until = math.inf if ended else time.thread_time() + share
        for step in steps_between(self._run.directory, self._traces_step, self._lines.after):
            if time.thread_time() > until:
                return
            path = rollout_file(self._run.directory, step)
            try:
                log_traces(self._uri, *known, path, count)
            except FileNotFoundError:
                if path.exists():
                    raise
                return  # a rewind has removed it meanwhile: the run repeats the step
            self._client.set_tag(self.run_id, TRACES_TAG, str(step))
            self._traces_step = step
            self._delivered.note(self._place, traces_step=step)

    def _bring_data(self) -> None:
        """Sends the data that the run trains and evaluates on, with digests, as MLflow's dataset inputs."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        sections = read_json(self._run.directory / "data.json")
        digests = {name: str(section.get("digest")) for name, section in sections.items()}
        if not digests or self._delivered.of(self._place).get("data") == digests:
            return
        inputs = []
        for name, section in sections.items():
            source = json.dumps([file["path"] for file in section["files"]])
            profile = json.dumps({"num_rows": section["items"]})
            data = Dataset(f"{self._run.recipe.name} {name}", digests[name][:36], "local", source, profile=profile)
            used_for = "training" if name == "train" else "evaluation"
            inputs.append(DatasetInput(data, [InputTag("mlflow.data.context", used_for)]))
        self._client.log_inputs(self.run_id, inputs)
        self._delivered.note(self._place, data=digests)

    def _bring_files(self) -> None:
        """Sends the files that have changed since they were last sent."""
        known = dict(self._delivered.of(self._place).get("files", {}))
        for path, folder in self._files():
            stat, name = path.stat(), posixpath.join(folder, path.name)
            state = f"{stat.st_size} {stat.st_mtime_ns}"
            if known.get(name) != state:
                self._client.log_artifact(self.run_id, str(path), folder or None)
                known[name] = state
                self._delivered.note(self._place, files=dict(known))

    def _files(self) -> Iterator[tuple[Path, str]]:
        """Yields each file with its folder among the artifacts."""
        directory = self._run.directory
        for pattern in FILES:
            yield from ((path, "") for path in sorted(directory.glob(pattern)))
        for path in sorted((directory / "hugging_face").glob("*")):
            if path.is_file() and not path.name.endswith(WEIGHTS) and path.stat().st_size <= ARTIFACT_BYTES_MAX:
                yield path, "hugging_face"


def tracking_uri(recipe: AnyRecipe) -> str:
    """Returns the recipe's server, that of MLFLOW_TRACKING_URI, or the sqlite file in track.directory."""
    uri = recipe.track.mlflow.uri if recipe.track.mlflow else None
    return (
        uri
        or os.environ.get("MLFLOW_TRACKING_URI")
        or f"sqlite:///{(Path(recipe.track.directory) / 'mlflow.db').resolve()}"
    )


def database_problems(where: str, uri: str) -> Iterator[Problem]:
    """Yields a problem if the path of an SQLite uri is no database: MLflow would retry for 100 seconds."""
    if not uri.startswith(SQLITE) or not (database := Path(uri.removeprefix(SQLITE))).exists():
        return
    given = "" if database.is_file() else "a directory, a device or a pipe"
    if not given:
        with database.open("rb") as file:
            begin = file.read(len(SQLITE_BEGIN))
        given = "a file that is no SQLite database" if begin not in (b"", SQLITE_BEGIN) else ""
    if given:
        yield Problem(where, f"{database}, {given}", "a database, or none yet", "remove it, or name another")


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


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Flattens nested values to {"train.layout.tensor": "2"}; lists of mappings are numbered."""
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
    if isinstance(recipe, schema.Recipe):
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


def _points(line: Line) -> Iterator[tuple[str, float, int, int]]:
    for name, value in line.metrics.items():
        yield mlflow_name(name), value, int(line.seconds * 1000), line.step

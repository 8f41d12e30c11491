"""A run in MLflow: in sqlite, and on a real server that is slow, killed or full."""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml
from mlflow.entities import Run
from mlflow.exceptions import MlflowException
from mlflow.store.tracking.rest_store import RestStore
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor
from mlflow.tracking import MlflowClient
from mlflow.utils.credentials import get_default_host_creds

from megagrpo.cli import main
from megagrpo.processes.ports import free_port
from megagrpo.recipe.defaults import checkpoint_directory
from megagrpo.recipe.schema import Recipe
from megagrpo.track.mlflow import MLflow, MLflowConfig, mlflow_name
from megagrpo.track.rollout_files import rollout_steps
from megagrpo.track.status import only_process_of
from megagrpo.track.tracked_run import Delivered
from megagrpo.track.tracker import Tracker
from tests.mlflow_server import MlflowServer
from tests.small_disk import small_disk
from tests.tiny_run import CONFIG, tracked_recipe
from tests.tracker_thread import trackers_in_thread
from tests.unit.test_track_rollouts import TOKENIZER, group


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    trackers_in_thread(monkeypatch)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    with MlflowServer(tmp_path_factory.mktemp("server")) as started:
        yield started


def tracking_uri(recipe: Recipe) -> str:
    return MLflow.server(getattr(recipe.track, "mlflow") or MLflowConfig(), recipe)  # noqa: B009


@cache
def empty_database() -> bytes:
    """MLflow's file in sqlite before the first run: MLflow takes a second to make its tables."""
    with TemporaryDirectory() as directory:
        SqlAlchemyStore(f"sqlite:///{directory}/mlflow.db", directory)
        return Path(directory, "mlflow.db").read_bytes()


def recipe_of(directory: Path, uri: str | None = None, **track: Any) -> Recipe:
    """Without a server's address, the file in sqlite is there."""
    if not (uri or (directory / "runs").exists()):
        (directory / "runs").mkdir()
        (directory / "runs" / "mlflow.db").write_bytes(empty_database())
    settings = {"uri": uri, "experiment": directory.name, "system_metrics": False}
    return tracked_recipe(directory, mlflow=settings, **track)


def with_settings(recipe: Recipe, **settings: Any) -> Recipe:
    assert recipe.track.mlflow
    mlflow = recipe.track.mlflow.model_copy(update=settings)
    return recipe.model_copy(update={"track": recipe.track.model_copy(update={"mlflow": mlflow})})


def log(tracker: Tracker, steps: range) -> None:
    for step in steps:
        tracker.rollouts(step, {"train": [group("82", "1+1", name=f"p{step}")]}, step)
        tracker.log(step, {"eval/sums/mean@1": step / 10, "seconds/step": 1.0, "grad_norm": math.inf})


def lines(directory: Path) -> dict[int, dict[str, Any]]:
    read = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line for line in read}


def the_run(client: MlflowClient, experiment: str) -> Run:
    """The only one."""
    found = client.get_experiment_by_name(experiment)
    assert found
    (run,) = client.search_runs([found.experiment_id])
    return run


def brought(uri: str, experiment: str) -> tuple[Any, ...]:
    """All that a server has of the only run of an experiment."""
    client = MlflowClient(uri)
    run = the_run(client, experiment)
    points = {name: client.get_metric_history(run.info.run_id, name) for name in sorted(run.data.metrics)}
    histories = {name: [(p.step, p.timestamp, str(p.value)) for p in found] for name, found in points.items()}
    traces = client.search_traces(locations=[run.info.experiment_id], max_results=500)
    spans = sorted((trace.info.trace_id, len(trace.data.spans), len(trace.info.assessments)) for trace in traces)
    artifacts = sorted(file.path for file in client.list_artifacts(run.info.run_id))
    return run.info.status, run.info.end_time, run.data.params, run.data.tags, histories, spans, artifacts


def check_each_step_once(uri: str, experiment: str, directory: Path) -> None:
    """Every value of metrics.jsonl, once, with its time; and the traces of each step."""
    _, _, _, _, histories, spans, _ = brought(uri, experiment)
    entries = lines(directory)
    for name in {name for line in entries.values() for name in line} - {"step", "time"}:
        wanted = [
            (step, int(line["time"] * 1000), str(math.nan if line[name] is None else line[name]))
            for step, line in sorted(entries.items())
            if name in line
        ]
        assert sorted(histories[mlflow_name(name)]) == wanted
    kept = rollout_steps(directory)  # a writer that is slower than these steps leaves some out
    assert kept
    assert len(spans) == 2 * len(kept)


# --- in sqlite --------------------------------------------------------------------------------------------------------


def test_a_resumed_run_goes_on_in_the_same_mlflow_run_with_each_step_once(tmp_path: Path) -> None:
    recipe, directory = recipe_of(tmp_path), tmp_path / "runs" / "adder"
    with Tracker(recipe, 10, tokenizer=TOKENIZER) as tracker:
        log(tracker, range(1, 5))
    first = dict(tracker.run_ids)
    changed = ("train.optimizer.lr: 1.0 -> 0.5",)
    with Tracker(recipe, 10, 2, first, tokenizer=TOKENIZER, changed=changed) as tracker:
        log(tracker, range(3, 7))
        tracker.rewind(4, unlogged=False)
        log(tracker, range(5, 9))
    assert tracker.run_ids == first
    assert sorted(lines(directory)) == list(range(1, 9))

    client = MlflowClient(tracking_uri(recipe))
    run = the_run(client, tmp_path.name)
    assert (run.info.run_id, run.info.status) == (first["mlflow"], "FINISHED")
    assert run.data.params["rollout.prompts_per_step"] == "4"
    assert run.data.tags["start_2_after_step_2"] == changed[0]
    assert (run.data.tags["layout"], run.data.tags["schedule"]) == ("TP1 PP1 CP1 EP1 DP1", "sync")
    assert run.data.tags["version.torch"]
    _, _, _, _, histories, spans, artifacts = brought(tracking_uri(recipe), tmp_path.name)
    assert [step for step, _, _ in histories["eval/sums/mean_at_1"]] == list(range(1, 9))
    assert len(spans) == 2 * len(rollout_steps(directory))
    assert {"recipe.yaml", "recipe.1.yaml", "recipe.2.yaml", "environment.json"} <= set(artifacts)
    assert (tmp_path / "runs" / "mlruns").is_dir()


def test_a_run_that_starts_anew_is_another_mlflow_run_and_ends_one_that_was_killed(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    with Tracker(recipe, 10) as tracker:
        tracker.log(1, {"reward/mean": 0.5})
    client, killed = MlflowClient(tracking_uri(recipe)), tracker.run_ids["mlflow"]
    client.update_run(killed, status="RUNNING")  # as after SIGKILL
    with Tracker(recipe, 10) as tracker:
        tracker.log(1, {"reward/mean": 0.5})
    assert tracker.run_ids["mlflow"] != killed
    assert client.get_run(killed).info.status == "KILLED"
    assert client.get_run(tracker.run_ids["mlflow"]).info.status == "FINISHED"


@pytest.mark.parametrize("count", [1000, 2500])
def test_a_store_that_fails_inside_a_step_gets_all_of_its_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    calls, store = list[int](), SqlAlchemyStore.log_batch

    def log_batch(self: Any, run_id: str, metrics: Any, params: Any, tags: Any) -> None:
        if metrics:
            calls.append(len(metrics))
            if len(calls) == 2:
                raise MlflowException("killed")
        store(self, run_id, metrics, params, tags)

    monkeypatch.setattr(SqlAlchemyStore, "log_batch", log_batch)
    recipe = recipe_of(tmp_path)
    with Tracker(recipe, 10) as tracker:
        tracker.log(1, {f"reward/part_{number}": float(number) for number in range(count)})
    assert len(calls) > 2
    found = the_run(MlflowClient(tracking_uri(recipe)), tmp_path.name).data.metrics
    assert {name: found[name] for name in found if name.startswith("reward/")} == {
        f"reward/part_{number}": float(number) for number in range(count)
    }


def test_a_store_without_a_registry_has_the_run_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any, **__: Any) -> None:
        raise MlflowException("no registry")

    monkeypatch.setattr(MlflowClient, "create_registered_model", none)
    recipe = with_settings(recipe_of(tmp_path), registered_model="adder")
    with Tracker(recipe, 10) as tracker:
        tracker.log(1, {"reward/mean": 0.5})
        (exported := tmp_path / "runs" / "adder" / "hugging_face").mkdir()
        (exported / "config.json").write_text(json.dumps(CONFIG))
    assert the_run(MlflowClient(tracking_uri(recipe)), tmp_path.name).info.status == "FINISHED"


def test_what_could_not_be_noted_is_noted_again(tmp_path: Path) -> None:
    delivered = Delivered(tmp_path, anew=True)
    with small_disk(8), pytest.raises(OSError):
        delivered.note("mlflow", step=3)
    assert delivered.of("mlflow") == {}
    delivered.note("mlflow", step=3)
    assert Delivered(tmp_path).of("mlflow") == {"step": 3}


def test_whatever_fails_is_said_once_and_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[str]()
    monkeypatch.setattr(Tracker, "say", lambda self, line: said.append(line))
    with Tracker(recipe_of(tmp_path, "unknown-scheme://nowhere"), 10) as tracker:
        log(tracker, range(1, 4))
    assert tracker.run_ids == {}
    assert len([line for line in said if "training continues" in line]) == 1
    assert any("megagrpo track sync" in line for line in said)
    assert sorted(lines(tmp_path / "runs" / "adder")) == [1, 2, 3]


@pytest.mark.soak
def test_system_metrics_are_logged_while_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.1")
    failures, publish = list[str](), SystemMetricsMonitor.publish_metrics

    def fails_once(self: Any, metrics: Any) -> None:
        if not failures:
            failures.append("a server that starts again")
            raise MlflowException(failures[0])
        publish(self, metrics)

    monkeypatch.setattr(SystemMetricsMonitor, "publish_metrics", fails_once)
    recipe = with_settings(recipe_of(tmp_path), system_metrics=True)
    client, step = MlflowClient(tracking_uri(recipe)), 0
    with Tracker(recipe, 10) as tracker:
        while not (run_id := tracker.run_ids.get("mlflow")) or not any(
            name.startswith("system/") for name in client.get_run(run_id).data.metrics
        ):
            step += 1
            tracker.log(step, {"reward/mean": 0.5})
            time.sleep(0.1)
    assert failures
    assert "system/cpu_utilization_percentage" in client.get_run(run_id).data.metrics


# --- on a server ------------------------------------------------------------------------------------------------------


def sync(directory: Path, *arguments: str) -> int:
    return main(["track", "sync", str(directory), *arguments])


@pytest.mark.long
def test_what_is_synced_to_another_server_is_there_once(tmp_path: Path, server: MlflowServer) -> None:
    directory = tmp_path / "runs" / "adder"
    with Tracker(tracked_recipe(tmp_path), 10, tokenizer=TOKENIZER) as tracker:  # without MLflow
        log(tracker, range(3))
    experiment = "megagrpo"  # the default
    assert sync(directory, "--mlflow", server.uri) == 0
    check_each_step_once(server.uri, experiment, directory)
    first = brought(server.uri, experiment)
    assert sync(directory, "--mlflow", server.uri) == 0
    assert brought(server.uri, experiment) == first
    # What was known of the server is lost: the run is found by its tag, and nothing comes twice.
    record = json.loads((directory / "track.json").read_text())
    (directory / "track.json").write_text(json.dumps(record | {"trackers": {}}))
    assert sync(directory, "--mlflow", server.uri) == 0
    assert brought(server.uri, experiment) == first


def test_a_database_that_was_deleted_gets_all_steps_again(tmp_path: Path) -> None:
    recipe, directory = recipe_of(tmp_path), tmp_path / "runs" / "adder"
    with Tracker(recipe, 10, tokenizer=TOKENIZER) as tracker:
        log(tracker, range(5))
    first = brought(tracking_uri(recipe), tmp_path.name)
    (tmp_path / "runs" / "mlflow.db").write_bytes(empty_database())
    assert sync(directory) == 0
    check_each_step_once(tracking_uri(recipe), tmp_path.name, directory)
    assert brought(tracking_uri(recipe), tmp_path.name)[-1] == first[-1]


def test_a_run_whose_record_is_lost_is_found_by_its_checkpoint(tmp_path: Path) -> None:
    recipe, directory = recipe_of(tmp_path), tmp_path / "runs" / "adder"
    with Tracker(recipe, 10, tokenizer=TOKENIZER) as tracker:
        log(tracker, range(3))
    saved = checkpoint_directory(recipe) / "step_000002"
    saved.mkdir(parents=True)
    (saved / "trainer.json").write_text(json.dumps({"tracker_runs": tracker.run_ids}))
    (directory / "track.json").write_text('{"id": ')  # cut off
    assert sync(directory) == 0
    assert the_run(MlflowClient(tracking_uri(recipe)), tmp_path.name).info.run_id == tracker.run_ids["mlflow"]
    check_each_step_once(tracking_uri(recipe), tmp_path.name, directory)


def test_a_run_of_another_version_is_synced_without_what_is_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, directory = recipe_of(tmp_path), tmp_path / "runs" / "adder"
    with Tracker(tracked_recipe(tmp_path), 10) as tracker:
        tracker.log(1, {"reward/mean": 0.5})
    written = yaml.safe_load((directory / "recipe.yaml").read_text())
    written["rollouts_per_step"] = written["rollout"]["seen"] = 4
    written["track"]["mlflow"] = {"experiment": tmp_path.name, "colour": "red"}
    (directory / "recipe.yaml").write_text(yaml.safe_dump(written))
    assert sync(directory) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in ("rollouts_per_step", "rollout.seen", "track.mlflow.colour"))
    assert the_run(MlflowClient(tracking_uri(recipe)), tmp_path.name).data.metrics["reward/mean"] == 0.5
    (directory / "recipe.yaml").write_text(yaml.safe_dump(written | {"train": 7}))
    assert sync(directory) == 2


def test_a_run_that_goes_on_is_not_synced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "runs" / "adder"
    with Tracker(tracked_recipe(tmp_path), 10), only_process_of(directory):
        assert sync(directory) == 2
    assert "already going on" in capsys.readouterr().err
    assert sync(tmp_path) == 2
    assert sync(directory, "--mlflow", f"sqlite:///{tmp_path}") == 3
    assert "a directory" in capsys.readouterr().err


def test_a_server_that_stands_still_delays_no_step_and_gets_everything(tmp_path: Path, server: MlflowServer) -> None:
    recipe = recipe_of(tmp_path, server.uri)
    with Tracker(recipe, 10, tokenizer=TOKENIZER) as tracker:
        log(tracker, range(2))
        while "mlflow" not in tracker.run_ids:
            time.sleep(0.1)
        server.signal(signal.SIGSTOP)
        try:
            log(tracker, range(2, 20))  # would not end if a step waited
            assert sorted(lines(tmp_path / "runs" / "adder")) == list(range(20))
        finally:
            server.signal(signal.SIGCONT)
    check_each_step_once(server.uri, tmp_path.name, tmp_path / "runs" / "adder")


@pytest.mark.long
def test_a_server_that_is_killed_half_way_gets_the_rest_by_sync_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "runs" / "adder"
    with MlflowServer(tmp_path) as server:
        with Tracker(recipe_of(tmp_path, server.uri), 10, tokenizer=TOKENIZER) as tracker:
            log(tracker, range(5))
            while Delivered(directory).of(f"mlflow {server.uri}").get("step", -1) < 2:
                time.sleep(0.1)
            server.kill()
            # mlflow keeps the answer: as when the server is killed while a trace is brought, the first of a process.
            RestStore._get_server_version.cache_clear()
            assert RestStore._get_server_version(get_default_host_creds(server.uri)) is None
            log(tracker, range(5, 12))
        assert sync(directory) == 3
        assert "a tracker that takes the run" in capsys.readouterr().err
        server.start()
        assert sync(directory) == 0
        check_each_step_once(server.uri, tmp_path.name, directory)
        first = brought(server.uri, tmp_path.name)
        assert first[0] == "FINISHED"
        assert sync(directory) == 0
        assert brought(server.uri, tmp_path.name) == first


def test_a_full_disk_for_artifacts_loses_nothing(tmp_path: Path) -> None:
    """sqlite and artifacts are full at first; the run's own files are not."""
    recipe, directory = recipe_of(tmp_path), tmp_path / "runs" / "adder"
    (tmp_path / "runs" / "mlflow.db").unlink()
    with small_disk(16 * 2**10), Tracker(recipe, 10, tokenizer=TOKENIZER) as tracker:
        log(tracker, range(8))
    assert sorted(lines(directory)) == list(range(8))
    assert sync(directory) == 0
    check_each_step_once(tracking_uri(recipe), tmp_path.name, directory)
    first = brought(tracking_uri(recipe), tmp_path.name)
    assert sync(directory) == 0
    assert brought(tracking_uri(recipe), tmp_path.name) == first


def test_traces_that_a_run_has_no_time_for_come_at_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megagrpo.track.mlflow.TRACES_SHARE", 0.0)
    recipe = recipe_of(tmp_path)
    with Tracker(recipe, 10, tokenizer=TOKENIZER) as tracker:
        log(tracker, range(3))
    check_each_step_once(tracking_uri(recipe), tmp_path.name, tmp_path / "runs" / "adder")


def test_an_exported_model_is_a_version_in_the_registry_that_answers(
    tmp_path: Path, server: MlflowServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.pyfunc import load_model
    from transformers import Qwen2Config, Qwen2ForCausalLM

    recipe, directory = recipe_of(tmp_path, server.uri), tmp_path / "runs" / "adder"
    recipe = with_settings(recipe, registered_model="adder")
    with Tracker(recipe, 10) as tracker:
        tracker.log(1, {"reward/mean": 0.5})
        shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = Qwen2Config(vocab_size=len(TOKENIZER), num_key_value_heads=2, **shape)
        Qwen2ForCausalLM(config).save_pretrained(directory / "hugging_face")
        TOKENIZER.save_pretrained(directory / "hugging_face")
        (directory / "hugging_face" / "megagrpo.json").write_text('{"run": "adder", "step": 1}')
    client = MlflowClient(server.uri)
    (version,) = client.search_model_versions("name = 'adder'")
    assert (version.run_id, version.tags["megagrpo.step"]) == (tracker.run_ids["mlflow"], "1")
    names = [file.path for file in client.list_artifacts(version.run_id, "hugging_face")]
    assert "hugging_face/config.json" in names
    assert not any(name.endswith("safetensors") for name in names)
    assert sync(directory) == 0
    assert len(client.search_model_versions("name = 'adder'")) == 1

    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    model = load_model(f"models:/adder/{version.version}")
    assert "prompt" in str(model.metadata.signature)
    (answer,) = model.predict([{"prompt": "1+1="}], params={"max_new_tokens": 2})
    assert isinstance(answer, str)

    (directory / "hugging_face" / "megagrpo.json").write_text('{"run": "adder", "step": 2}')  # trained longer
    assert sync(directory) == 0
    newer, older = client.search_model_versions("name = 'adder'", order_by=["version_number DESC"])
    assert newer.tags["megagrpo.step"] == "2"
    load_model(f"models:/adder/{newer.version}")
    with pytest.raises(ValueError, match="step 1"):
        load_model(f"models:/adder/{older.version}")


def test_a_password_in_the_environment_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    address = f"http://me:s3cret@127.0.0.1:{free_port('127.0.0.1')}"  # where none answers
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    recipe, directory = recipe_of(tmp_path, console="lines"), tmp_path / "runs" / "adder"
    with Tracker(recipe, 10) as tracker:
        tracker.log(1, {"reward/mean": 0.5})
    assert sync(directory) == 3
    said = capsys.readouterr()
    assert "training continues" in said.out
    assert "s3cret" not in said.out + said.err
    assert not [path for path in directory.rglob("*") if path.is_file() and b"s3cret" in path.read_bytes()]

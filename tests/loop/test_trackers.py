"""Real runs whose MLflow server dies half-way, or has a full disk."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from megagrpo.track.mlflow import mlflow_name
from tests.loop import small_run
from tests.mlflow_server import MlflowServer
from tests.small_disk import FullDisk


@pytest.mark.long
def test_a_run_whose_tracker_is_killed_ends_as_any_other_and_sync_leaves_the_same_numbers_once(
    inputs: Path, tmp_path: Path
) -> None:
    values = small_run.recipe(inputs, tmp_path)
    values["train"]["total_steps"] = 12
    directory = tmp_path / values["name"]
    with MlflowServer(tmp_path) as server:
        values["track"] |= {"mlflow": {"uri": server.uri, "traces_per_step": 2}, "tensorboard": True}
        process = small_run.start(small_run.write(values, tmp_path))
        while process.poll() is None and '"step"' not in brought(directory):
            time.sleep(0.1)
        server.kill()
        printed = small_run.end(process)
        assert f"megagrpo track sync {directory}" in printed
        metrics = small_run.metrics(directory)
        assert sorted(metrics) == list(range(13))
        server.start()
        check_synced(directory, server, metrics, steps=12)


@pytest.mark.long
def test_a_run_whose_trackers_disk_is_full_loses_nothing_and_sync_leaves_the_same_numbers_once(
    inputs: Path, tmp_path: Path
) -> None:
    values = small_run.recipe(inputs, tmp_path)
    directory = tmp_path / values["name"]
    with FullDisk(tmp_path / "artifacts") as disk, MlflowServer(tmp_path) as server:
        values["track"] |= {"mlflow": {"uri": server.uri, "traces_per_step": 2}, "tensorboard": True}
        printed = small_run.end(small_run.start(small_run.write(values, tmp_path)))
        assert "training goes on" in printed
        assert f"megagrpo track sync {directory}" in printed
        assert (directory / "hugging_face" / "config.json").exists()
        metrics = small_run.metrics(directory)
        assert sorted(metrics) == list(range(small_run.STEPS + 1))
        disk.make_room()
        check_synced(directory, server, metrics, steps=small_run.STEPS)


def check_synced(directory: Path, server: MlflowServer, metrics: dict[int, dict[str, float]], steps: int) -> None:
    """Brings what is left, twice."""
    for _ in range(2):
        synced = small_run.end(small_run.start(Path("sync"), str(directory), command="track"))
        assert synced.count("it has everything") == 2
        check(MlflowClient(server.uri), metrics, steps)


def brought(directory: Path) -> str:
    """What track.json says of MLflow."""
    path = directory / "track.json"
    trackers = json.loads(path.read_text())["trackers"] if path.exists() else {}
    return json.dumps([known for name, known in trackers.items() if name.startswith("mlflow")])


def check(client: MlflowClient, metrics: dict[int, dict[str, float]], steps: int) -> None:
    experiment = client.get_experiment_by_name("megagrpo")
    assert experiment
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.inputs.dataset_inputs
    for name in {name for entry in metrics.values() for name in entry} - {"step", "time"}:
        wanted = {step: entry[name] for step, entry in metrics.items() if name in entry}
        history = client.get_metric_history(run.info.run_id, mlflow_name(name))
        found = {point.step: None if math.isnan(point.value) else point.value for point in history}
        assert (len(history), found) == (len(wanted), wanted), name
    traces = client.search_traces(locations=[experiment.experiment_id], max_results=500)
    assert len(traces) == 2 * steps
    assert {span.name for span in traces[0].data.spans} >= {"response", "share_of_digits"}
    names = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert {"recipe.yaml", "environment.json", "data.json", "report.html", "hugging_face"} <= names

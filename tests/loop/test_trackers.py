"""A real run whose MLflow server dies half-way."""

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
        for _ in range(2):
            synced = small_run.end(small_run.start(Path("sync"), str(directory), command="track"))
            assert synced.count("it has everything") == 2
            check(MlflowClient(server.uri), metrics)


def brought(directory: Path) -> str:
    """What track.json says of MLflow."""
    path = directory / "track.json"
    trackers = json.loads(path.read_text())["trackers"] if path.exists() else {}
    return json.dumps([known for name, known in trackers.items() if name.startswith("mlflow")])


def check(client: MlflowClient, metrics: dict[int, dict[str, float | None]]) -> None:
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
    assert len(traces) == 2 * 12
    assert {span.name for span in traces[0].data.spans} >= {"response", "share_of_digits"}
    names = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert {"recipe.yaml", "environment.json", "data.json", "hugging_face"} <= names

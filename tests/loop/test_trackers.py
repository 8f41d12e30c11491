"""Real runs whose MLflow server dies half-way, or whose MLflow has a full disk."""

from __future__ import annotations

import json
import math
import signal
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from mlflow.tracking import MlflowClient
from transformers import Qwen2ForCausalLM

from megagrpo.checkpoint.store import damage
from megagrpo.track.mlflow import mlflow_name
from megagrpo.track.rollout_files import rollout_files
from tests.loop import small_run
from tests.mlflow_server import MlflowServer
from tests.small_disk import MountedDisk


@pytest.mark.soak
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
        check_synced(directory, server.uri, metrics, steps=12)


@pytest.mark.soak
def test_a_run_whose_servers_artifacts_have_a_full_disk_loses_nothing_and_sync_leaves_the_same_numbers_once(
    inputs: Path, tmp_path: Path
) -> None:
    values = small_run.recipe(inputs, tmp_path)
    directory = tmp_path / values["name"]
    with MountedDisk(tmp_path / "artifacts") as disk, MlflowServer(tmp_path) as server:
        disk.fill()
        values["track"] |= {"mlflow": {"uri": server.uri, "traces_per_step": 2}, "tensorboard": True}
        printed = small_run.end(small_run.start(small_run.write(values, tmp_path)))
        check_kept(directory, printed, steps=small_run.STEPS)
        disk.make_room()
        check_synced(directory, server.uri, small_run.metrics(directory), steps=small_run.STEPS)


@pytest.mark.soak
@pytest.mark.parametrize("half_way", [False, True])
def test_a_run_whose_mlflow_database_has_a_full_disk_loses_nothing_and_sync_leaves_the_same_numbers_once(
    half_way: bool, inputs: Path, tmp_path: Path
) -> None:
    values = small_run.recipe(inputs, tmp_path)
    values["train"]["total_steps"] = 12
    directory, small = tmp_path / values["name"], tmp_path / "disk"
    uri = f"sqlite:///{small}/mlflow.db"
    with MountedDisk(small) as disk:
        MlflowClient(uri).create_experiment("megagrpo", artifact_location=(small / "mlruns").as_uri())
        values["track"] |= {"mlflow": {"uri": uri, "traces_per_step": 2}, "tensorboard": True}
        recipe = small_run.write(values, tmp_path)
        if half_way:
            process = small_run.start(recipe)
            metrics = directory / "metrics.jsonl"
            small_run.wait_until(lambda: metrics.exists() and metrics.stat().st_size > 0, "a step", process=process)
            process.send_signal(signal.SIGSTOP)  # however slow its tracker's process is, it has steps to go
            small_run.wait_until(lambda: '"step"' in brought(directory), "a step is brought", process=process)
            disk.fill()
            process.send_signal(signal.SIGCONT)
        else:
            disk.fill()
            process = small_run.start(recipe)
        check_kept(directory, small_run.end(process), steps=12)
        disk.make_room()
        check_synced(directory, uri, small_run.metrics(directory), steps=12)


def check_kept(directory: Path, printed: str, steps: int) -> None:
    """The run has said what its tracker lacks, and has all of its own files."""
    assert f"megagrpo track sync {directory}" in printed
    assert sorted(small_run.metrics(directory)) == list(range(steps + 1))
    assert [step for step, _ in rollout_files(directory)][-1] == steps
    checkpoints = list((directory / "checkpoints").glob("step_*"))
    assert checkpoints
    assert [damage(checkpoint) for checkpoint in checkpoints] == [[]] * len(checkpoints)
    Qwen2ForCausalLM.from_pretrained(directory / "hugging_face")


def check_synced(directory: Path, uri: str, metrics: dict[int, dict[str, float]], steps: int) -> None:
    """Brings what is left, twice."""
    for _ in range(2):
        synced = small_run.end(small_run.start(Path("sync"), str(directory), command="track"))
        assert synced.count("it has everything") == 2
        check(MlflowClient(uri), directory, metrics, steps)


def brought(directory: Path) -> str:
    """Reads the entry of MLflow in track.json."""
    path = directory / "track.json"
    trackers = json.loads(path.read_text())["trackers"] if path.exists() else {}
    return json.dumps([known for name, known in trackers.items() if name.startswith("mlflow")])


def check(client: MlflowClient, directory: Path, metrics: dict[int, dict[str, float]], steps: int) -> None:
    experiment = client.get_experiment_by_name("megagrpo")
    assert experiment
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
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
    for name in ("recipe.yaml", "environment.json", "data.json", "hugging_face/config.json"):
        with TemporaryDirectory() as downloaded:
            copy = Path(client.download_artifacts(run.info.run_id, name, downloaded))
            assert copy.read_bytes() == (directory / name).read_bytes(), name

"""MLflow's sqlite store, for real, and what happens when it fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

from megagrpo.recipe.schema import Recipe
from megagrpo.track import mlflow
from megagrpo.track.mlflow import MLflowTracker, flat, mlflow_name, tracking_uri
from megagrpo.track.sink import RunStart
from megagrpo.track.tracker import Tracker
from tests.tiny_run import tracked_recipe


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that is slow because the machine is busy does not fail."""
    monkeypatch.setattr(mlflow, "RUN_ID_TIMEOUT_SECONDS", 250.0)
    monkeypatch.setattr(mlflow, "FINISH_TIMEOUT_SECONDS", 250.0)


def run_once(
    recipe: Recipe, directory: Path, steps: range, said: list[str], written: bool = True, **start: object
) -> MLflowTracker:
    """written: the directory has the recipe.yaml that is logged."""
    assert recipe.track.mlflow
    if written:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "recipe.yaml").write_text("name: adder\n")
    tracker = MLflowTracker(recipe.track.mlflow, said.append)
    tracker.start(RunStart(recipe, directory, 10, **start))  # type: ignore[arg-type]
    for step in steps:
        tracker.log(step, {"eval/mean@1": step / 10, "seconds/step": 1.0})
    tracker.finish("finished")
    return tracker


def test_a_resumed_run_goes_on_in_the_same_mlflow_run(tmp_path: Path) -> None:
    recipe, said = tracked_recipe(tmp_path, mlflow={"experiment": "sums"}), list[str]()
    directory = tmp_path / "runs" / "adder"
    first = run_once(recipe, directory, range(1, 5), said)
    assert first.run_id
    (directory / "recipe.2.yaml").write_text("name: adder\n")
    changed, runs = ("train.optimizer.lr: 1.0 -> 0.5",), {"mlflow": first.run_id}
    resumed: dict[str, Any] = {"resumed_step": 2, "run_ids": runs, "number": 2, "changed": changed}
    again = run_once(recipe, directory, range(3, 7), said, **resumed)
    assert again.run_id == first.run_id
    assert said == []

    client = MlflowClient(tracking_uri(recipe))
    run = client.get_run(first.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params["rollout.prompts_per_step"] == "4"
    assert run.data.tags["start_2_after_step_2"] == changed[0]
    assert [file.path for file in client.list_artifacts(first.run_id)] == ["recipe.2.yaml", "recipe.yaml"]
    assert (tmp_path / "runs" / "mlruns").is_dir()
    history = client.get_metric_history(first.run_id, "eval/mean_at_1")
    assert [(point.step, point.value) for point in history] == [(step, step / 10) for step in range(1, 7)]


def test_a_run_that_goes_back_to_a_checkpoint_has_each_step_once_in_the_same_mlflow_run(tmp_path: Path) -> None:
    recipe = tracked_recipe(tmp_path, mlflow={})
    with Tracker(recipe, 10) as tracker:
        for steps, after in ((range(1, 5), 2), (range(3, 7), 6)):
            for step in steps:
                tracker.log(step, {"reward/mean": step / 10, "seconds/step": 1.0})
            tracker.rewind(after, unlogged=False)
    lines = (tmp_path / "runs" / "adder" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 7))
    history = MlflowClient(tracking_uri(recipe)).get_metric_history(tracker.run_ids["mlflow"], "reward/mean")
    assert [(point.step, point.value) for point in history] == [(step, step / 10) for step in range(1, 7)]


@pytest.mark.parametrize("uri", ["unknown-scheme://nowhere", None])
def test_whatever_fails_is_said_once_and_ends_nothing(tmp_path: Path, uri: str | None) -> None:
    said: list[str] = []
    recipe = tracked_recipe(tmp_path, mlflow={"uri": uri})
    tracker = run_once(recipe, tmp_path, range(1, 4), said, written=uri is not None)  # else an OSError in the thread
    assert tracker.errors == 1
    assert tracker.run_id is None
    assert len([line for line in said if "training goes on" in line]) == 1


def test_the_run_is_known_to_a_checkpoint_right_after_the_start(tmp_path: Path) -> None:
    recipe, said = tracked_recipe(tmp_path, mlflow={}), list[str]()
    assert recipe.track.mlflow
    (tmp_path / "recipe.yaml").write_text("name: adder\n")
    tracker = MLflowTracker(recipe.track.mlflow, said.append)
    assert tracker.run_id is None
    tracker.start(RunStart(recipe, tmp_path, 10))
    assert tracker.run_id
    tracker.finish("finished")
    assert said == []


@pytest.mark.parametrize(
    ("name", "allowed"),
    [("eval/mean@1", "eval/mean_at_1"), ("reward/mean", "reward/mean"), ("reward/a+b", "reward/a_b")],
)
def test_names_are_ones_that_mlflow_allows(name: str, allowed: str) -> None:
    assert mlflow_name(name) == allowed


def test_nested_values_become_dotted_names() -> None:
    tree = {"a": {"b": 1, "c": {}}, "d": [{"e": None}, {"e": 2}], "f": [1, 2]}
    assert flat(tree) == {"a.b": "1", "a.c": "{}", "d.0.e": "None", "d.1.e": "2", "f": "[1, 2]"}


def test_the_server_is_the_recipes_or_the_environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tracked_recipe(tmp_path, mlflow={"uri": None})
    assert tracking_uri(recipe).startswith("sqlite:///")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking:5000")
    assert tracking_uri(recipe) == "http://tracking:5000"
    assert tracking_uri(tracked_recipe(tmp_path, mlflow={"uri": "http://ours:1"})) == "http://ours:1"

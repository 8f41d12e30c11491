"""All trackers of a run together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import megagrpo.track.tracker as module
from megagrpo.recipe.load import load
from megagrpo.track.metrics import UndocumentedMetric
from megagrpo.track.tracker import Tracker
from tests.track_recipe import make_recipe


def test_a_run_directory_tells_what_was_run(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    with Tracker(recipe, 10) as tracker:
        tracker.start()
        tracker.log(1, {"reward/mean": 0.5})
    directory = tmp_path / "runs" / "adder"
    assert load(directory / "recipe.yaml").recipe == recipe
    environment = json.loads((directory / "environment.json").read_text())
    assert environment["libraries"]["torch"]
    assert environment["command"]
    assert environment["host"]["cores"]
    if environment["git"] is not None:
        assert len(environment["git"]["commit"]) == 40
    assert json.loads((directory / "metrics.jsonl").read_text())["reward/mean"] == 0.5
    assert (directory / "rollouts.jsonl").exists()


def test_a_metric_without_an_entry_is_an_error_in_tests_and_logged_elsewhere(tmp_path: Path) -> None:
    tracker = Tracker(make_recipe(tmp_path), 10)
    tracker.start()
    with pytest.raises(UndocumentedMetric, match="rewards/mean"):
        tracker.log(1, {"rewards/mean": 0.5})
    tracker.log(1, {"rewards/mean": 0.5})  # said once
    assert "rewards/mean" in (tmp_path / "runs" / "adder" / "metrics.jsonl").read_text()


@pytest.mark.parametrize(
    ("raised", "status"), [(None, "finished"), (ValueError, "failed"), (KeyboardInterrupt, "interrupted")]
)
def test_leaving_tells_every_tracker_how_the_run_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: type[BaseException] | None, status: str
) -> None:
    told: list[str] = []
    monkeypatch.setattr(module.JsonlMetrics, "finish", lambda self, status: told.append(status))

    def run() -> None:
        with Tracker(make_recipe(tmp_path), 10) as tracker:
            tracker.start()
            if raised:
                raise raised

    if raised:
        with pytest.raises(raised):
            run()
    else:
        run()
    assert told == [status]


def test_a_tracker_that_was_not_started_ends_quietly(tmp_path: Path) -> None:
    with Tracker(make_recipe(tmp_path), 10):
        pass
    assert not (tmp_path / "runs").exists()


def test_the_last_lines_say_how_to_look_and_how_to_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Tracker(make_recipe(tmp_path, console="lines", mlflow={}), 10) as tracker:
        tracker.start()
    said = capsys.readouterr().out
    assert str(tmp_path / "runs" / "adder") in said
    assert f"mlflow ui --backend-store-uri sqlite:///{tmp_path}/runs/mlflow.db" in said
    assert "the same command continues" in said

"""TensorBoard, Weights & Biases and Prometheus, with their own packages: what they read back is what was logged."""

from __future__ import annotations

import json
import math
import os
import re
import socket
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from megagrpo.cli import main
from megagrpo.errors import EXIT_USER_ERROR, MachineError
from megagrpo.processes.ports import free_port
from megagrpo.track import follower
from megagrpo.track.follower import MetricLines
from megagrpo.track.metrics import documented, prometheus_name
from megagrpo.track.status import read_status
from megagrpo.track.tracked_run import Delivered
from megagrpo.track.tracker import Tracker
from tests.small_disk import small_disk
from tests.terminal import Terminal
from tests.tiny_run import tracked_recipe
from tests.tracker_thread import FollowerThread, trackers_in_thread
from tests.unit.test_track_rollouts import TOKENIZER, group
from tools.grafana import PANELS, dashboard, query

REPOSITORY = Path(__file__).resolve().parents[2]
SCRAPED = yaml.safe_load((REPOSITORY / "grafana" / "prometheus.yml").read_text())


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    trackers_in_thread(monkeypatch)
    monkeypatch.setenv("WANDB_MODE", "offline")


def log(tracker: Tracker, steps: range, since: float = 0.0) -> None:
    for step in steps:
        tracker.rollouts(step, {"train": [group("82", "1+1", name=f"p{step}")]}, step)
        tracker.log(step, {"reward/mean": since + step / 8, "seconds/step": 1.0})


# --- TensorBoard ------------------------------------------------------------------------------------------------------


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """Reads scalars as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(directory / "tensorboard"), size_guidance={"scalars": 0})
    read.Reload()
    return {name: [(e.step, e.value) for e in read.Scalars(name)] for name in read.Tags()["scalars"]}


def test_tensorboard_shows_each_step_once_as_it_was_logged_last(tmp_path: Path) -> None:
    recipe, directory = tracked_recipe(tmp_path, tensorboard=True), tmp_path / "runs" / "adder"
    with Tracker(recipe, 10) as tracker:
        log(tracker, range(5))
    changed = ("train.optimizer.lr: 1.0 -> 0.5",)
    with Tracker(recipe, 10, 2, changed=changed) as tracker:
        log(tracker, range(3, 6), since=1.0)
        tracker.rewind(4, unlogged=False)
        log(tracker, range(5, 7), since=2.0)
    wanted = [(0, 0.0), (1, 0.125), (2, 0.25), (3, 1.375), (4, 1.5), (5, 2.625), (6, 2.75)]
    assert scalars(directory)["reward/mean"] == wanted
    assert scalars(directory)["seconds/step"] == [(step, 1.0) for step in range(7)]


def test_tensorboards_full_disk_ends_nothing_and_sync_brings_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, directory = tracked_recipe(tmp_path, tensorboard=True, console="lines"), tmp_path / "runs" / "adder"
    with Tracker(recipe, 10) as tracker:
        log(tracker, range(2))
    many = {f"reward/part_{number}": 1.0 for number in range(100)}
    with small_disk(5000), Tracker(recipe, 10, 1) as tracker:
        for step in range(2, 4):
            tracker.log(step, {"reward/mean": step / 8, **(many if step == 2 else {})})
    assert "megagrpo track sync" in capsys.readouterr().out
    for _ in range(2):
        assert main(["track", "sync", str(directory)]) == 0
        assert scalars(directory)["reward/mean"] == [(step, step / 8) for step in range(4)]
        assert scalars(directory)["reward/part_99"] == [(2, 1.0)]


# --- a run that is complete, or goes back -----------------------------------------------------------------------------


@pytest.mark.parametrize("tracker", ["mlflow", "wandb"])
def test_files_of_samples_that_vanish_once_they_were_found_are_no_fault_of_a_tracker(
    tmp_path: Path, tracker: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = "megagrpo.track.rollout_files.steps_between"
    monkeypatch.setattr(found, lambda directory, after, last: list(range(max(0, after + 1), last + 1)))
    recipe = tracked_recipe(tmp_path, console="lines", **{tracker: {}})
    with Tracker(recipe, 10) as run:
        for step in range(4):
            run.log(step, {"reward/mean": step / 8})
    said = capsys.readouterr().out
    assert "step 3/10" in said
    assert "warning" not in said
    assert "megagrpo track sync" not in said


def test_a_complete_run_leaves_trackers_alone_that_have_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def starts(*changed: str) -> int:
        """Counts the starts of the trackers' process by the same command."""
        counted, start = list[FollowerThread](), follower.started_process
        with monkeypatch.context() as patched:
            patched.setattr(follower, "started_process", lambda run: counted.append(start(run)) or counted[-1])
            with Tracker(recipe, 2, 2, changed=changed, complete=True):
                pass
        return len(counted)

    recipe = tracked_recipe(tmp_path, tensorboard=True)
    with Tracker(recipe, 2) as tracker:
        log(tracker, range(3))
    assert starts() == 0
    assert starts("track.tensorboard: false -> true") == 1
    assert starts() == 0
    Delivered(tmp_path / "runs" / "adder").write(whole=False)  # it was killed, or a tracker was gone
    assert starts() == 1
    assert starts() == 0


# --- Weights & Biases -------------------------------------------------------------------------------------------------


def history(directory: Path) -> list[dict[str, Any]]:
    """The rows in the files that wandb keeps for an upload, in order."""
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    rows = []
    for path in sorted((directory / "wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        store = DataStore()
        store.open_for_scan(str(path))
        while (data := store.scan_data()) is not None:
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows


def test_wandb_gets_each_step_once_and_a_table_of_samples_in_one_run(tmp_path: Path) -> None:
    recipe, directory = tracked_recipe(tmp_path, wandb={"samples_per_step": 1}), tmp_path / "runs" / "adder"
    with Tracker(recipe, 10, tokenizer=TOKENIZER) as tracker:
        log(tracker, range(3))
    first = dict(tracker.run_ids)
    with Tracker(recipe, 10, 1, first, tokenizer=TOKENIZER) as tracker:
        log(tracker, range(2, 5))
    assert tracker.run_ids == first
    found = [(row["_step"], row["reward/mean"]) for row in history(directory) if "reward/mean" in row]
    assert found == [(step, step / 8) for step in range(5)]
    tables = [json.loads(path.read_text()) for path in (directory / "wandb").rglob("samples_*.table.json")]
    rows = [dict(zip(table["columns"], row, strict=True)) for table in tables for row in table["data"]]
    assert sorted(row["step"] for row in rows) == list(range(5))
    assert {(row["response"], row["score"], row["answer"]) for row in rows} == {("82", 1.0, "82")}
    before = sorted(path.name for path in (directory / "wandb").iterdir())
    assert main(["track", "sync", str(directory)]) == 0
    assert sorted(path.name for path in (directory / "wandb").iterdir()) == before


def test_wandb_without_a_key_asks_nothing_on_the_terminal(tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
import pytest
from tests.tiny_run import tracked_recipe
from tests.tracker_thread import trackers_in_patient_process
from megagrpo.track.tracker import Tracker
trackers_in_patient_process(pytest.MonkeyPatch())
with Tracker(tracked_recipe(Path(sys.argv[1]), wandb={}, console="lines"), 10) as tracker:
    tracker.log(1, {"reward/mean": 0.5})
"""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    own = {"HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc"), "WANDB_BASE_URL": "http://127.0.0.1:9"}
    terminal = Terminal([sys.executable, "-c", script, str(tmp_path)], kept | own)
    drawn = terminal.end()
    assert "No API key" in drawn
    assert "megagrpo track sync" in drawn
    assert "Enter your choice" not in drawn


def test_sync_says_which_samples_wandb_cannot_get_any_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, directory = tracked_recipe(tmp_path, wandb={"samples_per_step": 1}), tmp_path / "runs" / "adder"
    with Tracker(recipe, 10, tokenizer=TOKENIZER) as tracker:
        log(tracker, range(1, 4))
    record = json.loads((directory / "track.json").read_text())
    record["trackers"]["wandb"]["samples_step"] = 1  # as if its process had been killed
    (directory / "track.json").write_text(json.dumps(record))
    assert main(["track", "sync", str(directory)]) == 0
    assert "2 steps" in capsys.readouterr().out


def test_sync_refuses_metrics_of_which_no_line_can_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, directory = tracked_recipe(tmp_path, tensorboard=True), tmp_path / "runs" / "adder"
    with Tracker(recipe, 10, tokenizer=TOKENIZER) as tracker:
        log(tracker, range(1, 4))
    (directory / "metrics.jsonl").write_bytes(b"\xff\xfe\n" * 3)
    assert main(["track", "sync", str(directory)]) == EXIT_USER_ERROR
    assert "metrics.jsonl" in capsys.readouterr().err


# --- Prometheus -------------------------------------------------------------------------------------------------------


def scraped(port: int) -> dict[str, tuple[str, float]]:
    """Help and value of each gauge with the label of the run."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    assert all(
        family.type == "gauge" and sample.labels == {"run": "adder"} for family in families for sample in family.samples
    )
    return {family.name: (family.documentation, family.samples[0].value) for family in families}


def listening(port: int) -> list[str]:
    """Inodes of the sockets that listen there."""
    lines = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
    return [line[9] for line in lines if line[1].endswith(f":{port:04X}") and line[3] == "0A"]


def test_prometheus_scrapes_the_last_steps_metrics_with_their_meaning(tmp_path: Path) -> None:
    port = free_port("127.0.0.1")
    with Tracker(tracked_recipe(tmp_path, prometheus_port=port), 10) as tracker:
        tracker.log(0, {"eval/sums/mean@1": 0.25})
        tracker.log(1, {"reward/mean": 0.5, "grad_norm": math.nan})
        found = scraped(port)
        assert found["megagrpo_reward_mean"][1] == 0.5
        assert "rewards" in found["megagrpo_reward_mean"][0]
        assert found["megagrpo_eval_sums_mean_at_1"][1] == 0.25
        assert math.isnan(found["megagrpo_grad_norm"][1])
        assert found["megagrpo_step"][1] == 1
        before = listening(port)
        tracker.rewind(0, unlogged=False)
        assert listening(port) == before  # in between another process could have taken it
        tracker.log(1, {"reward/mean": 0.75})
        assert scraped(port)["megagrpo_reward_mean"][1] == 0.75
    with pytest.raises(OSError):
        scraped(port)


def test_a_port_that_is_taken_is_an_error_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(MachineError, match="prometheus_port"):
            Tracker(tracked_recipe(tmp_path, prometheus_port=port), 10)
    assert read_status(tmp_path / "runs" / "adder") is None


@given(st.text(max_size=50))
def test_any_name_becomes_one_that_prometheus_allows(name: str) -> None:
    made = prometheus_name(name)
    assert made.startswith("megagrpo_")
    assert all(letter.isascii() and (letter.isalnum() or letter == "_") for letter in made)


# --- files as trackers read them --------------------------------------------------------------------------------------


def test_lines_are_read_as_they_come_whole_and_again_from_a_new_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines, new = MetricLines(path), lambda line: line.step > 0
    assert not lines.read(new)
    written = [json.dumps({"step": step, "time": 1.5, "a": step, "b": None}) + "\n" for step in range(4)]
    path.write_text("".join(written[:2]) + "no JSON\n" + written[2][:9])
    (one,) = lines.read(new)
    assert (one.step, one.seconds, one.metrics["a"]) == (1, 1.5, 1.0)
    assert math.isnan(one.metrics["b"])
    with path.open("a") as file:
        file.write(written[2][9:])
    assert [line.step for line in lines.read(new)] == [2]
    assert not lines.read(new)
    begun = tmp_path / "begun"
    begun.write_text("".join(written[:3]))
    begun.replace(path)
    assert [line.step for line in lines.read(new)] == [1, 2]
    lines.rewind()
    assert [line.step for line in lines.read(lambda line: True)] == [0, 1, 2]


def test_few_lines_are_held_however_many_there_are(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step, "time": 0}) + "\n" for step in range(1000)))
    lines, seen = MetricLines(path), list[int]()
    while read := lines.read(lambda line: True):
        assert len(read) <= 256
        seen += [line.step for line in read]
    assert seen == list(range(1000))


def test_the_configuration_scrapes_the_port_and_ray_that_the_page_shows() -> None:
    jobs = {job["job_name"]: job["static_configs"][0]["targets"] for job in SCRAPED["scrape_configs"]}
    page = (REPOSITORY / "docs" / "tracking.md").read_text()
    for job, setting in (("megagrpo", "prometheus_port: "), ("ray", "--metrics-export-port=")):
        assert {f"{setting}{target.rpartition(':')[2]}" in page for target in jobs[job]} == {True}


def test_the_dashboard_is_that_of_the_script_and_shows_metrics_that_there_are() -> None:
    written = json.loads((REPOSITORY / "grafana" / "megagrpo.json").read_text())
    assert written == dashboard(), "run python -m tools.grafana > grafana/megagrpo.json"
    shown = {name for panel in PANELS for name in panel.metrics}
    assert shown <= {metric.name for metric in documented()}
    assert re.fullmatch(re.search('"(.*?)"', query("eval/{set}/mean@{k}"))[1], prometheus_name("eval/a/b/mean@16"))
    assert "megagrpo_seconds_rollout" in json.dumps(written)

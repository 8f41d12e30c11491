"""Files that a run writes to its directory, through interruptions, the table of metrics, and the terminal."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from megagrpo.errors import MachineError
from megagrpo.progress import clock
from megagrpo.recipe.load import load, load_any
from megagrpo.track.console import (
    LiveConsole,
    Pace,
    PlainConsole,
    entries,
    make_console,
    summary_of,
)
from megagrpo.track.jsonl import StepLines
from megagrpo.track.metrics import UndocumentedMetric, documented, undocumented
from megagrpo.track.status import only_process_of, read_status
from megagrpo.track.tracker import Tracker
from tests.small_disk import MountedDisk
from tests.tiny_run import CONFIG, tracked_recipe
from tools.metric_docs import written


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_metrics(directory: Path, resumed_step: int, steps: range) -> list[int]:
    """The steps in metrics.jsonl after a run, continued after `resumed_step`, logged these; it is still open."""
    written = StepLines(directory / "metrics.jsonl", resumed_step, print)
    for step in steps:
        written.append({"step": step, "reward/mean": step / 10})
    return [line["step"] for line in lines(directory / "metrics.jsonl")]


def test_a_run_has_one_line_per_step_whenever_it_is_killed_or_starts_anew(tmp_path: Path) -> None:
    assert write_metrics(tmp_path, 0, range(6)) == list(range(6))
    assert write_metrics(tmp_path, 3, range(4, 8)) == list(range(8)), "its checkpoint was of step 3"
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rew')
    assert write_metrics(tmp_path, 7, range(8, 9)) == list(range(9)), "a line cut off by the kill is dropped"
    assert write_metrics(tmp_path, 0, range(2)) == [0, 1]


def test_lines_that_cannot_be_read_are_set_aside_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_metrics(tmp_path, 0, range(2))
    torn = [b'{"step": 1, "a": "\xff\xfe', b"7\n", b'{"step": "x"}\n', b"[" * 100_000 + b"\n", b'{"step": 1, "rew']
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(torn[0] + b"\n" + b"".join(torn[1:]))
    assert write_metrics(tmp_path, 1, range(2, 3)) == [0, 1, 2]
    aside = tmp_path / "metrics.jsonl.unreadable"
    assert aside.read_bytes().split(b"\n")[0] == torn[0]
    assert aside.read_bytes().count(b"\n") == len(torn)
    assert f"5 lines cannot be read: set aside in {aside}" in capsys.readouterr().out


def test_a_full_disk_is_one_error_and_the_run_continues_once_there_is_room(tmp_path: Path) -> None:
    small = tmp_path / "small"
    with MountedDisk(small, room="64k") as disk:
        written = StepLines(small / "metrics.jsonl", 0, print)
        written.append({"step": 1, "lr": 1.0})
        disk.fill()
        with pytest.raises(MachineError, match=r"metrics.jsonl(.|\n)*No space"):
            written.append({"step": 2, **{f"metric {number}": 1.0 for number in range(1000)}})
        written.close()
        disk.make_room()
        assert write_metrics(small, 1, range(2, 3)) == [1, 2]


@pytest.mark.parametrize("fault", [shutil.rmtree, lambda path: path.rename(path.with_name("elsewhere"))])
def test_a_directory_that_is_taken_away_is_an_error_at_the_next_step_and_at_the_end(tmp_path: Path, fault: Any) -> None:
    run = tmp_path / "run"
    with pytest.raises(MachineError, match=r"lock\n.*renamed, deleted"), only_process_of(run):  # noqa: PT012
        written = StepLines(run / "metrics.jsonl", 0, print)
        written.append({"step": 1, "lr": 1.0})
        fault(run)
        with pytest.raises(MachineError, match=r"metrics.jsonl\n.*renamed, deleted"):
            written.append({"step": 2, "lr": 1.0})


def test_a_run_directory_tells_what_was_run_and_the_last_lines_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tracked_recipe(tmp_path, console="lines")
    with Tracker(recipe, 1) as tracker:
        tracker.log(1, {"reward/mean": 0.5})
    directory = tmp_path / "runs" / "adder"
    assert load(directory / "recipe.yaml").recipe == recipe
    with Tracker(tracked_recipe(tmp_path, console="off"), 10, resumed_step=1):
        assert (directory / "recipe.1.yaml").read_text() != (directory / "recipe.2.yaml").read_text()
        assert (directory / "environment.2.json").exists()
    environment = json.loads((directory / "environment.json").read_text())
    assert environment["libraries"]["torch"]
    assert environment["command"]
    assert environment["host"]["cores"]
    if environment["git"] is not None:
        assert len(environment["git"]["commit"]) == 40
    assert lines(directory / "metrics.jsonl")[0]["reward/mean"] == 0.5
    said = capsys.readouterr().out
    assert str(directory) in said
    status = read_status(directory)
    assert status is not None
    places = summary_of(tracked_recipe(tmp_path, mlflow={}), status).places
    assert places["MLflow"] == f"mlflow ui --backend-store-uri sqlite:///{tmp_path}/runs/mlflow.db"
    assert f"megagrpo train {directory}/recipe.yaml train.total_steps=2\n" in said


def test_only_models_that_megatron_lm_has_parts_for_are_offered_to_it(tmp_path: Path) -> None:
    with Tracker(tracked_recipe(tmp_path), 1) as tracker:
        tracker.log(1, {"reward/mean": 0.5})
    (exported := tmp_path / "runs" / "adder" / "hugging_face").mkdir()
    status = read_status(tmp_path / "runs" / "adder")
    for family, offered in ({"model_type": "qwen2"}, True), ({"model_type": "ernie4_5"}, False):
        (exported / "config.json").write_text(json.dumps(CONFIG | family))
        assert status is not None
        assert ("for Megatron-LM" in summary_of(tracked_recipe(tmp_path), status).after) == offered


def test_what_one_command_prints_is_no_setting_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tracked_recipe(tmp_path, console="lines")
    with Tracker(recipe, 10, console="off") as tracker:
        tracker.log(1, {"reward/mean": 0.5})
    assert capsys.readouterr().out == ""
    assert load_any(tmp_path / "runs" / "adder" / "recipe.yaml").recipe == recipe


def test_a_run_that_never_resumes_does_not_say_that_it_can_be_continued(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ends one half of a run, and a replay."""
    recipe = tracked_recipe(tmp_path, console="lines")
    never = recipe.checkpoint.model_copy(update={"resume": "never"})
    with Tracker(recipe.model_copy(update={"checkpoint": never}), 10):
        pass
    said = capsys.readouterr().out
    assert "run directory" in said
    assert "megagrpo train" not in said


@pytest.mark.parametrize(
    ("raised", "state"), [(None, "finished"), (ValueError, "failed"), (KeyboardInterrupt, "interrupted")]
)
def test_leaving_writes_how_the_run_ended_and_closes_its_files(
    tmp_path: Path, raised: type[BaseException] | None, state: str
) -> None:
    tracker = Tracker(tracked_recipe(tmp_path), 10)
    tracker.__exit__(raised, raised and raised(), None)
    status = read_status(tmp_path / "runs" / "adder")
    assert status is not None
    assert status.state == state
    with pytest.raises(ValueError, match="closed file"):
        tracker.log(1, {"lr": 1.0})


# --- the table of metrics ---------------------------------------------------------------------------------------------


def test_pages_are_what_the_tables_of_metrics_and_rules_say_and_names_are_unique() -> None:
    for page, text in written().items():
        assert page.read_text(encoding="utf-8") == text, "run python -m tools.metric_docs"
    assert len({metric.name for metric in documented()}) == len(documented())


def test_names_that_are_not_in_the_table_are_found() -> None:
    known = [
        "reward/mean",
        "reward/gsm8k",
        "eval/gsm8k/mean@1",
        "eval/all/adder/pass@16",
        "seconds/weight_sync",
        "grad_norm",
    ]
    others = ["rewards/mean", "grad_norms", "eval/mean", "eval/best@4", "seconds/", "xgrad_norm"]
    assert undocumented([*known, *others]) == others


def test_a_metric_without_an_entry_is_an_error_in_tests_and_logged_elsewhere(tmp_path: Path) -> None:
    tracker = Tracker(tracked_recipe(tmp_path), 10)
    with pytest.raises(UndocumentedMetric, match="rewards/mean"):
        tracker.log(1, {"rewards/mean": 0.5})
    tracker.log(1, {"rewards/mean": 0.5})  # warned of once
    assert "rewards/mean" in (tmp_path / "runs" / "adder" / "metrics.jsonl").read_text()


# --- the console, on a real pseudo-terminal and without one -----------------------------------------------------------

STEP = {
    "reward/mean": 0.5, "kl/mean": 0.00123, "grad_norm": 0.75, "response_tokens/mean": 8.5, "tokens_per_second": 4321.0,
    "seconds/step": 0.6, "seconds/rollout": 0.4, "seconds/update": 0.2, "eval/sums/mean@1": 0.912,
}  # fmt: skip
SHOWN = ("0.500", "0.0012", "0.75", "8.5", "4,321", "0.60", "0.912", "rollout", "update")


def test_without_a_terminal_each_step_is_one_line(tmp_path: Path) -> None:
    stream = io.StringIO()
    console = make_console("auto", stream)
    assert isinstance(console, PlainConsole)
    console.start("adder", tmp_path, 10)
    console.log(1, STEP)
    console.log(2, {"reward/mean": 0.25, "reward/errors": 3.0})
    console.finish()
    first, second = stream.getvalue().splitlines()
    assert first.startswith("step 1/10")
    for text in SHOWN:
        assert text in first
    assert "0.250" in second
    assert "errors" not in first
    assert "errors 3" in second
    assert "\x1b" not in stream.getvalue()


def test_on_a_terminal_there_is_a_table_with_bars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("NO_COLOR", raising=False)
    ours, theirs = os.openpty()
    with os.fdopen(theirs, "w") as stream:
        console = make_console("auto", stream)
        assert isinstance(console, LiveConsole)
        console.start("adder", tmp_path, 10, 4)
        console.log(5, STEP)
        console.say("a line that [stays]")
        console.finish()
        stream.flush()
        shown = os.read(ours, 100_000).decode()
    os.close(ours)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    for text in (*SHOWN, "step 5/10", "grad norm", "█", "67%", "a line that [stays]"):
        assert text in plain, text


def test_the_time_left_follows_the_last_steps() -> None:
    pace = Pace(total_steps=100)
    assert pace.seconds_left() is None
    for step in range(11, 41):
        pace.reached(step, now=2.0 * (step - 10), seconds=1.0)
    assert pace.seconds_left() == pytest.approx(2.0 * 60)


def test_the_time_left_does_not_count_the_start() -> None:
    pace = Pace(total_steps=10)
    pace.reached(1, now=702.0, seconds=2.0)  # 700 s after the command
    assert pace.seconds_left() == pytest.approx(2.0 * 9)


def test_failed_rewards_have_a_column_once_there_are_some(tmp_path: Path) -> None:
    console = LiveConsole(io.StringIO())
    console.start("adder", tmp_path, 10)
    console.log(1, STEP | {"reward/errors": 0.0})
    assert "errors" not in entries(STEP | {"reward/errors": 0.0})
    assert entries(STEP | {"critic/explained_variance": 0.5})["critic expl. var."] == "0.50"
    assert "errors" not in headings(console)
    console.log(2, STEP | {"reward/errors": 3.0})
    console.finish()
    assert headings(console)["errors"] == ["", "3"]


def headings(console: LiveConsole) -> dict[str, list[str]]:
    return {str(column.header): list(map(str, column.cells)) for column in console._table().columns}


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (90.4, "1:30"), (3700, "1:01:40")])
def test_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text

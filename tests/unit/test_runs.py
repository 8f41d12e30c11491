"""`megagrpo runs` on directories that real processes left, and what a run says at its end."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megagrpo.cli import main
from megagrpo.errors import EXIT_USER_ERROR, EngineError, Problem, RunStopped
from megagrpo.report.text import age, runs_in
from megagrpo.track.console import longer
from megagrpo.track.status import end_state, error_line, has_process, held_out_scores, only_process_of, read_status
from megagrpo.track.tracker import Tracker
from tests.tiny_run import tracked_recipe

ROOT = Path(__file__).parents[2]
LOST = EngineError(Problem("engine 0 died", "killed by SIGKILL\nand more", fix="look at its log"))
RUNNING = """
import sys
from pathlib import Path
from megagrpo.track.tracker import Tracker
from megagrpo.track.status import only_process_of
from tests.tiny_run import tracked_recipe
recipe = tracked_recipe(Path(sys.argv[1])).model_copy(update={"name": sys.argv[2]})
with only_process_of(Path(recipe.track.directory) / recipe.name), Tracker(recipe, 8) as tracker:
    tracker.log(1, {"reward/mean": 0.25, "seconds/step": 2.0})
    print("logged", flush=True)
    sys.stdin.read()
"""


def leave_run(directory: Path, name: str, error: BaseException | None = None, **track: Any) -> Path:
    """A run of four steps, with the error that ended it after the third."""
    recipe = tracked_recipe(directory, **track).model_copy(update={"name": name})
    run = directory / "runs" / name
    with only_process_of(run):
        tracker = Tracker(recipe, 4)
        for step, score in enumerate((0.125, 0.75, 0.5) if error else (0.125, 0.25, 0.75, 0.5), 1):
            tracker.log(step, {"reward/mean": score / 2, "seconds/step": 1.5, "eval/sums/mean@1": score})
        tracker.__exit__(type(error) if error else None, error, None)
    return run


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Runs that finished, failed, were stopped, were killed, go on, and of an earlier version."""
    directory = tmp_path_factory.mktemp("listed")
    leave_run(directory, "finished")
    leave_run(directory, "failed", LOST)
    leave_run(directory, "told", RunStopped(Problem("stopped by SIGTERM")))
    (leave_run(directory, "earlier") / "status.json").unlink()
    started = {
        name: subprocess.Popen(
            [sys.executable, "-c", RUNNING, str(directory), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for name in ("killed", "running")
    }
    for process in started.values():
        assert process.stdout is not None
        assert process.stdout.readline() == "logged\n"
    started["killed"].kill()
    started["killed"].communicate()
    (directory / "runs" / "no_run").mkdir()
    yield directory / "runs"
    started["running"].communicate("")


@pytest.mark.parametrize(
    "content", ['{"state": 1, "total_steps": 2}', '{"state": "failed"}', "[1]", "\\xff", "[" * 10**5]
)
def test_a_damaged_status_is_none(content: str, tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text(content)
    assert read_status(tmp_path) is None


def test_each_run_has_its_state_also_one_whose_process_is_gone(directory: Path, tmp_path: Path) -> None:
    found = {run["name"]: run for run in runs_in(directory)}
    assert {name: run["state"] for name, run in found.items()} == {
        "finished": "finished",
        "failed": "failed",
        "told": "stopped",
        "earlier": "unknown",
        "killed": "lost",
        "running": "running",
    }
    assert [found["finished"][name] for name in ("step", "total_steps")] == [4, 4]
    assert [found["failed"][name] for name in ("step", "reward", "seconds_per_step")] == [3, 0.25, 1.5]
    assert [found["running"][name] for name in ("step", "total_steps", "held_out")] == [1, 8, {}]
    ages = [run["age_seconds"] for run in runs_in(directory)]
    assert ages == sorted(ages), "the newest first"
    assert [run["name"] for run in runs_in(directory / "failed")] == ["failed"]
    torn = leave_run(tmp_path, "torn")
    (torn / "metrics.jsonl").write_text('{"step"\n')
    assert [run["state"] for run in runs_in(torn)] == ["unreadable"]


def test_a_look_at_a_run_does_not_keep_it_from_starting(directory: Path, tmp_path: Path) -> None:
    assert has_process(directory / "running")
    assert not has_process(directory / "finished")
    with only_process_of(tmp_path):
        assert has_process(tmp_path)
    assert not has_process(tmp_path / "nowhere")


def test_the_list_is_a_table_or_json(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", str(directory)]) == 0
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert len([line for line in printed.splitlines() if "/4" in line or "/8" in line]) == 5
    assert "failed: engine error: engine 0 died: killed by SIGKILL\n" in printed
    assert main(["runs", str(directory), "--json"]) == 0
    listed = {run["name"]: run for run in json.loads(capsys.readouterr().out)}
    assert listed["finished"]["held_out"]["sums/mean@1"] == {"last": 0.5, "step": 4, "best": 0.75, "best_step": 3}
    assert listed["failed"]["error"] == "engine error: engine 0 died: killed by SIGKILL"
    assert listed["killed"]["pid"] > 0
    assert main(["runs", str(directory / "nowhere")]) == EXIT_USER_ERROR
    assert main(["runs", str(directory / "no_run")]) == 0


def test_a_status_that_cannot_be_read_costs_no_list(directory: Path, tmp_path: Path) -> None:
    run = leave_run(tmp_path, "damaged")
    for text in ("", "{", "[]", '{"state": 3}', '{"surprise": 1}'):
        (run / "status.json").write_text(text)
        assert [listed["state"] for listed in runs_in(tmp_path / "runs")] == ["unknown"]
    (run / "metrics.jsonl").write_text('{"step": 7, "reward/mean": null, "eval/loss": 1.0}\n{"step": 8, "rew')
    (found,) = runs_in(tmp_path / "runs")
    assert (found["step"], found["reward"], found["held_out"]["loss"]["last"]) == (7, None, 1.0)


def test_a_loss_is_best_where_it_is_least(tmp_path: Path) -> None:
    losses = ((2, 1.5), (4, 0.5), (6, 0.75))
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {step}, "eval/loss": {x}}}\n' for step, x in losses))
    (found,) = held_out_scores(tmp_path)
    assert (found.last_step, found.best, found.best_step) == (6, 0.5, 4)


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (None, "finished"),
        (ValueError("x"), "failed"),
        (LOST, "failed"),
        (KeyboardInterrupt(), "interrupted"),
        (RunStopped(Problem("x")), "stopped"),
        (SystemExit(), "stopped"),
    ],
)
def test_the_state_of_a_run_that_ends(error: BaseException | None, state: str) -> None:
    assert end_state(error) == state
    assert (error_line(error) is None) == (error is None)


def test_status_says_which_process_a_run_has(directory: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    status = read_status(leave_run(tmp_path, "in_slurm"))
    assert status is not None
    assert status.slurm_job == "4711"
    assert status.ended is not None
    assert status.started <= status.ended


# --- the last lines of a run ------------------------------------------------------------------------------------------


def test_the_end_of_a_run_says_its_scores_and_what_to_do_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "runs" / "whole run"  # a name of a directory that shells would part
    for made in ("hugging_face", "checkpoints/step_000002", "checkpoints/step_000004", "checkpoints/.saving_step_9"):
        (run / made).mkdir(parents=True)
    leave_run(tmp_path, "whole run", console="lines")
    printed = capsys.readouterr().out
    assert "4 of 4 steps" in printed
    assert "sums/mean@1 0.500 at step 4; best 0.750 at step 3" in printed
    assert f"{run}/checkpoints/step_000004" in printed
    assert f"megagrpo train '{run}/recipe.yaml' train.total_steps=8" in printed
    assert f"megagrpo report '{run}'" in printed


def test_the_end_of_a_failed_run_says_how_to_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = leave_run(tmp_path, "adder", LOST, console="lines")
    printed = capsys.readouterr().out
    assert "failed after" in printed
    assert f"megagrpo train {run}/recipe.yaml\n" in printed
    assert f"{run}/logs" in printed
    assert "engine 0" not in printed, "the command prints the error, once"


def test_a_run_prints_json_for_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tracked_recipe(tmp_path, console="json")
    with Tracker(recipe, 2) as tracker:
        tracker.log(1, {"reward/mean": 0.5, "grad_norm": float("nan")})
        tracker.say("warning: it looks odd")
        tracker.say("starting Ray")
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["event"] for event in events] == ["start", "step", "warning", "message", "end"]
    assert events[1] == {"event": "step", "step": 1, "metrics": {"reward/mean": 0.5, "grad_norm": None}}
    assert events[2]["text"] == "it looks odd"
    assert (events[-1]["state"], events[-1]["step"], events[-1]["total_steps"]) == ("finished", 1, 2)
    assert events[-1]["places"]["run directory"] == str(tmp_path / "runs" / "adder")


def test_an_override_makes_a_run_twice_as_long(tmp_path: Path) -> None:
    recipe = tracked_recipe(tmp_path)
    assert longer(recipe, 10) == "train.total_steps=20"
    epochs = recipe.train.model_copy(update={"total_steps": None, "total_epochs": 1.5})
    assert longer(recipe.model_copy(update={"train": epochs}), 10) == "train.total_epochs=3"


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [[], ["--quiet"], ["--json"], ["--debug"]])
def test_an_error_is_said_once_at_the_end_and_its_place_in_the_code_only_if_asked(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(tmp_path / "absent.yaml"), *flags]) == EXIT_USER_ERROR
    out, err = capsys.readouterr()
    assert err.count("recipe error:") == 1 + (flags == ["--debug"])  # the last line of a traceback has it too
    assert ("Traceback" in err) == (flags == ["--debug"])
    if flags == ["--json"]:
        (event,) = map(json.loads, out.splitlines())
        assert (event["event"], event["exit_code"]) == ("error", EXIT_USER_ERROR)
        assert "absent.yaml" in event["problems"][0]["where"]
    else:
        assert not out


def test_quiet_and_json_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["train", "recipe.yaml", "--quiet", "--json"])
    assert "not allowed" in capsys.readouterr().err


@pytest.mark.parametrize(("seconds", "text"), [(0, "0 s"), (59, "59 s"), (90, "2 min"), (7200, "2 h"), (200000, "2 d")])
def test_ages(seconds: float, text: str) -> None:
    assert age(seconds) == text

"""`megagrpo report` on what a run has written, the threshold, `megagrpo runs`, and the last lines of a run."""

from __future__ import annotations

import json
import math
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megagrpo.algorithm.mismatch import Mismatch, TokenMismatch
from megagrpo.cli import main
from megagrpo.errors import EXIT_USER_ERROR, EngineError, Problem, RunStopped
from megagrpo.recipe import schema
from megagrpo.recipe.schema import Recipe
from megagrpo.recipe.yaml12 import to_text
from megagrpo.report.mismatch import mismatch_report, read_mismatch
from megagrpo.report.text import age, runs_in
from megagrpo.track.console import longer
from megagrpo.track.jsonl import MISMATCH_FILE, MismatchRecord, StepLines, StepProof, WorstToken
from megagrpo.track.status import end_state, error_line, has_process, held_out_scores, only_process_of, read_status
from megagrpo.track.tracker import Tracker
from megagrpo.trainer.batches import Sampled
from megagrpo.trainer.run import Step
from megagrpo.trainer.step_metrics import excess_mismatch, mismatch_record, report_mismatch
from megagrpo.types import Group, Prompt, Sample
from tests.tiny_run import CONFIG, tracked_recipe

TOKEN = WorstToken("sums/3", 2, 5, 11, "12+34=", "4", "6#", -0.25, -2.5, 6)
PROOF = StepProof(640, ((5, 40), (6, 600)), 640, None, None, None, same_bits=True)
WORST = (TOKEN, replace(TOKEN, position=6))
RECORD = MismatchRecord(7, 640, 0.001, 0.02, 2.25, 0.003, 0.0004, 1.01, 0.98, WORST, PROOF)
FIGURES = [field.name for field in fields(Mismatch) if field.name not in ("tokens", "worst")]
FOUND = Mismatch(tokens=9, worst=(), **{name: number / 10 for number, name in enumerate(FIGURES, 1)})


def write(directory: Path, *records: MismatchRecord) -> None:
    traces = StepLines(directory / MISMATCH_FILE, 0, print)
    for record in records:
        traces.append(asdict(record))
    traces.close()


def records(steps: range) -> list[MismatchRecord]:
    """Steps whose worst token is further off the later they are, and lies at the step's own position."""
    return [
        replace(RECORD, step=step, worst=(replace(TOKEN, position=step, rollout_logprob=-float(step)),))
        for step in steps
    ]


# --- the file ---------------------------------------------------------------------------------------------------------


def test_what_is_read_is_what_was_written_and_no_line_that_is_still_being_written(tmp_path: Path) -> None:
    write(tmp_path, RECORD, replace(RECORD, step=8, worst=()))
    with (tmp_path / "mismatch.jsonl").open("a") as file:
        file.write('{"step": 8, "tok')
    assert read_mismatch(tmp_path) == [RECORD, replace(RECORD, step=8, worst=())]


def test_a_number_that_is_not_finite_is_null_and_comes_back_as_nan(tmp_path: Path) -> None:
    write(tmp_path, replace(RECORD, mean=math.nan, max=math.inf, worst=(replace(TOKEN, rollout_logprob=-math.inf),)))
    line = json.loads((tmp_path / "mismatch.jsonl").read_text())
    assert (line["mean"], line["max"], line["worst"][0]["rollout_logprob"]) == (None, None, None)
    (read,) = read_mismatch(tmp_path)
    assert math.isnan(read.max)
    assert math.isnan(read.worst[0].rollout_logprob)


# --- the command ------------------------------------------------------------------------------------------------------


def columns(lines: list[str], heading: str) -> tuple[list[str], list[list[str]]]:
    """Headings and rows of the table that has a column `heading`."""
    start = next(number for number, line in enumerate(lines) if heading in line.split())
    rows = [line.split() for line in lines[start:]]
    end = rows.index([]) if [] in rows else len(rows)
    return rows[0], rows[1:end]


def test_the_report_shows_the_last_steps_and_the_worst_tokens_of_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, *records(range(30, 0, -1)))  # the earliest lines have the largest differences
    assert main(["report", str(tmp_path), "--mismatch", "--steps", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    headings, steps = columns(lines, "ratio_mean")
    assert [row[0] for row in steps] == ["3", "2", "1"]
    assert dict(zip(headings, steps[0], strict=True)) == {
        "step": "3", "tokens": "640", "mean": "0.001", "p99": "0.02", "max": "2.25", "k1": "0.003", "k3": "0.0004",
        "ratio_mean": "1.01", "effective_share": "0.98",
    }  # fmt: skip
    headings, tokens = columns(lines, "difference")
    assert [row[headings.index("step")] for row in tokens] == [str(step) for step in range(30, 20, -1)]
    first = dict(zip(headings, tokens[0], strict=True))
    assert (first["prompt"], first["sample"], first["position"], first["version"]) == ("sums/3", "2", "30", "6")
    assert (first["train"], first["rollout"], first["difference"]) == ("-0.2500", "-30.0000", "29.8")
    assert first["text"] == "12+34=【4】6#"


def test_a_token_is_shown_in_one_line_and_one_that_is_not_a_number_comes_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = replace(TOKEN, prompt_id="\x1b[2J\n", before="a\nb", text="\x1b[31m", after="\t", rollout_logprob=math.nan)
    write(tmp_path, *records(range(1, 3)), replace(RECORD, step=3, worst=(broken,)))
    assert main(["report", str(tmp_path), "--mismatch"]) == 0
    lines = capsys.readouterr().out.splitlines()
    worst = lines[next(number for number, line in enumerate(lines) if "difference" in line.split()) + 1]
    assert "not finite" in worst
    assert r"\x1b[2J\n" in worst
    assert worst.endswith(r"a\nb【\x1b[31m】\t")


@pytest.mark.parametrize(("quantization", "trained"), [(None, None), ("fp8", None), ("fp8", "same_as_rollout")])
def test_the_report_says_what_rounding_in_engines_alone_has_made(
    tmp_path: Path, quantization: str | None, trained: str | None
) -> None:
    recipe = tracked_recipe(tmp_path)
    rollout = recipe.rollout.model_copy(update={"quantization": quantization})
    train = recipe.train.model_copy(update={"quantization": trained})
    recipe = recipe.model_copy(update={"rollout": rollout, "train": train})
    (tmp_path / "recipe.yaml").write_text(to_text(recipe.model_dump(mode="json")))
    write(tmp_path, RECORD)
    report, _ = mismatch_report(tmp_path, 5)
    found = re.search(r"mean\s+(\S+),\s+p99 (\S+), k3 (\S+) ", report)
    assert (found is None) == (quantization is None or trained is not None)
    assert ("computes with the engines' weights" in report) == (trained is not None)
    if found:
        page = (Path(__file__).parents[2] / "docs" / "mismatch.md").read_text()
        mean, p99, k3 = found.groups()
        assert re.search(rf"inputs of products \| {mean} \| {p99} \| \S+ \| {k3} ", page)


def test_what_is_not_a_run_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "absent")]) == EXIT_USER_ERROR
    assert "absent\n      given: no such directory" in capsys.readouterr().err
    assert main(["report", str(tmp_path), "--mismatch"]) == EXIT_USER_ERROR
    assert "mismatch.jsonl\n      given: No such file" in capsys.readouterr().err
    whole = json.dumps(asdict(RECORD))
    garbage = ['{"step": 1}', "\udcff\x00", "[" * 100_000, whole.replace("640", '"640"'), whole.replace('"6#"', "6")]
    for line in (*garbage, whole.replace("2.25", "[]"), whole.replace('"worst": [', '"worst": [7, ')):
        (tmp_path / "mismatch.jsonl").write_bytes(f"{line}\n".encode("utf-8", "surrogateescape"))
        assert main(["report", str(tmp_path), "--mismatch"]) == EXIT_USER_ERROR, line[:80]
        assert "mismatch.jsonl:1" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["report", str(tmp_path), "--mismatch", "--steps", "0"])
    write(tmp_path)
    assert main(["report", str(tmp_path), "--mismatch"]) == 0
    assert "No step has trained" in capsys.readouterr().out
    (tmp_path / "recipe.yaml").write_text("name: sums\nkind: sft\n")
    assert main(["report", str(tmp_path), "--mismatch"]) == 0
    assert "fine-tuning run" in capsys.readouterr().out


def test_a_report_that_nothing_reads_to_its_end_is_no_error(tmp_path: Path) -> None:
    write(tmp_path, *records(range(1, 3000)))
    report = shlex.join(
        [sys.executable, "-m", "megagrpo.cli", "report", str(tmp_path), "--mismatch", "--steps", "3000"]
    )
    command = f"{report} | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=250)
    assert (done.returncode, done.stderr) == (0, "")


# --- from rows to text, and the threshold -----------------------------------------------------------------------------


def test_a_row_and_an_index_become_the_token_with_its_text() -> None:
    def sample(index: int, tokens: list[int], versions: list[int]) -> Sample:
        count = len(tokens)
        return Sample("b", index, np.array(tokens), np.full(count, -1.0), np.array(versions), "stop", "")

    groups = [
        Group(Prompt("a", (1, 2, 3), "x", ""), (sample(0, [9], [0]), sample(1, [], []))),
        Group(Prompt("b", (4, 5), "x", ""), (sample(0, [9, 9], [0, 0]), sample(1, [6, 7, 8], [3, 4, 4]))),
    ]
    found = replace(FOUND, worst=(TokenMismatch(3, 1, -1.5, -2.0),))
    record = mismatch_record(5, found, groups, lambda tokens: "".join(map(str, tokens)))
    (token,) = record.worst
    assert token == WorstToken("b", 1, 1, 7, "456", "7", "8", -1.5, -2.0, 4)
    assert (record.step, record.tokens, record.k3, record.effective_share) == (5, 9, FOUND.k3, FOUND.effective_share)


@pytest.mark.parametrize(("metric", "value"), [("mean", 0.001), ("p99", 0.02), ("max", 2.25), ("k3", 0.0004)])
def test_the_threshold_is_of_the_recipes_metric(metric: str, value: float) -> None:
    def excess(above: float | None) -> object:
        return excess_mismatch(RECORD, schema.MismatchConfig(metric=metric, above=above), Path("runs/x"))

    assert excess(None) is None
    assert excess(value) is None
    said = str(excess(value * 0.99))
    assert f"step 7: logprob_difference/{metric} is {value:.4g}" in said
    assert "'4' after '12+34=', position 5 of sample 2 of prompt sums/3" in said
    assert "train logprob -0.25, rollout logprob -2.5, sampled by weight version 6" in said
    assert f"{value * 0.99:g} (rollout.mismatch.above)" in said
    assert "megagrpo report runs/x" in said
    never = schema.MismatchConfig(metric=metric, above=1e9)
    assert excess_mismatch(replace(RECORD, **{metric: math.nan}), never, Path("runs/x")), "NaN is above any threshold"


@pytest.mark.parametrize(
    ("settings", "ends", "said"),
    [
        ({"above": None}, False, ""),
        ({"above": 0.5}, False, ""),
        ({"above": 0.25, "then": "warn"}, False, "warning: step 5: logprob_difference/max is 0.3"),
        ({"above": 0.25, "then": "stop"}, True, "step 5: logprob_difference/max is 0.3: saving this step"),
    ],
    ids=["no threshold", "below", "warn", "stop"],
)
def test_past_the_threshold_a_run_is_warned_or_ended_and_otherwise_nothing_is_said(
    settings: dict[str, Any], ends: bool, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = tracked_recipe(tmp_path, console="lines").model_dump()
    values["rollout"]["mismatch"] |= {"metric": "max"} | settings
    recipe = Recipe.model_validate(values)
    sample = Sample("a", 0, np.array([4]), np.array([-2.0]), np.array([4]), "stop", "")
    groups = [Group(Prompt("a", (1, 2, 3), "x", ""), (sample,))]
    found = replace(FOUND, worst=(TokenMismatch(0, 0, -1.7, -2.0),))
    done = Step({}, 0, sampled=Sampled(groups, groups), mismatch=found, proof=PROOF)
    with Tracker(recipe, 10) as tracker:
        problem = report_mismatch(recipe, 5, done, tracker, str)
        printed = capsys.readouterr().out
        assert report_mismatch(recipe, 6, Step({}, 0), tracker, str) is None
        assert capsys.readouterr().out == ""
    assert (problem is not None) == ends
    assert said in printed
    assert bool(printed) == bool(said)
    assert [(record.step, record.proof) for record in read_mismatch(tmp_path / "runs" / "adder")] == [(5, PROOF)]


# --- `megagrpo runs`, and what a run says at its end ------------------------------------------------------------------

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
    (run / "hugging_face" / "config.json").write_text(json.dumps(CONFIG))
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

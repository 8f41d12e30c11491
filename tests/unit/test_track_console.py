"""Output to the terminal, on a real pseudo-terminal and without one."""

from __future__ import annotations

import io
import os
import re
from pathlib import Path

import pytest

from megagrpo.progress import clock
from megagrpo.track.console import LiveConsole, Pace, PlainConsole, entries, make_console, phase_seconds, shares

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


def test_phases_leave_the_whole_step_out() -> None:
    assert phase_seconds(STEP) == {"rollout": 0.4, "update": 0.2}
    assert shares({}).row_count == 0


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (90.4, "1:30"), (3700, "1:01:40")])
def test_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text

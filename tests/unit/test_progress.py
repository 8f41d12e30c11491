"""Progress of long work: bars on a real terminal, lines elsewhere, nothing without a display."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path

import pytest

from megagrpo.progress import Bars, Display, Lines, Work, bars, progress, shown_by, usual_display
from tests.terminal import COLOURS, Terminal, plain

ROOT = Path(__file__).parents[2]
WAITING = """
import sys
from megagrpo.progress import progress, shown_by, usual_display
with shown_by(usual_display()), progress("reading prompts.jsonl", 40, "rows") as work:
    work.advance(10)
    print("a line beside it")
    input()
print("the end")
"""
"""Work that lasts until it is told to end."""


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "TERM")}
    return kept | {"PYTHONPATH": str(ROOT)} | more


def begin(**more: str) -> Terminal:
    terminal = Terminal([sys.executable, "-c", WAITING], environment(**more))
    terminal.read_until("10 of 40 rows")
    return terminal


def test_work_that_lasts_has_a_bar_on_a_terminal_which_is_gone_at_its_end() -> None:
    terminal = begin()
    bar = next(line for line in plain(terminal.drawn).splitlines() if "10 of 40 rows" in line)
    assert bar.strip().startswith("reading prompts.jsonl")
    assert "━" in bar
    assert COLOURS.search(terminal.drawn)
    terminal.write("\n")
    drawn = terminal.end()
    assert "a line beside it" in plain(drawn)
    erased = drawn.rindex("\x1b[2K")
    assert "reading" not in drawn[erased:]
    assert "the end" in drawn[erased:]


def test_a_terminal_without_colours_gets_none() -> None:
    terminal = begin(NO_COLOR="1")
    terminal.write("\n")
    assert not {code for code in COLOURS.findall(terminal.end()) if "3" in code or "4" in code}


@pytest.mark.parametrize("more", [{}, {"FORCE_COLOR": "1"}, {"TERM": "dumb"}])
def test_elsewhere_nothing_is_drawn_in_place(more: dict[str, str]) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", WAITING], input="\n", capture_output=True, text=True, env=environment(**more), check=True
    )
    assert ran.stdout == "a line beside it\nthe end\n"
    assert ran.stderr == "", "the work was short"


def test_lines_come_ever_more_seldom_and_only_for_work_that_lasts() -> None:
    said: list[str] = []
    lines = Lines(said.append)
    whole = Work("evaluating", began=0.0)
    part = Work("generating", 40, "responses", done=10, began=0.0, within=whole)
    lines.under_way = (whole, part)
    for second in range(1000):
        lines.look(float(second))
    assert said[0] == "evaluating › generating: 10 of 40 responses, 0:10, 0:30 left"
    seconds = [second for second in range(1000) if any(f", {second // 60}:{second % 60:02}, " in line for line in said)]
    assert seconds[:5] == [10, 20, 40, 80, 160]
    assert {later - earlier for earlier, later in pairwise(seconds[5:])} == {120}
    lines.end(part)
    assert "generating: ended after" in said[-1]
    told = len(said)
    with shown_by(lines), progress("short"):
        pass
    assert len(said) == told
    assert not any("\r" in line or "\x1b" in line for line in said)


def test_work_is_a_part_of_the_work_around_it_in_the_same_thread() -> None:
    with shown_by(Display()) as _, progress("step 3"), progress("generating", 4) as part:
        part.advance()
        beside: list[Work] = []

        def save() -> None:
            with progress("writing") as work:
                beside.append(work)

        thread = threading.Thread(target=save)
        thread.start()
        thread.join()
        assert part.label == "step 3 › generating"
        assert beside[0].label == "writing"
        assert bars([part], part.began).row_count == 1


def test_a_library_shows_nothing_and_the_innermost_display_shows_what_begins_in_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with progress("alone", 2) as work:
        work.advance(2)
    assert (work.done, work.within) == (2, None)
    outer, inner = Display(), Display()
    with shown_by(outer), progress("a"), shown_by(inner), progress("b"), pytest.raises(ValueError, match="x"):  # noqa: PT012
        assert [each.what for each in outer.under_way] == ["a"]
        with progress("c"):
            assert [each.what for each in inner.innermost()] == ["c"]
            raise ValueError("x")
    assert not outer.under_way + inner.under_way
    assert isinstance(usual_display(), Lines)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("work", "figures"),
    [
        (Work("a", began=0.0), "0:05"),
        (Work("a", None, "rows", 1234, began=0.0), "1,234 rows, 0:05"),
        (Work("a", 4, began=0.0), "0 of 4, 0:05"),
        (Work("a", 12e9, "bytes", 8e9, before=4e9, began=0.0), "8.00 of 12.00 GB, 0:05, 0:05 left"),
        (Work("a", 3, "rows", 3, began=0.0), "3 of 3 rows, 0:05"),
        (Work("a", 0, "rows", began=0.0), "0 of 0 rows, 0:05"),
    ],
)
def test_figures(work: Work, figures: str) -> None:
    assert work.figures(5.0) == figures
    assert bars([work], 5.0).row_count == 1


def test_a_display_that_is_closed_ends_its_thread() -> None:
    for display in (Lines(print), Bars()):
        before = threading.active_count()
        with shown_by(display), progress("something"):
            assert threading.active_count() == before + 1
        assert threading.active_count() == before

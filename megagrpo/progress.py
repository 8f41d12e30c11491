"""The progress of long work: `with progress("reading train.parquet", 7473, "rows") as work:`.

Code reports its work at next to no cost. The display that the command has chosen shows it: bars on a terminal, lines
elsewhere, or none. A library that is used by itself shows nothing.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # rich is slow to import
    from rich.live import Live
    from rich.table import Table

SHORT_SECONDS = 0.4
"""Work that is over by then has no bar."""
BAR_LOOK_SECONDS = 0.2
LINE_LOOK_SECONDS = 1.0
FIRST_LINE_SECONDS = 10.0
"""Work that is over by then has no line. The second comes after twice as long, and so on."""
LINE_SECONDS_MAX = 120.0
BAR_CHARACTERS = 24
PACE_SECONDS = 2.0
"""Work that has taken less reports no time left."""


@dataclass(eq=False)
class Work:
    """One piece of work. The code that does it counts `done` up; displays read it at any time."""

    what: str
    total: float | None = None  # None: not known
    unit: str = ""  # such as rows; bytes are shown as GB
    done: float = 0
    before: float = 0  # the amount done before the work began, which does not count for the pace
    began: float = field(default_factory=time.monotonic)
    thread: int = field(default_factory=threading.get_ident)
    within: Work | None = None  # the work of the same thread of which it is a part

    def advance(self, count: float = 1) -> None:
        """Adds `count` to the amount that is done."""
        self.done += count

    @property
    def label(self) -> str:
        """Returns the work's path, such as `evaluating › generating`."""
        return f"{self.within.label} › {self.what}" if self.within else self.what

    def figures(self, now: float) -> str:
        """Returns the work's figures, such as `12 of 40 rows, 0:07, 0:16 left`."""
        seconds, new = now - self.began, self.done - self.before
        parts = [*filter(None, [self._amount()]), clock(seconds)]
        if self.total is not None and 0 < new < self.total - self.before and seconds > PACE_SECONDS:
            parts.append(f"{clock(seconds / new * (self.total - self.done))} left")
        return ", ".join(parts)

    def _amount(self) -> str:
        if self.unit == "bytes":
            return f"{self.done / 1e9:.2f} of {(self.total or 0) / 1e9:.2f} GB"
        if self.total is None:
            return f"{self.done:,.0f} {self.unit}".rstrip() if self.done else ""
        return f"{self.done:,.0f} of {self.total:,.0f} {self.unit}".rstrip()


class Display:
    """A record of the works that are under way. A subclass with `look_seconds` shows them: a thread calls its `look` as
    often, from the first work on."""

    look_seconds: float | None = None

    def __init__(self) -> None:
        self.under_way: tuple[Work, ...] = ()
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, work: Work) -> None:
        with self._lock:
            around = (one for one in reversed(self.under_way) if one.thread == work.thread)
            work.within = next(around, None)
            self.under_way = (*self.under_way, work)
            if self._thread is None and self.look_seconds is not None:
                self._thread = threading.Thread(target=self._look_on, name="progress", daemon=True)
                self._thread.start()

    def end(self, work: Work) -> None:
        with self._lock:
            self.under_way = tuple(one for one in self.under_way if one is not work)

    def innermost(self) -> list[Work]:
        """Returns the works that have no part under way."""
        works = self.under_way
        whole = {work.within for work in works}
        return [work for work in works if work not in whole]

    def look(self, now: float) -> None:
        """Shows the works as they are."""

    def close(self) -> None:
        """Stops the display: it shows nothing any more."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _look_on(self) -> None:
        while not self._closed.wait(self.look_seconds):
            self.look(time.monotonic())


class Lines(Display):
    """A line on work that takes long: after ten seconds, then ever more seldom, and at its end."""

    look_seconds = LINE_LOOK_SECONDS

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__()
        self._say = say
        self._next: dict[Work, float] = {}
        """Seconds of each work at which its next line is due."""

    def look(self, now: float) -> None:
        for work in self.innermost():
            seconds, due = now - work.began, self._next.get(work, FIRST_LINE_SECONDS)
            if seconds >= due:
                self._next[work] = due + min(due, LINE_SECONDS_MAX)
                self._say(f"{work.label}: {work.figures(now)}")

    def end(self, work: Work) -> None:
        super().end(work)
        if self._next.pop(work, None) is not None:
            self._say(f"{work.label}: ended after {clock(time.monotonic() - work.began)}")


class Bars(Display):
    """Bars at the bottom of a terminal, which are gone when the work is done."""

    look_seconds = BAR_LOOK_SECONDS

    def __init__(self) -> None:
        super().__init__()
        self._live: Live | None = None
        self._drawing = threading.Lock()

    def look(self, now: float) -> None:
        with self._drawing:
            if self._live is None and any(now - work.began > SHORT_SECONDS for work in self.under_way):
                self._live = self._begun()
            if self._live is not None:
                self._live.refresh()

    def end(self, work: Work) -> None:
        super().end(work)
        if not self.under_way:
            with self._drawing:
                self._stop()

    def close(self) -> None:
        super().close()
        with self._drawing:
            self._stop()

    def _begun(self) -> Live:
        from rich.console import Console
        from rich.live import Live

        live = Live(
            get_renderable=lambda: bars(self.innermost(), time.monotonic()),
            console=Console(file=sys.stderr),
            auto_refresh=False,
            transient=True,
            # Lines printed meanwhile go above the bars; their stream stays the same.
            redirect_stdout=sys.stdout.isatty(),
        )
        live.start()
        return live

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def bars(works: Sequence[Work], now: float) -> Table:
    """Returns a row for each work: its name, a bar, and its figures."""
    from rich.progress import BarColumn, Progress, TextColumn
    from rich.table import Column

    name = TextColumn("{task.description}", style="none", markup=False)
    figures = TextColumn("{task.fields[figures]}", style="dim", markup=False)
    bar = BarColumn(BAR_CHARACTERS, table_column=Column(width=BAR_CHARACTERS))
    drawn = Progress(name, bar, figures, auto_refresh=False)
    for work in works:
        drawn.add_task(work.label, total=work.total or None, completed=int(work.done), figures=work.figures(now))
    return drawn.make_tasks_table(drawn.tasks)


_displays: list[Display] = []


@contextmanager
def shown_by(display: Display) -> Iterator[None]:
    """Shows the work that begins inside the block on `display`, instead of the display around it."""
    _displays.append(display)
    try:
        yield
    finally:
        _displays.remove(display)
        display.close()


@contextmanager
def progress(what: str, total: float | None = None, unit: str = "", done: float = 0) -> Iterator[Work]:
    """Yields the Work that the block counts up with `advance`; `done` of `total` are done before it begins."""
    work = Work(what, total, unit, done, done)
    if not _displays:
        yield work
        return
    display = _displays[-1]
    display.begin(work)
    try:
        yield work
    finally:
        display.end(work)


def is_terminal(stream: object) -> bool:
    """Returns whether the stream can be drawn on in place. FORCE_COLOR makes colours, not a terminal."""
    isatty = getattr(stream, "isatty", None)
    return bool(isatty and isatty()) and os.environ.get("TERM", "") not in ("dumb", "unknown")


def usual_display() -> Display:
    """Returns bars on standard error, or lines if that is no terminal."""
    if is_terminal(sys.stderr):
        return Bars()
    return Lines(lambda line: print(line, file=sys.stderr, flush=True))


def clock(seconds: float) -> str:
    """Formats seconds: 90.4 as 1:30, 3700 as 1:01:40."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"

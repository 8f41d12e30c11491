"""Progress on the terminal: a live table where there is one, a plain line per step elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Literal, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from megagrpo.track.sink import RunStart, Status

STEPS_SHOWN = 12
STEPS_OF_PACE = 20  # last steps whose pace predicts the time left
BAR_CHARACTERS = 30
REFRESHES_PER_SECOND = 1  # of the elapsed time; more would take time from the run
WHOLE_STEP = "seconds/step"

# heading: (metric, format)
COLUMNS: dict[str, tuple[str, str]] = {
    "reward": ("reward/mean", ".3f"),
    "loss": ("loss/tokens", ".4f"),
    "KL": ("kl/mean", ".2g"),
    "grad norm": ("grad_norm", ".2f"),
    "critic expl. var.": ("critic/explained_variance", ".2f"),
    "response": ("response_tokens/mean", ".1f"),
    "tokens/s": ("tokens_per_second", ",.0f"),
    "s/step": (WHOLE_STEP, ".2f"),
    "errors": ("reward/errors", ".0f"),
}
SHOWN_ABOVE_ZERO = ("errors",)


class Pace:
    """Seconds left, from the wall-clock time of the last steps."""

    def __init__(self, total_steps: int) -> None:
        self._total = total_steps
        self._marks: deque[tuple[int, float]] = deque(maxlen=STEPS_OF_PACE + 1)

    def reached(self, step: int, now: float, seconds: float) -> None:
        """A step is done, and took so long: the first one tells when it began, which is after the start-up."""
        if not self._marks:
            self._marks.append((max(0, step - 1), now - seconds))
        self._marks.append((step, now))

    def seconds_left(self) -> float | None:
        """None before the first step is done."""
        if not self._marks:
            return None
        (first, began), (last, ended) = self._marks[0], self._marks[-1]
        return (ended - began) / (last - first) * (self._total - last) if last > first else None


class PlainConsole:
    """One line per step."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def say(self, line: str) -> None:
        print(line, file=self._stream, flush=True)

    def start(self, run: RunStart) -> None:
        self._total = run.total_steps
        self._pace = Pace(run.total_steps)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._pace.reached(step, time.monotonic(), metrics.get(WHOLE_STEP, 0.0))
        parts = [f"step {step}/{self._total}", *evaluation(metrics)]
        parts += [f"{heading} {text}" for heading, text in entries(metrics).items()]
        if phases := phase_seconds(metrics):
            parts.append(" ".join(f"{name} {seconds:.2f}" for name, seconds in phases.items()))
        if (left := self._pace.seconds_left()) is not None:
            parts.append(f"left {clock(left)}")
        self.say(" · ".join(parts))

    def finish(self, status: Status) -> None:
        pass


class LiveConsole:
    """A table of the last steps, and bars for the phases of the last one, drawn in place."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream)
        self._live: Live | None = None

    def say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def start(self, run: RunStart) -> None:
        self._run, self._began = run, time.monotonic()
        self._pace = Pace(run.total_steps)
        self._steps: deque[tuple[int, Mapping[str, float]]] = deque(maxlen=STEPS_SHOWN)
        self._evaluations: list[str] = []
        self._live = Live(get_renderable=self._picture, console=self._console, refresh_per_second=REFRESHES_PER_SECOND)
        self._live.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._pace.reached(step, time.monotonic(), metrics.get(WHOLE_STEP, 0.0))
        self._evaluations = evaluation(metrics) or self._evaluations
        self._steps.append((step, metrics))
        if self._live:
            self._live.refresh()

    def finish(self, status: Status) -> None:
        if self._live:
            self._live.stop()
            self._live = None

    def _picture(self) -> Group:
        name, elapsed, left = self._run.recipe.name, clock(time.monotonic() - self._began), self._pace.seconds_left()
        if not self._steps:
            return Group(Text(f"{name} · starting · {elapsed}", "bold"))
        step, metrics = self._steps[-1]
        parts = [name, f"step {step}/{self._run.total_steps}", *self._evaluations, elapsed]
        parts += [f"left {clock(left)}"] if left is not None else []
        return Group(Text(" · ".join(parts), "bold"), self._table(), bars(phase_seconds(metrics)))

    def _table(self) -> Table:
        rows = [(step, entries(metrics), evaluation(metrics)) for step, metrics in self._steps]
        shown = [heading for heading in COLUMNS if any(heading in row for _, row, _ in rows)]
        table = Table("step", *shown, "eval", box=None, padding=(0, 2, 0, 0), header_style="dim")
        for column in table.columns:
            column.justify = "right"
        for step, row, scores in rows:
            table.add_row(str(step), *(row.get(heading, "") for heading in shown), " ".join(scores))
        return table


class SilentConsole(PlainConsole):
    """track.console: off."""

    def say(self, line: str) -> None:
        pass


def make_console(mode: Literal["auto", "live", "lines", "off"], stream: TextIO) -> PlainConsole | LiveConsole:
    """`mode` is the recipe's track.console."""
    if mode == "live" or (mode == "auto" and Console(file=stream).is_terminal):
        return LiveConsole(stream)
    return SilentConsole(stream) if mode == "off" else PlainConsole(stream)


def entries(metrics: Mapping[str, float]) -> dict[str, str]:
    """The step's numbers as texts, by heading."""
    return {
        heading: f"{metrics[name]:{form}}"
        for heading, (name, form) in COLUMNS.items()
        if name in metrics and (heading not in SHOWN_ABOVE_ZERO or metrics[name] > 0)
    }


def phase_seconds(metrics: Mapping[str, float]) -> dict[str, float]:
    """Seconds by phase, with evaluation and checkpoint, without the whole step."""
    return {
        name.removeprefix("seconds/"): s
        for name, s in metrics.items()
        if name.startswith("seconds/") and name != WHOLE_STEP
    }


def evaluation(metrics: Mapping[str, float]) -> list[str]:
    """The evaluation's overall scores, such as `mean@1 0.912`, or its loss."""
    shown = ("eval/mean@", "eval/loss")
    scores = {name.removeprefix("eval/"): value for name, value in metrics.items() if name.startswith(shown)}
    return [f"eval {name} {value:.3f}" for name, value in scores.items()]


def bars(phases: Mapping[str, float]) -> Table:
    """One bar per phase, as long as its share of the time."""
    table = Table.grid(padding=(0, 2, 0, 0))
    total = sum(phases.values())
    for name, seconds in phases.items():
        share = seconds / total if total else 0.0
        table.add_row(name, Text("█" * round(share * BAR_CHARACTERS), "cyan"), f"{seconds:.2f} s", f"{share:.0%}")
    return table


def clock(seconds: float) -> str:
    """90.4 as 1:30, 3700 as 1:01:40."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"

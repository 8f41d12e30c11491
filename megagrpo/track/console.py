"""The output of a run: a live table on a terminal, a plain line per step elsewhere, or JSON for programs.

Its last lines are the run's result: its end, held-out scores, the places of its files, and the next commands.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from megagrpo.progress import Display, bars, clock, is_terminal, shown_by
from megagrpo.recipe.defaults import adapter_directory, checkpoint_directory, export_directory, run_directory
from megagrpo.recipe.schema import AnyRecipe, Recipe
from megagrpo.recipe.schema.run import ConsoleMode
from megagrpo.track.jsonl import finite
from megagrpo.track.status import SCORE, HeldOut, RunStatus, held_out_scores, newest_checkpoint
from megagrpo.track.trackers import trackers_of
from megagrpo.weights.families import read_architecture

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
    "from teacher": ("teacher/divergence", ".2g"),
    "grad norm": ("grad_norm", ".2f"),
    "critic expl. var.": ("critic/explained_variance", ".2f"),
    "response": ("response_tokens/mean", ".1f"),
    "turns": ("agent/turns/mean", ".1f"),
    "tokens/s": ("tokens_per_second", ",.0f"),
    "s/step": (WHOLE_STEP, ".2f"),
    "errors": ("reward/errors", ".0f"),
    "agents failed": ("agent/failed", ".0f"),
    "late": ("agent/late", ".0f"),
}
SHOWN_ABOVE_ZERO = ("errors", "agents failed", "late")
EVAL = "eval "
"""Prefix of a score that has no heading."""
WARNING = "warning: "
"""Prefix of a line about a problem that does not end the run."""


class Pace:
    """Seconds left, from the wall-clock time of the last steps."""

    def __init__(self, total_steps: int) -> None:
        self._total = total_steps
        self._marks: deque[tuple[int, float]] = deque(maxlen=STEPS_OF_PACE + 1)

    def reached(self, step: int, now: float, seconds: float) -> None:
        """Records a finished step and its seconds. The first step's mark the start of training, after the start-up."""
        if not self._marks:
            self._marks.append((max(0, step - 1), now - seconds))
        self._marks.append((step, now))

    def seconds_left(self) -> float | None:
        """Returns the seconds left; None before the first step is done."""
        if not self._marks:
            return None
        (first, began), (last, ended) = self._marks[0], self._marks[-1]
        return (ended - began) / (last - first) * (self._total - last) if last > first else None


class PlainConsole:
    """One line per step. Other consoles extend it."""

    def __init__(self, stream: TextIO | None) -> None:
        """Sets the stream; None: standard output at the time of printing."""
        self._stream, self._showing = stream, ExitStack()

    def say(self, line: str) -> None:
        """Prints a line that stays."""
        print(line, file=self._stream, flush=True)

    def start(self, name: str, directory: Path, total_steps: int, after_step: int = 0) -> None:
        """Begins the run, or its continuation after a step."""
        self._name, self._total, self._began = name, total_steps, time.monotonic()
        self._pace = Pace(total_steps)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._pace.reached(step, time.monotonic(), metrics.get(WHOLE_STEP, 0.0))
        parts = [f"step {step}/{self._total}", *evaluation(metrics)]
        parts += [f"{heading} {text}" for heading, text in entries(metrics).items()]
        if phases := phase_seconds(metrics):
            parts.append(" ".join(f"{name} {seconds:.2f}" for name, seconds in phases.items()))
        if (left := self._pace.seconds_left()) is not None:
            parts.append(f"left {clock(left)}")
        self.say(" · ".join(parts))

    def finish(self) -> None:
        self._showing.close()

    def end(self, summary: Summary) -> None:
        """Prints the run's last lines."""
        for line in summary.lines():
            self.say(line)


class LiveConsole(PlainConsole):
    """A table of the last steps, bars for the phases of the last one, and what is under way, drawn in place."""

    def __init__(self, stream: TextIO | None) -> None:
        super().__init__(stream)
        self._console, self._works = Console(file=stream), Display()
        self._live: Live | None = None

    def say(self, line: str) -> None:
        style = "yellow" if line.startswith(WARNING) else None
        self._console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)

    def start(self, name: str, directory: Path, total_steps: int, after_step: int = 0) -> None:
        super().start(name, directory, total_steps, after_step)
        self._steps: deque[tuple[int, Mapping[str, float]]] = deque(maxlen=STEPS_SHOWN)
        self._evaluations: list[str] = []
        self._live = Live(get_renderable=self._picture, console=self._console, refresh_per_second=REFRESHES_PER_SECOND)
        self._live.start()
        self._showing.enter_context(shown_by(self._works))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._pace.reached(step, time.monotonic(), metrics.get(WHOLE_STEP, 0.0))
        self._evaluations = evaluation(metrics) or self._evaluations
        self._steps.append((step, metrics))
        if self._live:
            self._live.refresh()

    def finish(self) -> None:
        super().finish()
        if self._live:
            self._live.stop()
            self._live = None

    def end(self, summary: Summary) -> None:
        first, *others = summary.lines()
        colour = {"finished": "green", "failed": "red"}.get(summary.status.state, "yellow")
        self._console.print(Text(first, f"bold {colour}"), soft_wrap=True)
        for line in others:
            self.say(line)

    def _picture(self) -> Group:
        name, elapsed, left = self._name, clock(time.monotonic() - self._began), self._pace.seconds_left()
        under_way = bars(self._works.innermost(), time.monotonic())
        if not self._steps:
            return Group(Text(f"{name} · starting · {elapsed}", "bold"), under_way)
        step, metrics = self._steps[-1]
        parts = [name, f"step {step}/{self._total}", *self._evaluations, elapsed]
        parts += [f"left {clock(left)}"] if left is not None else []
        title, blank = Text(" · ".join(parts), "bold"), Text("")
        return Group(title, self._table(), blank, shares(phase_seconds(metrics)), blank, under_way)

    def _table(self) -> Table:
        rows = [(step, entries(metrics), evaluation(metrics)) for step, metrics in self._steps]
        shown = [heading for heading in COLUMNS if any(heading in row for _, row, _ in rows)]
        table = Table("step", *shown, "eval", box=None, padding=(0, 2, 0, 0), header_style="dim")
        for column in table.columns:
            column.justify = "right"
        for step, row, scores in rows:
            named = (score.removeprefix(EVAL) for score in scores)
            table.add_row(str(step), *(row.get(heading, "") for heading in shown), ", ".join(named))
        return table


class SilentConsole(PlainConsole):
    """Prints nothing."""

    def say(self, line: str) -> None:
        pass

    def start(self, name: str, directory: Path, total_steps: int, after_step: int = 0) -> None:
        super().start(name, directory, total_steps, after_step)
        self._showing.enter_context(shown_by(Display()))


class JsonConsole(PlainConsole):
    """A JSON object per line, each with its `event` (docs/console.md)."""

    def event(self, event: str, **values: Any) -> None:
        """Prints one event. NaN and infinity become null."""
        line = json.dumps(finite({"event": event, **values}), ensure_ascii=False)
        print(f"{line}\n", end="", file=self._stream, flush=True)  # in one piece: any thread may warn

    def say(self, line: str) -> None:
        warns = line.startswith(WARNING)
        self.event("warning" if warns else "message", text=line.removeprefix(WARNING))

    def start(self, name: str, directory: Path, total_steps: int, after_step: int = 0) -> None:
        self.event("start", name=name, directory=str(directory), after_step=after_step, total_steps=total_steps)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.event("step", step=step, metrics={name: float(value) for name, value in metrics.items()})

    def end(self, summary: Summary) -> None:
        self.event("end", **summary.as_json())


def make_console(mode: ConsoleMode, stream: TextIO | None = None) -> PlainConsole:
    """Returns the console of `mode`, as in track.console. stream: by default standard output."""
    if mode == "live" or (mode == "auto" and is_terminal(stream or sys.stdout)):
        return LiveConsole(stream)
    return {"off": SilentConsole, "json": JsonConsole}.get(mode, PlainConsole)(stream)


def entries(metrics: Mapping[str, float]) -> dict[str, str]:
    """Returns the step's numbers as texts, by heading."""
    return {
        heading: f"{metrics[name]:{form}}"
        for heading, (name, form) in COLUMNS.items()
        if name in metrics and (heading not in SHOWN_ABOVE_ZERO or metrics[name] > 0)
    }


def phase_seconds(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns seconds by phase, with evaluation and checkpoint, without the whole step."""
    return {
        name.removeprefix("seconds/"): s
        for name, s in metrics.items()
        if name.startswith("seconds/") and name != WHOLE_STEP
    }


def evaluation(metrics: Mapping[str, float]) -> list[str]:
    """Returns the mean score of each evaluation set, such as `eval gsm8k/mean@1 0.912`, or the loss."""
    scores = {name.removeprefix("eval/"): value for name, value in metrics.items() if SCORE.fullmatch(name)}
    return [f"{EVAL}{name} {value:.3f}" for name, value in scores.items()]


def shares(phases: Mapping[str, float]) -> Table:
    """Returns a table with one bar per phase, as long as its share of the time."""
    table = Table.grid(padding=(0, 2, 0, 0))
    total = sum(phases.values())
    for name, seconds in phases.items():
        share = seconds / total if total else 0.0
        table.add_row(name, Text("█" * round(share * BAR_CHARACTERS), "cyan"), f"{seconds:.2f} s", f"{share:.0%}")
    return table


# --- the last lines ---------------------------------------------------------------------------------------------------

SCORES_SHOWN = 4


@dataclass(frozen=True)
class Summary:
    """The result at the end of a run's process.

    places: paths and addresses that exist, by name. after: commands, by what they are for.
    """

    status: RunStatus
    held_out: Sequence[HeldOut]
    places: dict[str, str]
    after: dict[str, str]

    def lines(self) -> Iterator[str]:
        status = self.status
        took = clock((status.ended or status.started) - status.started)
        of_total = f"{status.step:,} of {status.total_steps:,} steps"
        yield f"{status.state} after {took}, {of_total}"
        for score in self.held_out[:SCORES_SHOWN]:
            best = f"; best {score.best:.3f} at step {score.best_step}" if score.best_step != score.last_step else ""
            yield f"held-out {score.name} {score.last:.3f} at step {score.last_step}{best}"
        yield from table(list(self.places.items()))
        if self.after:
            yield "next:"
            yield from (f"  {line}" for line in table(list(self.after.items())))

    def as_json(self) -> dict[str, Any]:
        """Returns the summary as values for JSON."""
        return {
            **asdict(self.status),
            "held_out": [asdict(score) for score in self.held_out],
            "places": self.places,
            "next": self.after,
        }


def summary_of(recipe: AnyRecipe, status: RunStatus) -> Summary:
    """Returns the summary of a run with this recipe, from its directories. status: with its end."""
    directory, exported = run_directory(recipe), export_directory(recipe)
    saved = newest_checkpoint(checkpoint_directory(recipe))
    whole = status.state == "finished" and exported.is_dir()
    places = {"run directory": str(directory)}
    if saved is not None:
        places["checkpoint"] = str(saved)
    if whole:
        places["Hugging Face model"] = str(exported)
    if whole and recipe.train.lora is not None and adapter_directory(recipe).is_dir():
        places["adapters, for PEFT"] = str(adapter_directory(recipe))
    for name, tracker in trackers_of(recipe).items():
        if shown := tracker.shown_at(getattr(recipe.track, name), recipe):
            places[tracker.title] = shown
    if status.state == "failed":
        places["logs"] = str(directory / "logs")
    after = {what: shlex.join(words) for what, words in _next(recipe, status, saved, exported if whole else None)}
    return Summary(status, held_out_scores(directory), places, after)


def _next(
    recipe: AnyRecipe, status: RunStatus, saved: Path | None, exported: Path | None
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yields the next commands, each with what it is for."""
    directory = run_directory(recipe)
    written = str(directory / "recipe.yaml")
    again = "train" if isinstance(recipe, Recipe) else "sft"
    if status.step:
        yield "look at it", ("megagrpo", "report", str(directory))
    if recipe.checkpoint.resume != "never":
        if status.state != "finished":
            yield "continue", ("megagrpo", again, written)
        elif status.step >= status.total_steps:  # else a rule has ended it, and would again
            yield "train longer", ("megagrpo", again, written, longer(recipe, status.total_steps))
    evaluates = isinstance(recipe, Recipe) and recipe.eval.sets and recipe.rollout.kind.started_by_us
    if exported is not None and evaluates:
        yield "evaluate", ("megagrpo", "eval", str(directory), "--recipe", written)
    if exported is not None:
        if read_architecture(exported).only_local is None:
            to = ("--output", str(directory / "torch_dist"))
            yield "for Megatron-LM", ("megagrpo", "convert", "hf-to-megatron", "--source", str(exported), *to)
    elif saved is not None:
        to = ("--output", str(directory / f"{saved.name}_hugging_face"))
        yield "as a model", ("megagrpo", "convert", "megatron-to-hf", "--source", str(saved), *to)


def longer(recipe: AnyRecipe, total_steps: int) -> str:
    """Returns the override that makes a run twice as long."""
    if recipe.train.total_epochs is not None:
        return f"train.total_epochs={2 * recipe.train.total_epochs:g}"
    if isinstance(recipe, Recipe) and recipe.train.total_episodes is not None:
        return f"train.total_episodes={2 * recipe.train.total_episodes}"
    return f"train.total_steps={2 * total_steps}"


def table(rows: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Formats two columns, the first as wide as its longest text."""
    width = max((len(first) for first, _ in rows), default=0)
    return (f"{first:{width}}  {second}" for first, second in rows)

"""The page's plots for papers, and every other metric's: each as PNG and SVG, drawn by Matplotlib."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megagrpo.errors import Problem, ReportError
from megagrpo.plan.show.page import PALETTE
from megagrpo.progress import progress
from megagrpo.report.curves import HEALTH, labels, read_by
from megagrpo.report.rules import firings, trailing_mean
from megagrpo.report.run import RunRead
from megagrpo.report.timing import CURVES, phases_of
from megagrpo.track.metrics import metric_of

METRICS = "metrics"
INCHES = (5.0, 2.8)
DOTS_PER_INCH = 200
FIRES = "#b3261e"
SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "megagrpo",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
}
SMOOTHED = 100  # values from which on a curve is its mean over a fiftieth of them, before itself, faint


def write_plots(runs: Sequence[RunRead], directory: Path) -> list[Path]:
    """Writes every plot to `directory`, which is made if it is missing. Returns the files. Raises ReportError.

    Plots of metrics outside Health and Time and memory go to its folder METRICS.
    """
    written, plots = [], list(_plots(runs))
    try:
        for folder in {(directory / name).parent for name, _ in plots} | {directory}:
            folder.mkdir(parents=True, exist_ok=True)
        with progress("plots", len(plots)) as work:
            for name, draw in plots:
                with rc_context(SETTINGS):
                    figure = Figure(INCHES, dpi=DOTS_PER_INCH, layout="constrained")
                    draw(figure.add_subplot())
                    for kind, metadata in (("png", {"Software": None}), ("svg", {"Date": None})):
                        written.append(directory / f"{name}.{kind}")
                        figure.savefig(written[-1], metadata=metadata)
                work.advance()
    except OSError as error:
        given, needed = (error.strerror or str(error)).lower(), "a directory that can be written"
        raise ReportError(Problem(f"--plots {directory}", given, needed)) from error
    return written


def _plots(runs: Sequence[RunRead]) -> Iterator[tuple[str, Callable[[Axes], None]]]:
    """Yields (path without its suffix, drawing) of each plot for which the runs have values."""
    shown, taken = set[str](), set[str]()
    kind = str(runs[0].recipe.get("kind", "grpo"))
    told = [(curve.title, curve.metric, curve.log, "") for curve in HEALTH.get(kind, HEALTH["grpo"])]
    told += [(curve.title, curve.metric, False, curve.unit) for curve in CURVES]
    for title, pattern, log, unit in told:
        names = sorted({name for run in runs for name in run.metrics if re.fullmatch(pattern, name)})
        shown |= set(names)
        if _known(runs, names):
            yield _slug(title), partial(_lines, runs, names, title, unit, log=log)
    for number, run in enumerate(runs):
        steps, phases = phases_of(run)
        if len(steps):
            suffix = f"_{number + 1}" if len(runs) > 1 else ""
            yield f"seconds_by_phase{suffix}", partial(_stacked, steps, phases)
    for name in sorted({name for run in runs for name in run.metrics} - shown):
        if not _known(runs, [name]):
            continue
        slug = _slug(name)
        while slug in taken:
            slug += "_"
        taken.add(slug)
        found = metric_of(name)
        yield f"{METRICS}/{slug}", partial(_lines, runs, [name], name, found.unit if found else "", log=False)


def _known(runs: Sequence[RunRead], names: Sequence[str]) -> bool:
    return any(len(run.known(name)[0]) for run in runs for name in names)


def _slug(title: str) -> str:
    return re.sub(r"\W+", "_", title.lower())


def _lines(runs: Sequence[RunRead], names: Sequence[str], title: str, unit: str, axes: Axes, *, log: bool) -> None:
    """Draws runs by colour and metrics by dash; with one run, metrics by colour. Draws bands where rules fire."""
    several = len(runs) > 1
    for number, (run, label) in enumerate(zip(runs, labels(runs), strict=True)):
        for place, name in enumerate(names):
            steps, values = run.known(name)
            steps, values = (steps[values > 0], values[values > 0]) if log else (steps, values)
            if not len(steps):
                continue
            colour = PALETTE[(number if several else place) % len(PALETTE)]
            dash = ("-", "--", ":", "-.")[place % 4 if several else 0]
            told = " ".join(text for text in (label if several else "", name if len(names) > 1 else "") if text)
            mark = "o" if len(steps) < 40 else ""
            if len(steps) >= SMOOTHED:
                axes.plot(steps, values, color=colour, linewidth=0.6, alpha=0.3)
                values = trailing_mean(values, len(steps) // 50)
            axes.plot(steps, values, color=colour, linestyle=dash, linewidth=1.2, marker=mark, markersize=3, label=told)
        for firing in firings(run.steps, run.metrics):
            if read_by(firing.rule, names):
                axes.axvspan(firing.first - 0.5, firing.last + 0.5, color=FIRES, alpha=0.12, linewidth=0)
    if log:
        axes.set_yscale("log")
    axes.set(title=title, xlabel="step", ylabel=unit)
    if several or len(names) > 1:
        axes.legend()


def _stacked(steps: np.ndarray, phases: dict[str, np.ndarray], axes: Axes) -> None:
    axes.stackplot(steps, *phases.values(), labels=list(phases), colors=PALETTE, linewidth=0)
    axes.set(title="Seconds of a step by phase", xlabel="step", ylabel="s")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=7)

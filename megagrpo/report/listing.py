"""The runs of a directory, for `megagrpo runs`. Reads only the ends of files, because long runs are many bytes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megagrpo.errors import Problem, ReportError
from megagrpo.track.jsonl import as_number, finite
from megagrpo.track.status import has_process, held_out_scores, last_entry, read_status

STYLES = {
    "running": "cyan",
    "finished": "green",
    "failed": "red",
    "lost": "red",
    "stopped": "yellow",
    "interrupted": "yellow",
}
WIDTH = 200
"""Characters of a line where no terminal limits it."""
UNITS = ((86400, "d"), (3600, "h"), (60, "min"))


def runs_in(directory: Path) -> list[dict[str, Any]]:
    """Returns the runs in `directory`, or itself if it is one, newest step first. Raises ReportError."""
    if not directory.is_dir():
        needed = "the directory of runs: track.directory of their recipes"
        given = "a file" if directory.exists() else "no such directory"
        raise ReportError(Problem(str(directory), given, needed, "name it: megagrpo runs DIRECTORY"))
    directories = [directory] if is_run(directory) else [path for path in directory.iterdir() if is_run(path)]
    now = time.time()
    return sorted((listed(path, now) for path in directories), key=lambda run: (run["age_seconds"], run["name"]))


def is_run(directory: Path) -> bool:
    return (directory / "metrics.jsonl").is_file() and (directory / "recipe.yaml").is_file()


def listed(directory: Path, now: float) -> dict[str, Any]:
    """Returns the newest state of the run in `directory`, as JSON values. now: seconds since 1970.

    state: that of its status.json; lost, if its process ended without a final state; unknown, if an earlier version
    wrote it; unreadable, if no line of its metrics can be read. age_seconds: since its last step, or since its start.
    """
    status, last = read_status(directory), last_entry(directory)
    state: str = "unknown" if status is None else status.state
    if status is None or state == "running":  # `megagrpo track sync` has the lock of a run that has ended
        state = "running" if has_process(directory) else "unknown" if status is None else "lost"
    if not last and state != "running" and (directory / "metrics.jsonl").stat().st_size:
        state = "unreadable"
    began = status.started if status else (directory / "metrics.jsonl").stat().st_mtime
    return {
        "name": directory.resolve().name,
        "directory": str(directory),
        "state": state,
        "step": int(last.get("step", 0)),
        "total_steps": status.total_steps if status else None,
        "reward": finite(as_number(last.get("reward/mean"))),
        "held_out": {
            name: {"last": last, "step": step, "best": best, "best_step": best_step}
            for name, last, step, best, best_step in map(astuple, held_out_scores(directory))
        },
        "age_seconds": round(max(0.0, now - (finite(as_number(last.get("time"))) or began)), 1),
        "seconds_per_step": finite(as_number(last.get("seconds/step"))),
        **{name: getattr(status, name, None) for name in ("error", "host", "pid", "slurm_job")},
    }


def draw(runs: Sequence[dict[str, Any]], console: Console) -> None:
    """Prints a row for each run, and the error of each failed run."""
    table = Table("state", "step", "reward", "held-out", "last step", "s/step", "name", box=None, padding=(0, 2, 0, 0))
    for column in table.columns[1:6]:
        column.justify = "right"
    for column in table.columns:
        column.no_wrap = True
    for run in runs:
        table.add_row(
            Text(run["state"], STYLES.get(run["state"], "")),
            f"{run['step']}" if run["total_steps"] is None else f"{run['step']}/{run['total_steps']}",
            "" if run["reward"] is None else f"{run['reward']:.3f}",
            ", ".join(f"{score['last']:.3f}" for score in run["held_out"].values()),
            f"{age(run['age_seconds'])} ago",
            "" if run["seconds_per_step"] is None else f"{run['seconds_per_step']:.1f}",
            Text(run["name"], "bold"),
        )
    console.print(table)
    failed = [(run["name"], run["error"]) for run in runs if run["state"] == "failed" and run["error"]]
    if failed:
        console.print()
    for name, error in failed:
        console.print(Text(f"{name}: {error}"), soft_wrap=True)


def age(seconds: float) -> str:
    """Returns a duration as text: 45 s, 12 min, 3 h, 2 d."""
    return next((f"{seconds / unit:.0f} {name}" for unit, name in UNITS if seconds >= unit), f"{seconds:.0f} s")

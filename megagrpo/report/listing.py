"""The runs of a directory, for `megagrpo runs`. Reads only the ends of files, because long runs are many bytes."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megagrpo.errors import Problem, ReportError
from megagrpo.track.run_lock import has_process
from megagrpo.track.status import HeldOut, RunStatus, held_out_scores, last_entry, read_status

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


@dataclass(frozen=True)
class ListedRun:
    """The newest state of a run.

    state: that of its status.json; lost, if its process ended without a final state; unknown, if an earlier version
    wrote it; unreadable, if no line of its metrics can be read. age: seconds since its last step, or since its start.
    seconds: of the last step.
    """

    name: str
    directory: Path
    state: str
    step: int
    total_steps: int | None
    reward: float | None
    held_out: Sequence[HeldOut]
    age: float
    seconds: float | None
    status: RunStatus | None

    def as_json(self) -> dict[str, Any]:
        status = self.status
        return {
            "name": self.name,
            "directory": str(self.directory),
            "state": self.state,
            "step": self.step,
            "total_steps": self.total_steps,
            "reward": self.reward,
            "held_out": {
                score.name: {
                    "last": score.last,
                    "step": score.last_step,
                    "best": score.best,
                    "best_step": score.best_step,
                }
                for score in self.held_out
            },
            "age_seconds": round(self.age, 1),
            "seconds_per_step": self.seconds,
            "error": status.error if status else None,
            "host": status.host if status else None,
            "pid": status.pid if status else None,
            "slurm_job": status.slurm_job if status else None,
        }


def runs_in(directory: Path) -> list[ListedRun]:
    """Returns the runs in `directory`, or itself if it is one, newest step first. Raises ReportError."""
    if not directory.is_dir():
        needed = "the directory of runs: track.directory of their recipes"
        given = "a file" if directory.exists() else "no such directory"
        raise ReportError(Problem(str(directory), given, needed, "name it: megagrpo runs DIRECTORY"))
    own = [directory] if is_run(directory) else [path for path in directory.iterdir() if is_run(path)]
    now = time.time()
    return sorted((listed(path, now) for path in own), key=lambda run: (run.age, run.name))


def is_run(directory: Path) -> bool:
    return (directory / "metrics.jsonl").is_file() and (directory / "recipe.yaml").is_file()


def listed(directory: Path, now: float) -> ListedRun:
    """Returns the run in `directory`. now: seconds since 1970."""
    status, last = read_status(directory), last_entry(directory)
    state: str = "unknown" if status is None else status.state
    if status is None or state == "running":  # `megagrpo track sync` has the lock of a run that has ended
        state = "running" if has_process(directory) else "unknown" if status is None else "lost"
    if not last and state != "running" and (directory / "metrics.jsonl").stat().st_size:
        state = "unreadable"
    began = status.started if status else (directory / "metrics.jsonl").stat().st_mtime
    return ListedRun(
        name=directory.resolve().name,
        directory=directory,
        state=state,
        step=int(last.get("step", 0)),
        total_steps=status.total_steps if status else None,
        reward=_number(last.get("reward/mean")),
        held_out=held_out_scores(directory),
        age=max(0.0, now - (_number(last.get("time")) or began)),
        seconds=_number(last.get("seconds/step")),
        status=status,
    )


def draw(runs: Sequence[ListedRun], console: Console) -> None:
    """Prints a row for each run, and the error of each failed run."""
    table = Table("state", "step", "reward", "held-out", "last step", "s/step", "name", box=None, padding=(0, 2, 0, 0))
    for column in table.columns[1:6]:
        column.justify = "right"
    for column in table.columns:
        column.no_wrap = True
    for run in runs:
        table.add_row(
            Text(run.state, STYLES.get(run.state, "")),
            f"{run.step}/{run.total_steps}" if run.total_steps is not None else f"{run.step}",
            _shown(run.reward, ".3f"),
            ", ".join(f"{score.last:.3f}" for score in run.held_out),
            f"{age(run.age)} ago",
            _shown(run.seconds, ".1f"),
            Text(run.name, "bold"),
        )
    console.print(table)
    failed = [(run.name, run.status.error) for run in runs if run.state == "failed" and run.status and run.status.error]
    if failed:
        console.print()
    for name, error in failed:
        console.print(Text(f"{name}: {error}"), soft_wrap=True)


def age(seconds: float) -> str:
    """Returns a duration as text: 45 s, 12 min, 3 h, 2 d."""
    return next((f"{seconds / unit:.0f} {name}" for unit, name in UNITS if seconds >= unit), f"{seconds:.0f} s")


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None

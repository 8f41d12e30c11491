"""The status of a run, from its directory: status.json, its last step and checkpoint, its evaluations so far,
and its lock.

One process holds the lock: it trains in the directory, or sends its files to trackers.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import pydantic

from megagrpo.errors import MegagrpoError, Problem, RecipeError, RunStopped, first_line
from megagrpo.track.jsonl import as_number, require_in_place, step_entries

STATUS_FILE = "status.json"
LOCK_FILE, FOLLOWER_LOCK = "lock", "track.lock"
"""Locks of a run: of the process that trains it, or sends it after its end; of the one that talks to its trackers."""
LOOK_SECONDS = 0.1
SCORE = re.compile(r"eval/([^/]+/mean@\d+|loss)")
"""An evaluation set's mean score, or the loss of held-out examples."""
SAVED = re.compile(r"step_(\d{6,})")
"""A complete checkpoint's directory."""
Status = Literal["finished", "failed", "interrupted"]
"""The end of a run as trackers show it: complete, by an error, or by a signal or Ctrl-C."""
State = Literal["running", "finished", "failed", "interrupted", "stopped"]
"""interrupted: by Ctrl-C. stopped: told to stop by a signal, with everything saved."""


@dataclass(frozen=True)
class RunStatus:
    """The last start of a run: its process, and its end. Times are seconds since 1970."""

    state: State
    total_steps: int
    step: int = 0
    """The last known step: at the run's end, or the one after which it was started."""
    started: float = field(default_factory=lambda: round(time.time(), 3))
    ended: float | None = None
    error: str | None = None
    """The first line of the error that ended it."""
    pid: int = field(default_factory=os.getpid)
    host: str = field(default_factory=socket.gethostname)
    slurm_job: str | None = field(default_factory=lambda: os.environ.get("SLURM_JOB_ID"))

    def write(self, directory: Path) -> None:
        """Replaces status.json as a whole. Raises OSError."""
        part = directory / f".{STATUS_FILE}.part"
        part.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        part.replace(directory / STATUS_FILE)


def end_state(error: BaseException | None) -> State:
    """Returns the state of a run that ends with this error."""
    if error is None:
        return "finished"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return "failed" if isinstance(error, Exception) and not isinstance(error, RunStopped) else "stopped"


def error_line(error: BaseException | None) -> str | None:
    """Returns the error that ended a run, in one line; None without one."""
    if isinstance(error, MegagrpoError) and error.problems:
        problem = error.problems[0]
        given = problem.given.strip().splitlines()
        return f"{error.title}: {problem.where}" + (f": {given[0]}" if given else "")
    return None if error is None else first_line(error)


def read_status(directory: Path) -> RunStatus | None:
    """Reads the run's status; None without a file, as in runs of older versions, or if it cannot be read."""
    try:
        read = json.loads((directory / STATUS_FILE).read_text(encoding="utf-8"))
        return pydantic.TypeAdapter(RunStatus).validate_python(read)
    except (OSError, ValueError, RecursionError):
        return None


@dataclass(frozen=True)
class HeldOut:
    """A held-out score by its metric, such as gsm8k/mean@1 or loss: the last, and the best so far."""

    name: str
    last: float
    last_step: int
    best: float
    best_step: int


def held_out_scores(directory: Path) -> list[HeldOut]:
    """Reads the scores by metric from metrics.jsonl. A loss is better when it is less, another score when greater."""
    scores: dict[str, HeldOut] = {}
    for entry in _entries(directory, b'"eval/'):
        for metric, value in entry.items():
            if SCORE.fullmatch(metric) and math.isfinite(as_number(value)):
                name, step = metric.removeprefix("eval/"), int(entry["step"])
                best, best_step = (scores[name].best, scores[name].best_step) if name in scores else (value, step)
                if value < best if name == "loss" else value > best:
                    best, best_step = value, step
                scores[name] = HeldOut(name, value, step, best, best_step)
    return list(scores.values())


def newest_checkpoint(directory: Path) -> Path | None:
    """Returns the newest complete checkpoint, by its name: its files are not read."""
    steps = {int(name[1]): path for path in directory.glob("step_*") if (name := SAVED.fullmatch(path.name))}
    return steps[max(steps)] if steps else None


def last_entry(directory: Path) -> dict[str, Any]:
    """Reads the last whole line of metrics.jsonl; returns {} if there is none."""
    last: dict[str, Any] = {}
    for entry in _entries(directory, b'"step"', tail_bytes=2**18):
        last = entry
    return last


def _entries(directory: Path, wanted: bytes, tail_bytes: int | None = None) -> Iterator[dict[str, Any]]:
    """Yields steps whose line has the bytes `wanted`."""
    try:
        with (directory / "metrics.jsonl").open("rb") as lines:
            if tail_bytes is not None:
                lines.seek(max(0, lines.seek(0, os.SEEK_END) - tail_bytes))
            yield from step_entries(line for line in lines if wanted in line)
    except OSError:
        return


@contextmanager
def only_process_of(run_directory: Path, lock_file: str = LOCK_FILE) -> Iterator[None]:
    """Holds a run's lock, which ends with the process: a second process would truncate the metrics of the first.

    Raises RecipeError if another process holds it, or if the file system has no locks; at the end, MachineError if the
    directory was moved, deleted or replaced.
    """
    run_directory.mkdir(parents=True, exist_ok=True)
    place = (run_directory / lock_file).absolute()
    with place.open("a+", encoding="utf-8") as lock:
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(LOOK_SECONDS)  # `megagrpo runs` may be looking whether there is a process
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            given = f"process {lock.read().strip() or 'unknown'}"
            needed = "one process per run"
            fix = "wait for it to end, or give the recipe another name"
            raise RecipeError(Problem(f"{run_directory}: this run is already going on", given, needed, fix)) from None
        except OSError as error:
            given = f"{error.strerror}"
            needed = "a file system with locks, so that no second process writes to this run"
            fix = "set track.directory to a place on another file system, or mount this one with locks (flock)"
            raise RecipeError(Problem(f"track.directory: {lock.name} cannot be locked", given, needed, fix)) from error
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield
        require_in_place(place, lock.fileno())


def has_process(directory: Path) -> bool:
    """Returns whether a process, on any node, holds the run's lock: however the process ends, the lock ends with it."""
    try:
        with (directory / LOCK_FILE).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False

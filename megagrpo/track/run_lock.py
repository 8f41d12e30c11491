"""The lock of a run's directory: one process trains in it, or sends its files to trackers."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megagrpo.errors import Problem, RecipeError
from megagrpo.track.jsonl import require_in_place

LOCK_FILE, FOLLOWER_LOCK = "lock", "track.lock"
"""Locks of a run: of the process that trains it, or sends it after its end; of the one that talks to its trackers."""
LOOK_SECONDS = 0.1


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

"""One process per run: a second one would truncate the metrics and checkpoints of the first."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megagrpo.errors import Problem, RecipeError


@contextmanager
def only_process_of(run_directory: Path) -> Iterator[None]:
    """Holds the run's lock, which ends with the process, however it ends. Raises RecipeError if another has it, or
    if the file system has no locks."""
    run_directory.mkdir(parents=True, exist_ok=True)
    with (run_directory / "lock").open("a+", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise RecipeError(
                Problem(
                    where=f"{run_directory}: this run is going on already",
                    given=f"process {lock.read().strip() or 'unknown'}",
                    needed="one process per run",
                    fix="wait for it to end, or give the recipe another name",
                )
            ) from None
        except OSError as error:
            raise RecipeError(
                Problem(
                    where=f"track.directory: {lock.name} cannot be locked",
                    given=f"{error.strerror}",
                    needed="a file system with locks, so that no second process writes to this run",
                    fix="set track.directory to a place on another file system, or mount this one with locks (flock)",
                )
            ) from error
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield

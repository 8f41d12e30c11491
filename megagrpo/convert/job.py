"""Work that is done in units, can be continued after a kill, and whose result appears all at once.

.NAME.partial/          beside the directory NAME that will be made
  journal               what is being made from what; then a line for each unit that is on disk
  output/               renamed to NAME when every unit is in it
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from megagrpo.checkpoint.integrity import sync_directories
from megagrpo.convert.progress import Advance, bar
from megagrpo.errors import CheckpointError, Problem

CONTINUES = "what is done is kept: the same command again continues from there"


@dataclass(frozen=True)
class Unit:
    """What is done again as a whole if it was not finished."""

    name: str
    bytes: int


class Target(Protocol):
    """Something to be made in a directory. Its functions raise OSError if the disk does not take it."""

    @property
    def units(self) -> Sequence[Unit]: ...

    def begin(self, directory: Path) -> None:
        """Makes what must be there before the first unit, in an empty directory."""

    def write(self, index: int, directory: Path, advance: Advance) -> Any:
        """Writes unit `index` and forces it to disk. Returns what `finish` has to know of it, as JSON values."""

    def finish(self, directory: Path, written: Sequence[Any]) -> None:
        """Completes the directory; `written` is what `write` returned for each unit."""


def run(target: Target, directory: Path, identity: str, overwrite: bool, title: str) -> int:
    """Makes `directory`, and returns how many units an earlier attempt had done already.

    An earlier attempt is continued if it had the same `identity`, and removed if not. What `directory` held before is
    replaced at the very end, and only if `overwrite`.

    Raises: CheckpointError if it exists, is being made by another process, or cannot be written.
    """
    if directory.exists() and not overwrite:
        fix = "choose another place, or --overwrite to replace it"
        raise CheckpointError(Problem(f"output {directory}", "it exists", "a directory that does not", fix))
    partial = directory.with_name(f".{directory.name}.partial")
    try:
        partial.mkdir(parents=True, exist_ok=True)
        with _locked(partial / "journal", directory) as journal:
            output = partial / "output"
            written = _entries(journal, identity) if output.is_dir() else []
            if not written:
                shutil.rmtree(output, ignore_errors=True)
                output.mkdir()
                target.begin(output)
                _start(journal, identity)
            earlier = len(written)
            units = target.units
            done_bytes = sum(unit.bytes for unit in units[:earlier])
            with bar(title, sum(unit.bytes for unit in units), done_bytes) as advance:
                for index in range(earlier, len(units)):
                    written.append(target.write(index, output, advance))
                    _append(journal, written[-1])
            target.finish(output, written)
            _sync_files(output)
            _publish(output, directory)
        shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        given = f"{error.strerror or error}" + (f" ({error.filename})" if error.filename else "")
        raise CheckpointError(
            Problem(f"output {directory}", given, "a place that can be written", CONTINUES)
        ) from error
    return earlier


@contextmanager
def _locked(path: Path, directory: Path) -> Iterator[IO[str]]:
    with path.open("a+", encoding="utf-8") as journal:
        try:
            fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(Problem(f"output {directory}", "another process is making it")) from None
        yield journal


def _entries(journal: IO[str], identity: str) -> list[Any]:
    """What is recorded as done. A last line without its end was being written when the process died."""
    journal.seek(0)
    lines = [line for line in journal.read().splitlines(keepends=True) if line.endswith("\n")]
    if not lines or json.loads(lines[0]) != identity:
        return []
    journal.truncate(len("".join(lines).encode("utf-8")))
    return [json.loads(line) for line in lines[1:]]


def _start(journal: IO[str], identity: str) -> None:
    journal.truncate(0)
    _append(journal, identity)


def _append(journal: IO[str], entry: Any) -> None:
    journal.write(json.dumps(entry) + "\n")
    journal.flush()
    os.fsync(journal.fileno())


def _sync_files(directory: Path) -> None:
    folders = [directory]
    for path in directory.rglob("*"):
        if path.is_dir():
            folders.append(path)
        else:
            with path.open("rb") as file:
                os.fsync(file.fileno())
    sync_directories(folders)


def _publish(output: Path, directory: Path) -> None:
    replaced = directory.with_name(f".{directory.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if directory.exists():
        directory.rename(replaced)
    output.rename(directory)
    sync_directories([directory.parent])
    shutil.rmtree(replaced, ignore_errors=True)

"""A corpus on disk with random access to its passages, and its index: made once, shared by all agent processes.

A directory has passages.jsonl (one JSON object a line: id, title, text), ends.npy (where each line ends, int64), what
the index itself writes, and made_from.json, which says what it was made of. A directory that was made of something else
is made anew.
"""

from __future__ import annotations

import fcntl
import json
import logging
import mmap
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megagrpo.errors import DataError, Problem, first_line

log = logging.getLogger(__name__)
SUFFIXES = (".jsonl", ".parquet")
MADE_FROM = "made_from.json"
FORMAT = 1
TEXT_COLUMNS = ("text", "contents", "content", "passage", "body")
"""Tried in this order if no column is named."""
ROWS_AT_ONCE = 4096


@dataclass(frozen=True)
class Source:
    """A file of passages, and the names of its columns; empty: the first of TEXT_COLUMNS, `title` and `id`."""

    file: Path
    text: str = ""
    title: str = ""
    id: str = ""

    def problem(self, where: str) -> Problem | None:
        """Returns the problem of the file's name or first row, None if there is none."""
        if self.file.suffix not in SUFFIXES:
            return Problem(where, str(self.file), f"a file whose name ends in {' or '.join(SUFFIXES)}")
        if not self.file.is_file():
            return Problem(where, f"{self.file}, which does not exist", "a file of passages", "check the path")
        try:
            next(self.passages(), None)
        except DataError as error:
            problem = error.problems[0]
            return replace(problem, where=where, given=f"{self.file}: {problem.given}")
        return None

    def passages(self) -> Iterator[dict[str, str]]:
        """Yields the passages (id, title, text). Raises DataError at the first row that has no text."""
        try:
            for number, row in enumerate(_rows(self.file), 1):
                yield self._passage(row, number)
        except (OSError, ValueError) as error:
            raise DataError(
                Problem(str(self.file), first_line(error), "JSON objects, one a line, or parquet")
            ) from None

    def _passage(self, row: Any, number: int) -> dict[str, str]:
        names = (self.text,) if self.text else TEXT_COLUMNS
        text = next((row[name] for name in names if isinstance(row.get(name), str)), None) if _is_row(row) else None
        if text is None:
            given = f"row {number} has {', '.join(row) if _is_row(row) else type(row).__name__}"
            raise DataError(Problem(str(self.file), given, f"a text in {' or '.join(names)}", "set arguments.text"))
        title, identity = row.get(self.title or "title"), row.get(self.id or "id")
        return {
            "id": str(number - 1 if identity is None else identity),
            "title": "" if title is None else str(title),
            "text": text,
        }


def _is_row(row: Any) -> bool:
    return isinstance(row, dict)


def _rows(file: Path) -> Iterator[Any]:
    if file.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            with pq.ParquetFile(file) as table:
                for batch in table.iter_batches(ROWS_AT_ONCE):
                    yield from batch.to_pylist()
        except pa.ArrowException as error:
            raise ValueError(first_line(error)) from None
        return
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            if line.strip():
                yield json.loads(line)


class Passages:
    """The passages of an index's directory, each read on access."""

    def __init__(self, directory: Path) -> None:
        self._ends = np.load(directory / "ends.npy", mmap_mode="r")
        with (directory / "passages.jsonl").open("rb") as file:
            # An empty file cannot be mapped.
            self._text = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if len(self._ends) else b""

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, number: int) -> dict[str, str]:
        start = int(self._ends[number - 1]) if number else 0
        return json.loads(self._text[start : int(self._ends[number])])

    def __iter__(self) -> Iterator[dict[str, str]]:
        return (self[number] for number in range(len(self)))


def indexed(
    directory: Path, source: Source, settings: Mapping[str, Any], build: Callable[[Path, Passages], None]
) -> Path:
    """Returns the directory, which is made first if it is not there or was made of something else.

    `build` gets a directory with the passages and writes its index to it. One process makes it; others wait. A process
    that is killed meanwhile leaves nothing that is taken for an index. Raises DataError.
    """
    made_from = {"format": FORMAT, **_made_from(source), **settings}
    if _is_made(directory, made_from):
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with directory.with_name(f"{directory.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _is_made(directory, made_from):
            return directory
        start = time.monotonic()
        being_made = directory.with_name(f"{directory.name}.being-made")
        shutil.rmtree(being_made, ignore_errors=True)
        being_made.mkdir()
        _write_passages(being_made, source)
        passages = Passages(being_made)
        build(being_made, passages)
        (being_made / MADE_FROM).write_text(json.dumps(made_from), encoding="utf-8")
        shutil.rmtree(directory, ignore_errors=True)
        os.replace(being_made, directory)
        seconds = time.monotonic() - start
        log.warning(
            "the index of %s (%d passages) was made in %.1f s: %s", source.file, len(passages), seconds, directory
        )
    return directory


def _made_from(source: Source) -> dict[str, Any]:
    if problem := source.problem("corpus"):
        raise DataError(problem)
    stat = source.file.stat()
    columns: Sequence[str] = (source.text, source.title, source.id)
    return {"file": source.file.name, "bytes": stat.st_size, "changed": stat.st_mtime_ns, "columns": list(columns)}


def _is_made(directory: Path, made_from: Mapping[str, Any]) -> bool:
    try:
        return bool(json.loads((directory / MADE_FROM).read_text(encoding="utf-8")) == dict(made_from))
    except (OSError, ValueError):
        return False


def _write_passages(directory: Path, source: Source) -> None:
    ends = []
    end = 0
    with (directory / "passages.jsonl").open("wb") as file:
        for passage in source.passages():
            end += file.write(json.dumps(passage, ensure_ascii=False).encode(errors="replace") + b"\n")
            ends.append(end)
    np.save(directory / "ends.npy", np.array(ends, np.int64))

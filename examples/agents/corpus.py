"""A corpus on disk with random access to its passages, and its index: made once, shared by all agent processes.

An index's directory has passages.jsonl (one JSON object a line: id, title, text), ends.npy (where each line ends,
int64), what the index itself writes, and made_from.json, which says what it was made of. A directory that was made of
something else is made anew. bm25_search.py and dense_search.py are built on this file.
"""

from __future__ import annotations

import fcntl
import json
import logging
import mmap
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

log = logging.getLogger(__name__)
MADE_FROM = "made_from.json"
FORMAT = 1
TEXT_COLUMNS = ("text", "contents", "content", "passage", "body")
"""Tried in this order if no column is named."""
ROWS_AT_ONCE = 4096


@dataclass(frozen=True)
class Corpus:
    """A file of passages, JSONL or parquet, and its columns; empty: the first of TEXT_COLUMNS, `title` and `id`."""

    file: Path
    text: str = ""
    title: str = ""
    id: str = ""

    def passages(self) -> Iterator[dict[str, str]]:
        """Yields the passages (id, title, text). Raises ValueError at the first row that has no text."""
        try:
            for number, row in enumerate(_rows(self.file)):
                yield self._passage(row, number)
        except ValueError as error:
            raise ValueError(f"{self.file}: {error}") from None

    def _passage(self, row: Any, number: int) -> dict[str, str]:
        names = (self.text,) if self.text else TEXT_COLUMNS
        values = row if isinstance(row, dict) else {}
        text = next((values[name] for name in names if isinstance(values.get(name), str)), None)
        if text is None:
            raise ValueError(f"row {number + 1} has no text in {' or '.join(names)}: {', '.join(values) or row}")
        title, identity = values.get(self.title or "title"), values.get(self.id or "id")
        return {
            "id": str(number if identity is None else identity),
            "title": "" if title is None else str(title),
            "text": text,
        }


def _rows(file: Path) -> Iterator[Any]:
    if file.suffix == ".parquet":
        import pyarrow.parquet as pq

        with pq.ParquetFile(file) as table:
            for batch in table.iter_batches(ROWS_AT_ONCE):
                yield from batch.to_pylist()
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
        return json.loads(self._text[start : int(self._ends[number])])  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[dict[str, str]]:
        return (self[number] for number in range(len(self)))


class CorpusSearch:
    """A tool that searches the passages of a corpus. A subclass opens its index and finds their numbers."""

    _passages: Passages

    @classmethod
    def prepare(cls, **arguments: Any) -> None:
        """Makes the index, once in an agent process, before any rollout begins."""
        cls(**arguments)

    def search(self, query: str) -> str:
        """Searches a collection of documents and returns the passages that fit the query best.

        Args:
            query: The search query.
        """
        if not query.strip():
            raise ValueError("give a query")  # the policy reads this
        return shown(self._passages[number] for number in self._found(query))

    def _found(self, query: str) -> Iterable[int]:
        """Returns the numbers of passages, best first."""
        raise NotImplementedError


def indexed(
    directory: Path, corpus: Corpus, settings: Mapping[str, Any], build: Callable[[Path, Passages], None]
) -> Path:
    """Returns the directory, which is made first if it is not there or was made of something else.

    `build` gets a directory with the passages and writes its index to it. One process makes it; others wait. A process
    that is killed meanwhile leaves nothing that is taken for an index. Raises OSError or ValueError for a wrong corpus.
    """
    stat, columns = corpus.file.stat(), [corpus.text, corpus.title, corpus.id]
    made_from = {"format": FORMAT, "file": corpus.file.name, "bytes": stat.st_size, "changed": stat.st_mtime_ns}
    made_from |= {"columns": columns, **settings}
    if _is_made(directory, made_from):
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with directory.with_name(f"{directory.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _is_made(directory, made_from):
            return directory
        if directory.exists() and not (directory / MADE_FROM).is_file():
            raise ValueError(f"{directory} is there, and is no index: remove it, or name another directory")
        start = time.monotonic()
        being_made = directory.with_name(f"{directory.name}.being-made")
        shutil.rmtree(being_made, ignore_errors=True)
        being_made.mkdir()
        _write_passages(being_made, corpus)
        passages = Passages(being_made)
        build(being_made, passages)
        (being_made / MADE_FROM).write_text(json.dumps(made_from), encoding="utf-8")
        shutil.rmtree(directory, ignore_errors=True)
        os.replace(being_made, directory)
        told = (corpus.file, len(passages), time.monotonic() - start, directory)
        log.warning("the index of %s (%d passages) was made in %.1f s: %s", *told)
    return directory


def _is_made(directory: Path, made_from: Mapping[str, Any]) -> bool:
    try:
        return bool(json.loads((directory / MADE_FROM).read_text(encoding="utf-8")) == made_from)
    except (OSError, ValueError):
        return False


def _write_passages(directory: Path, corpus: Corpus) -> None:
    ends = []
    end = 0
    with (directory / "passages.jsonl").open("wb") as file:
        for passage in corpus.passages():
            end += file.write(json.dumps(passage, ensure_ascii=False).encode(errors="replace") + b"\n")
            ends.append(end)
    np.save(directory / "ends.npy", np.array(ends, np.int64))


def whole(passage: Mapping[str, str]) -> str:
    """Returns title and text of a passage."""
    return f"{passage['title']}\n{passage['text']}".lstrip("\n")


def shown(passages: Iterable[Mapping[str, str]]) -> str:
    """Returns the text of passages for the policy."""
    return "\n\n".join(f"[{number}] {whole(one)}" for number, one in enumerate(passages, 1)) or "Nothing was found."

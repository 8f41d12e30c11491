"""Prompts or examples outside of the driver's memory: columns in an Arrow file that is mapped, or in memory if few.

Rows are written once, in batches, and made into objects one by one when they are read. A file is kept in the cache
under a digest of all inputs of its content, so that a restarted run reads the cache alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from megagrpo.errors import DataError, Problem

if TYPE_CHECKING:  # slow to import, and a plan reads no rows
    import pyarrow as pa


AnyItem = TypeVar("AnyItem")
Column = dict[str, Any]

FORMAT = 4
BATCH_ROWS = 1024
BATCH_BYTES = 2**24
IN_MEMORY_BYTES = 2**26
"""Rows of one file that take more than this go to the disk."""


@dataclass(frozen=True)
class Form(Generic[AnyItem]):
    """The storage of items: `schema` has the columns number (int64) and tokens (list of int32).

    `item` receives a batch, a row of it and the item's id. `contents` returns the bytes that must be the same when a
    run resumes, for every row of a batch (Item.content).
    """

    schema: pa.Schema
    item: Callable[[pa.RecordBatch, int, str], AnyItem]
    contents: Callable[[pa.RecordBatch], list[bytes]]


@dataclass(frozen=True)
class Stored(Generic[AnyItem]):
    """The items of one source, in its order. `figures` are counts of what was read and left out."""

    form: Form[AnyItem]
    label: str
    batches: Sequence[pa.RecordBatch]
    figures: Mapping[str, int]

    @cached_property
    def starts(self) -> list[int]:
        """Returns the row at which each batch begins, and the count of rows."""
        return [0, *accumulate(batch.num_rows for batch in self.batches)]

    def __len__(self) -> int:
        return self.starts[-1]

    def item(self, row: int) -> AnyItem:
        """Returns one item, made new."""
        index = int(np.searchsorted(self.starts, row, side="right")) - 1
        batch, at = self.batches[index], row - self.starts[index]
        return self.form.item(batch, at, f"{self.label}:{batch.column('number')[at].as_py()}")

    def column(self, name: str) -> Iterator[Any]:
        """Yields a column's values of all items."""
        for batch in self.batches:
            yield from batch.column(name).to_pylist()

    def names(self) -> Iterator[str]:
        """Yields the ids of all items."""
        return (f"{self.label}:{number}" for number in self.column("number"))

    def contents(self) -> Iterator[bytes]:
        """Yields the bytes that a fingerprint reads of all items."""
        for batch in self.batches:
            yield from self.form.contents(batch)


class Cache:
    """Files of rows under digests. Several processes may write the same one: the last to end wins; each is whole."""

    def __init__(self, directory: str | Path | None) -> None:
        """Takes data.cache of a recipe. None is the user's own folder."""
        default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megagrpo"
        self.directory = Path(directory) if directory else default

    def find(self, key: str, form: Form[AnyItem], label: str) -> Stored[AnyItem] | None:
        """Returns the items stored under this key, None if there are none."""
        import pyarrow as pa

        try:
            figures = json.loads((self.directory / f"{key}.json").read_text(encoding="utf-8"))
            stored = _mapped(self.directory / f"{key}.arrow", form, label, figures)
        except (OSError, ValueError, pa.ArrowException):
            return None
        for suffix in ("arrow", "json"):  # when it was last used, for clearing the folder
            with contextlib.suppress(OSError):
                os.utime(self.directory / f"{key}.{suffix}")
        return stored

    def write(
        self,
        batches: Iterable[pa.RecordBatch],
        schema: pa.Schema,
        key: Callable[[], str],
        figures: Callable[[], Mapping[str, int]],
    ) -> Path:
        """Writes batches under a key, with their figures beside them: both whole or not at all. Calls `key` and
        `figures` at the end. Raises DataError if the folder cannot be written."""
        import pyarrow as pa

        try:
            self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.TemporaryDirectory(prefix=".", suffix=".part", dir=self.directory) as folder:
                part, note = Path(folder, "rows"), Path(folder, "figures")
                with pa.OSFile(str(part), "wb") as file, pa.ipc.new_file(file, schema) as writer:
                    for batch in batches:
                        writer.write_batch(batch)
                note.write_text(json.dumps(dict(figures())), encoding="utf-8")
                part.chmod(0o600)  # a cache's folder may be open to others
                path = self.directory / f"{key()}.arrow"
                part.replace(path)
                note.replace(path.with_suffix(".json"))
        except OSError as error:
            where, needed = f"{self.directory}: rows cannot be kept there", "a folder to write to, with room"
            fix = "make room, or set data.cache to another folder"
            raise DataError(Problem(where, error.strerror or str(error), needed, fix)) from None
        return path


def digest(facts: Any) -> str:
    """Returns the key of content made from these facts, which are JSON."""
    text = json.dumps([FORMAT, facts], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()


def store(
    records: Iterable[Column],
    form: Form[AnyItem],
    label: str,
    cache: Cache,
    key: Callable[[], str],
    figures: Callable[[], Mapping[str, int]],
) -> Stored[AnyItem]:
    """Stores records: in memory up to IN_MEMORY_BYTES, else in the cache. Calls `figures` at the end.

    Raises DataError if the cache cannot be written.
    """

    batches: list[pa.RecordBatch] = []
    size = 0
    incoming = _batches(records, form.schema)
    for batch in incoming:
        batches.append(batch)
        size += batch.nbytes
        if size > IN_MEMORY_BYTES:
            break
    else:
        return Stored(form, label, batches, dict(figures()))
    unwritten = (batches.pop(0) for _ in range(len(batches)))  # their memory is free as soon as they are written
    path = cache.write(chain(unwritten, incoming), form.schema, key, figures)
    return _mapped(path, form, label, dict(figures()))


def _batches(records: Iterable[Column], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    waiting: list[Column] = []
    size = 0
    for record in records:
        waiting.append(record)
        size += sum(len(value) for value in record.values() if isinstance(value, str | np.ndarray))
        if len(waiting) == BATCH_ROWS or size > BATCH_BYTES:
            yield pa.RecordBatch.from_pylist(waiting, schema)
            waiting, size = [], 0
    if waiting:
        yield pa.RecordBatch.from_pylist(waiting, schema)


def _mapped(path: Path, form: Form[AnyItem], label: str, figures: Mapping[str, int]) -> Stored[AnyItem]:
    import pyarrow as pa

    reader = pa.ipc.open_file(pa.memory_map(str(path)))
    return Stored(form, label, [reader.get_batch(index) for index in range(reader.num_record_batches)], figures)

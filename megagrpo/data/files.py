"""Records of a file of data, one dict each, with every defect named by file and row.

Rows of parquet, Arrow and JSON files count from 0, as pandas shows them; lines of JSONL from 1, as editors show them.
"""

from __future__ import annotations

import codecs
import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megagrpo.data.locations import arrow_source, open_file, path_problem, suffix_of
from megagrpo.data.reasoning_gym import COLUMNS, is_task, task_at, task_records
from megagrpo.errors import DataError, Problem, brief, first_line

if TYPE_CHECKING:  # pyarrow is slow to import, and a plan mostly has no parquet file to look at
    import pyarrow as pa

PROBLEMS_SHOWN = 10
BATCH_ROWS = 2048
LINE_BYTES_MAX = 2**26
READ_BYTES = 2**20
ARROW_FILE = b"ARROW1"
"""The first bytes of a file in Arrow's file format."""
KINDS = {".parquet": "parquet", ".arrow": "Arrow stream"}

Record = dict[str, Any]


class Findings:
    """Problems of one file: the first ten in full, the rest as a count."""

    def __init__(self, path: str | Path) -> None:
        self.path = path
        self.count = 0
        self._shown: list[Problem] = []

    def add(self, problems: Iterable[Problem]) -> None:
        for problem in problems:
            self.count += 1
            if self.count <= PROBLEMS_SHOWN:
                self._shown.append(problem)

    def problems(self) -> list[Problem]:
        if self.count <= PROBLEMS_SHOWN:
            return list(self._shown)
        return [*self._shown, Problem(f"{self.path}: and {self.count - PROBLEMS_SHOWN} more")]

    def raise_if_any(self) -> None:
        if self.count:
            raise DataError(self.problems())


def place(path: str | Path, number: int) -> str:
    """Returns the name of one record of a file in errors."""
    lines = ".jsonl" in suffix_of(str(path))
    return f"{path} line {number}" if lines else f"{path} row {number} (counting from 0)"


def has_columns(path: str) -> bool:
    """Returns whether a file states its own columns, so that they do not follow from its first record."""
    return is_task(path) or suffix_of(path) in KINDS


def columns(path: str) -> tuple[str, ...]:
    """Returns the names of the columns: the schema's, or the keys of the first JSON object (none if it is bad)."""
    _raise_path_problem(path)
    if is_task(path):
        return COLUMNS
    if has_columns(path):
        return tuple(_opened(path)[1].names)
    first = next(records(path), None)
    return tuple(first[1]) if first is not None and isinstance(first[1], dict) else ()


def row_count(path: str) -> int:
    """Counts the records of a file, good or bad, with as little decoding as possible. Raises DataError if the file as a
    whole cannot be read."""
    _raise_path_problem(path)
    if is_task(path):
        return task_at(path).size
    if suffix_of(path) == ".parquet":
        return int(_opened(path)[0].metadata.num_rows)
    if suffix_of(path) == ".arrow":
        return sum(batch.num_rows for batch in _batches(path))
    if suffix_of(path) == ".json":
        return sum(1 for _ in records(path))
    return sum(1 for line in _lines(path) if line.strip())


def records(path: str, wanted: Collection[str] | None = None) -> Iterator[tuple[int, Record | Problem]]:
    """Yields (row or line number, record), with a Problem in place of a record that cannot be read.

    `wanted` restricts a parquet file to these columns. Raises DataError if the file as a whole cannot be read.
    """
    _raise_path_problem(path)
    if is_task(path):
        yield from task_records(path)
        return
    match suffix_of(path):
        case ".parquet" | ".arrow":
            yield from _batch_records(path, _batches(path, wanted))
        case ".json":
            yield from _array_records(path)
        case _:
            for number, line in enumerate(_lines(path), start=1):
                if len(line) > LINE_BYTES_MAX:
                    given, needed = f"a line of {len(line):,} bytes", f"at most {LINE_BYTES_MAX:,}"
                    yield number, Problem(place(path, number), given, needed, "one JSON object per line")
                elif line.strip():
                    yield number, _json_record(line, place(path, number))


def _raise_path_problem(path: str) -> None:
    if problem := path_problem(path):
        raise DataError(problem)


def _unreadable(path: str, error: BaseException, kind: str, after_row: int | None = None) -> DataError:
    after = "" if after_row is None else f" from row {after_row} on"
    fix = "write or download it again; it may be truncated"
    return DataError(
        Problem(f"{path}: cannot be read as {kind}{after}", first_line(error), f"a whole {kind} file", fix)
    )


# --- lines and arrays of JSON -----------------------------------------------------------------------------------------


def _lines(path: str) -> Iterator[bytes]:
    number = 0
    with closing(open_file(path)) as file:
        try:
            for line in file:
                yield line
                number += 1
        except (EOFError, OSError) as error:  # a packed file that is damaged
            raise _unreadable(path, error, suffix_of(path).rpartition(".")[2], after_row=number) from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> Record:
    """Returns the object. Raises ValueError if it has a key twice."""
    if len(record := dict(pairs)) < len(pairs):
        raise ValueError(f"an object has the key {brief(_duplicate(key for key, _ in pairs))} twice")
    return record


DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys)


def _duplicate(names: Iterable[str]) -> str | None:
    """Returns the first name that occurs more than once."""
    return next((name for name, count in Counter(names).items() if count > 1), None)


def _json_record(line: bytes, where: str) -> Record | Problem:
    try:
        record = DECODER.decode(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return _not_utf8(where, error)
    except (ValueError, RecursionError) as error:
        return Problem(f"{where}: not valid JSON", given=str(error), needed="one JSON object per line")
    return _object(record, where)


def _object(record: Any, where: str) -> Record | Problem:
    if not isinstance(record, dict):
        return Problem(f"{where}: not a JSON object", given=brief(record), needed="one JSON object per row")
    return record


def _array_records(path: str) -> Iterator[tuple[int, Record | Problem]]:
    """Yields the objects of a JSON file: one array of them, or one alone. Decodes an array piece by piece."""
    with closing(open_file(path)) as file:
        reader = codecs.getreader("utf-8-sig")(file)
        text, at, ended, number, opened, closed = "", 0, False, 0, False, False

        def bad(given: str, fix: str = "") -> DataError:
            where, needed = f"{place(path, number)}: not valid JSON", "an array of JSON objects, in UTF-8"
            return DataError(Problem(where, given, needed, fix))

        while True:
            while at < len(text) and (text[at].isspace() or (opened and not closed and text[at] == ",")):
                at += 1
            mark, end = text[at : at + 1], 0
            if mark and closed:
                given = f"more text after the {'array' if opened else 'object'}"
                raise bad(given, "if it has an object per line, rename it to .jsonl")
            if (mark == "[" and not opened) or (mark == "]" and opened):
                opened, closed, at = True, opened, at + 1
                continue
            if mark:
                try:
                    record, end = DECODER.raw_decode(text, at)
                except (ValueError, RecursionError) as error:
                    if ended or len(text) - at > LINE_BYTES_MAX or isinstance(error, RecursionError):
                        raise bad(str(error)) from None
            elif ended:
                if opened and not closed:
                    raise bad("the array has no end")
                return
            if end and (end < len(text) or ended):
                yield number, _object(record, place(path, number))
                number, at, closed = number + 1, end, not opened
                continue
            try:
                more = reader.read(READ_BYTES)
            except UnicodeDecodeError as error:
                raise DataError(_not_utf8(place(path, number), error)) from None
            text, at, ended = text[at:] + more, 0, not more


def _not_utf8(where: str, error: UnicodeDecodeError) -> Problem:
    given = f"byte 0x{error.object[error.start]:02x} at position {error.start}"
    needed = "UTF-8 text"
    return Problem(f"{where}: not UTF-8", given, needed, "convert the file, for example with iconv -f latin1 -t utf-8")


# --- parquet and Arrow ------------------------------------------------------------------------------------------------


def _opened(path: str) -> tuple[Any, pa.Schema]:
    """Opens a parquet file, or one in Arrow's stream format, which the `datasets` package writes.

    Returns the reader and the schema. Raises DataError.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    arrow = suffix_of(path) == ".arrow"
    if arrow and arrow_source(path).read(len(ARROW_FILE)) == ARROW_FILE:
        given, needed = "the Arrow file format (Feather)", "the stream format, which `datasets` writes, or parquet"
        fix = "write it as parquet: pyarrow.parquet.write_table(pyarrow.feather.read_table(FILE), NAME)"
        raise DataError(Problem(f"{path}: another kind of Arrow file", given, needed, fix))
    try:
        if arrow:
            file: Any = pa.ipc.open_stream(arrow_source(path))
        else:  # without a buffer, a column of a row group is read as a whole
            file = pq.ParquetFile(arrow_source(path), buffer_size=READ_BYTES, pre_buffer=False)
        schema = file.schema if arrow else file.schema_arrow
        _raise_duplicate(path, list(schema))
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error, KINDS[suffix_of(path)]) from None
    return file, schema


def _raise_duplicate(path: str, fields: Sequence[pa.Field], within: str = "") -> None:
    """Raises DataError if two columns, or two fields of a struct in one, have the same name."""
    if (name := _duplicate(field.name for field in fields)) is not None:
        place = f" of {within[:-1]}" if within else ""
        needed, fix = "names that differ, in every row", "rename one of them, or leave it out"
        raise DataError(Problem(f"{path}: columns{place}", f"{brief(name)} twice", needed, fix))
    for field in fields:
        inner = [field.type.field(index) for index in range(field.type.num_fields)]
        _raise_duplicate(path, inner, f"{within}{field.name}.")


def _batches(path: str, wanted: Collection[str] | None = None) -> Iterator[pa.RecordBatch]:
    """Yields batches of at most BATCH_ROWS rows. Raises DataError at one that cannot be read."""
    import pyarrow as pa

    file, schema = _opened(path)
    arrow, number = suffix_of(path) == ".arrow", 0
    names = None if wanted is None else [name for name in schema.names if name in wanted]
    try:
        for batch in file if arrow else file.iter_batches(batch_size=BATCH_ROWS, columns=names):
            if arrow:
                batch.validate(full=True)  # else damaged offsets are followed, wherever they lead
            for first in range(0, batch.num_rows, BATCH_ROWS):
                yield batch.slice(first, BATCH_ROWS)
            number += batch.num_rows
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error, KINDS[suffix_of(path)], after_row=number) from None


def _batch_records(path: str, batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[int, Record | Problem]]:
    number = 0
    for batch in batches:
        try:
            decoded: list[Any] = batch.to_pylist()
        except UnicodeDecodeError:  # of one row or some
            decoded = [_batch_record(batch, i, place(path, number + i)) for i in range(batch.num_rows)]
        for record in decoded:
            yield number, record
            number += 1


def _batch_record(batch: pa.RecordBatch, index: int, where: str) -> Record | Problem:
    try:
        return {name: batch.column(name)[index].as_py() for name in batch.schema.names}
    except UnicodeDecodeError as error:
        return _not_utf8(where, error)

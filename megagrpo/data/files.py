"""Records of a parquet or JSONL file, one dict each, with every defect named by file and row.

Parquet rows count from 0, as pandas shows them; JSONL lines count from 1, as editors show them.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megagrpo.errors import DataError, Problem, brief, first_line

if TYPE_CHECKING:  # pyarrow is slow to import, and a plan mostly has no parquet file to look at
    import pyarrow as pa
    import pyarrow.parquet as pq

SUFFIXES = (".parquet", ".jsonl")
PROBLEMS_SHOWN = 10
BATCH_ROWS = 2048
LINE_BYTES_MAX = 2**26

Record = dict[str, Any]


class Findings:
    """Problems of one file: the first ten in full, the rest as a count."""

    def __init__(self, path: Path) -> None:
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


def place(path: Path, number: int) -> str:
    """How an error names one record of a file."""
    return f"{path} row {number} (counting from 0)" if path.suffix == ".parquet" else f"{path} line {number}"


def column_problem(path: Path, column: str, present: Iterable[str], documentation: str) -> Problem:
    """`column` is not in the file: names the columns that are, and a likely misspelling among them."""
    names = list(present)
    near = difflib.get_close_matches(column, names, n=1)
    given = f"columns {', '.join(names) or '(none)'}"
    fix = f"rename {near[0]!r} to {column!r}" if near else f"see {documentation}"
    return Problem(f"{path}: no column {column!r}", given, f"a column {column!r}", fix)


def near_file(path: Path) -> Path | None:
    """A file beside a missing one whose name is nearly the same."""
    siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, siblings, n=1)
    return path.parent / near[0] if near else None


def path_problem(path: Path) -> Problem | None:
    """What is wrong with a path, as far as it is known without opening the file."""
    if not path.exists():
        near = near_file(path)
        fix = f"did you mean {near}?" if near else "check the path; relative paths start at the working directory"
        return Problem(str(path), "no such file", needed="a parquet or JSONL file", fix=fix)
    if not path.is_file():
        given = "a directory" if path.is_dir() else "a special file"
        return Problem(f"{path}: not a file", given, needed="a parquet or JSONL file")
    if path.suffix not in SUFFIXES:
        given, fix = f"extension {path.suffix!r}", "convert it, or rename it if only the name is wrong"
        return Problem(f"{path}: unknown kind of file", given, needed=" or ".join(SUFFIXES), fix=fix)
    if path.stat().st_size == 0:
        return Problem(f"{path}: the file is empty", given="0 bytes", needed="at least one row")
    return None


def columns(path: Path) -> tuple[str, ...]:
    """Names of the columns: the parquet schema's, or the keys of the first JSONL object (none if that line is bad)."""
    _raise_path_problem(path)
    if path.suffix == ".parquet":
        return tuple(_open_parquet(path).schema_arrow.names)
    first = next(records(path), None)
    return tuple(first[1]) if first is not None and isinstance(first[1], dict) else ()


def row_count(path: Path) -> int:
    """Records in a file, good or bad, without decoding one. Raises DataError if it cannot be read as a whole."""
    _raise_path_problem(path)
    if path.suffix == ".parquet":
        return int(_open_parquet(path).metadata.num_rows)
    with path.open("rb") as file:
        return sum(1 for line in file if line.strip())


def records(path: Path, wanted: Iterable[str] | None = None) -> Iterator[tuple[int, Record | Problem]]:
    """(row or line number, record), with a Problem in place of a record that cannot be read.

    `wanted` restricts a parquet file to these columns. Raises DataError if the file as a whole cannot be read.
    """
    _raise_path_problem(path)
    if path.suffix == ".parquet":
        yield from _parquet_records(path, wanted)
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if len(line) > LINE_BYTES_MAX:
                given, needed = f"a line of {len(line):,} bytes", f"at most {LINE_BYTES_MAX:,}"
                yield number, Problem(place(path, number), given, needed, "one JSON object per line")
            elif line.strip():
                yield number, _json_record(line, place(path, number))


def _raise_path_problem(path: Path) -> None:
    if problem := path_problem(path):
        raise DataError(problem)


def _unreadable(path: Path, error: BaseException, after_row: int | None = None) -> DataError:
    after = "" if after_row is None else f" from row {after_row} on"
    given = first_line(error)
    fix = "write or download it again; it may be truncated"
    return DataError(Problem(f"{path}: cannot be read as parquet{after}", given, "a whole parquet file", fix))


def _open_parquet(path: Path) -> pq.ParquetFile:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from None


def _parquet_records(path: Path, wanted: Iterable[str] | None) -> Iterator[tuple[int, Record | Problem]]:
    import pyarrow as pa

    file = _open_parquet(path)
    present = file.schema_arrow.names
    names = present if wanted is None else [name for name in present if name in set(wanted)]
    number = 0
    batches = file.iter_batches(batch_size=BATCH_ROWS, columns=names)
    while True:
        try:
            batch = next(batches, None)
        except (pa.ArrowException, OSError) as error:
            raise _unreadable(path, error, after_row=number) from None
        if batch is None:
            return
        try:
            decoded: list[Any] = batch.to_pylist()
        except UnicodeDecodeError:
            decoded = [_batch_record(batch, i, place(path, number + i)) for i in range(batch.num_rows)]
        for record in decoded:
            yield number, record
            number += 1


def _batch_record(batch: pa.RecordBatch, index: int, where: str) -> Record | Problem:
    try:
        return {name: batch.column(name)[index].as_py() for name in batch.schema.names}
    except UnicodeDecodeError as error:
        return _not_utf8(where, error)


def _json_record(line: bytes, where: str) -> Record | Problem:
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return _not_utf8(where, error)
    except (ValueError, RecursionError) as error:
        return Problem(f"{where}: not valid JSON", given=str(error), needed="one JSON object per line")
    if not isinstance(record, dict):
        return Problem(f"{where}: not a JSON object", given=brief(record), needed="one JSON object per line")
    return record


def _not_utf8(where: str, error: UnicodeDecodeError) -> Problem:
    given = f"byte 0x{error.object[error.start]:02x} at position {error.start}"
    needed = "UTF-8 text"
    return Problem(f"{where}: not UTF-8", given, needed, "convert the file, for example with iconv -f latin1 -t utf-8")

"""Rows of a data file against a schema: all that is wrong, or all rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Generic, TypeVar

from megagrpo.data.files import Findings, Record, column_problem, columns, path_problem, place, records
from megagrpo.errors import DataError, Problem

ROWS_IN_QUICK_CHECK = 16
AnyRow = TypeVar("AnyRow")


@dataclass(frozen=True)
class RowSchema(Generic[AnyRow]):
    """Columns of a kind of file. `problems` receives a record and its place, `row` a good record and its number."""

    required: tuple[str, ...]
    optional: tuple[str, ...]
    problems: Callable[[Record, str], list[Problem]]
    row: Callable[[Record, int], AnyRow]
    documentation: str


def read(path: Path, schema: RowSchema[AnyRow]) -> list[AnyRow]:
    """All rows of a file. Raises DataError with up to ten of its problems and the count of the others."""
    findings, rows = _check(path, schema, limit=None)
    findings.raise_if_any()
    return rows


def look(path: Path, schema: RowSchema[AnyRow]) -> list[Problem]:
    """A quick look, whatever the file's size: that it opens, its columns, its first rows. Raises nothing."""
    problem = path_problem(path)
    if problem is not None:
        return [problem]
    try:
        findings, _ = _check(path, schema, limit=ROWS_IN_QUICK_CHECK)
    except DataError as error:
        return list(error.problems)
    return findings.problems()


def _check(path: Path, schema: RowSchema[AnyRow], limit: int | None) -> tuple[Findings, list[AnyRow]]:
    findings = Findings(path)
    rows: list[AnyRow] = []
    present = columns(path)
    if present:  # a first JSONL line that cannot be read has none, and is reported as a row
        missing = [name for name in schema.required if name not in present]
        findings.add(column_problem(path, name, present, schema.documentation) for name in missing)
        if findings.count:
            return findings, rows
    seen = 0
    for number, record in islice(records(path, schema.required + schema.optional), limit):
        seen += 1
        if isinstance(record, Problem):
            findings.add([record])
            continue
        where = place(path, number)
        problems = _missing(record, schema, where) or schema.problems(record, where)
        if problems:
            findings.add(problems)
        else:
            rows.append(schema.row(record, number))
    if not seen:
        findings.add([Problem(f"{path}: the file has no rows", needed="at least one row")])
    return findings, rows


def _missing(record: Record, schema: RowSchema[AnyRow], where: str) -> list[Problem]:
    return [
        Problem(f"{where}: no {name!r}", given=f"keys {', '.join(record)}", needed=name)
        for name in schema.required
        if name not in record
    ]

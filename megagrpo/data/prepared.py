"""What every preparer ends with: prompt files in one schema, written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megagrpo.errors import DataError, Problem

PromptRow = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Prepared:
    """The files written, and their rows. `test` is None if nothing was held out."""

    train: Path
    train_rows: int
    test: Path | None
    test_rows: int


def prompt_row(
    *,
    question: str,
    ground_truth: str,
    data_source: str,
    ability: str = "",
    system_prompt: str = "",
    extra_info: Mapping[str, Any],
) -> PromptRow:
    """One row in the schema of data/rows.py."""
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return {
        "data_source": data_source,
        "prompt": [*system, {"role": "user", "content": question}],
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": dict(extra_info),
    }


def write_splits(output: Path, sources: Sequence[Path], *, train: list[PromptRow], test: list[PromptRow]) -> Prepared:
    """Write `output`/train.parquet and, if there are held-out rows, test.parquet.

    Each is written under a temporary name first; no name changes before all are complete. Raises DataError if a source
    would be overwritten, if the folder cannot be written, or if a column has values of several types.
    """
    splits = {output / f"{name}.parquet": rows for name, rows in (("train", train), ("test", test)) if rows}
    overwritten = {path.resolve() for path in splits} & {path.resolve() for path in sources}
    if overwritten:
        raise DataError(
            Problem(
                f"{output}: the output would overwrite its own source",
                given=", ".join(str(path) for path in sorted(overwritten)),
                needed="another output folder",
            )
        )
    tables = {path: _table(path, rows) for path, rows in splits.items()}
    parts = {path: path.with_name(f".{path.name}.{os.getpid()}.part") for path in splits}
    try:
        output.mkdir(parents=True, exist_ok=True)
        for path, table in tables.items():
            pq.write_table(table, parts[path])
        for path, part in parts.items():
            part.replace(path)
    except OSError as reason:
        raise DataError(
            Problem(f"{output}: cannot be written", given=str(reason), needed="a folder that can be written")
        ) from None
    finally:
        for part in parts.values():
            if part.exists():
                part.unlink()
    return Prepared(output / "train.parquet", len(train), output / "test.parquet" if test else None, len(test))


def _table(path: Path, rows: list[PromptRow]) -> pa.Table:
    try:
        return pa.Table.from_pylist(rows)
    except pa.ArrowException as reason:
        raise DataError(
            Problem(
                f"{path}: the rows do not form a table",
                given=str(reason).splitlines()[0],
                needed="the same type in every row of a column",
            )
        ) from None

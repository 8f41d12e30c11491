"""All samples of runs as columns of numbers: their files, and the columns that filter, sort and choose samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from megagrpo.errors import first_line
from megagrpo.evaluation.responses import FILE_NAME, read_responses
from megagrpo.report.run import RunRead, responses_in
from megagrpo.track.rollout_files import SCHEMA, encodable, rollout_files

NO_STEP = -1
"""Step of the responses of `megagrpo eval`."""
SOLVED, MASKED, FAILED, AGENT = 1, 2, 4, 8
"""Bits of a row's flags."""
TEXTS = ("prompt", "messages", "response", "agent")
READERS = 4
FILES_KEPT = 10_000
CODED = ("set", "data_source", "prompt_id", "finish")
COLUMNS = (
    *("step", "sample", "score", "error", "masked", "solved", "advantage", "prompt_tokens", "tokens", "age"),
    *("rollout_logprobs", "train_logprobs"),
    *(*TEXTS, *CODED),
)


@dataclass(frozen=True)
class Source:
    """A file of samples. run: number of its run. table: the samples, already read, if the file is no parquet."""

    run: int
    path: Path
    table: pa.Table | None = None

    def read(self, columns: Sequence[str]) -> pa.Table:
        """Reads these columns in SCHEMA's types; null where the file has none. Raises OSError and pa.ArrowException."""
        fields = pa.schema([SCHEMA.field(name) for name in columns])
        table = self.table
        if table is None:
            with pq.ParquetFile(self.path) as file:
                there = file.schema_arrow.names
                table = file.read([name for name in columns if name in there])
        arrays = [
            table[field.name].cast(field.type) if field.name in table.column_names else pa.nulls(len(table), field.type)
            for field in fields
        ]
        return pa.table(arrays, schema=fields)


@dataclass(frozen=True)
class Rows:
    """Samples of runs, in the order of their sources. Arrays are [rows]; of strings, codes and the values by code.

    numbers: among them `run`, `flags`, `mismatch` (mean absolute train - rollout logprob in nats, NaN: unknown),
    `figures` (tokens whose figures are on disk) and `bytes` (of its texts).
    """

    source: np.ndarray
    numbers: Mapping[str, np.ndarray]
    codes: Mapping[str, np.ndarray]
    values: Mapping[str, list[str]]

    def __len__(self) -> int:
        return len(self.source)

    def where(self, kept: np.ndarray) -> Rows:
        """Returns the rows that are kept. kept: bool [rows]."""
        numbers = {name: column[kept] for name, column in self.numbers.items()}
        codes = {name: column[kept] for name, column in self.codes.items()}
        return Rows(self.source[kept], numbers, codes, self.values)


def sources_of(run: RunRead, number: int) -> list[Source]:
    """Returns a run's files of samples: rollouts/ by step, evaluations that it lacks, then those of `megagrpo eval`."""
    directory = run.directory
    files = rollout_files(directory)
    found = [Source(number, path) for _, path in files]
    evaluated = {step for step, path in files if path.name.endswith(".eval.parquet")}
    for path in sorted((directory / "evaluations").glob("step_*.jsonl")):
        if (name := FILE_NAME.fullmatch(path.name)) and int(name[1]) not in evaluated:
            found.append(Source(number, path, _responses(path, int(name[1]), "")))
    for path in responses_in(directory):
        found.append(Source(number, path, _responses(path, NO_STEP, path.absolute().parent.name)))
    return found


def read_rows(sources: Sequence[Source]) -> tuple[Rows, list[Source], list[str]]:
    """Reads the rows, and returns them, the readable sources, and a sentence for each unreadable source."""
    parts, coded, read, failed = list[dict[str, np.ndarray]](), list[pa.Table](), list[Source](), list[str]()
    with ThreadPoolExecutor(READERS, "samples of a run") as threads:
        tables = list(threads.map(_facts, sources))
    for source, found in zip(sources, tables, strict=True):
        if isinstance(found, str):
            failed.append(found)
            continue
        numbers, table = found
        of = {"source": np.full(len(table), len(read)), "run": np.full(len(table), source.run)}
        parts.append(numbers | of)
        coded.append(table)
        read.append(source)
    if not parts:
        return Rows(np.empty(0, np.int64), {}, {}, {}), read, failed
    numbers = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    codes, values = dict[str, np.ndarray](), dict[str, list[str]]()
    whole = pa.concat_tables(coded)
    for name in CODED:
        array = pc.fill_null(whole[name], "").dictionary_encode().combine_chunks()
        codes[name], values[name] = array.indices.to_numpy(), array.dictionary.to_pylist()
    return Rows(numbers.pop("source"), numbers, codes, values), read, failed


def _facts(source: Source) -> tuple[dict[str, np.ndarray], pa.Table] | str:
    """Returns numbers [rows] and the CODED columns of a source, or a sentence about the failure to read it."""
    try:
        status = source.path.stat()
        if source.table is not None:
            return _read(source)
        return _read_file(source.path, status.st_mtime_ns, status.st_size)
    except FileNotFoundError:
        return f"{source.path} has gone: the run went back behind its step."
    except (OSError, pa.ArrowException) as error:
        return f"{source.path} can't be read: {first_line(error)}."


@lru_cache(FILES_KEPT)
def _read_file(path: Path, changed: int, size: int) -> tuple[dict[str, np.ndarray], pa.Table]:
    """Reads each file once in a report that follows a run. changed: nanoseconds; size: bytes."""
    return _read(Source(0, path))


def _read(source: Source) -> tuple[dict[str, np.ndarray], pa.Table]:
    table = source.read(COLUMNS)
    return _numbers(table), table.select(CODED)


def _numbers(table: pa.Table) -> dict[str, np.ndarray]:
    rollout, train = (table[name].combine_chunks() for name in ("rollout_logprobs", "train_logprobs"))
    flags = SOLVED * _array(table["solved"], False).astype(np.uint8)
    flags |= (MASKED * _filled(table["masked"])).astype(np.uint8) | (FAILED * _filled(table["error"])).astype(np.uint8)
    flags |= (AGENT * _filled(table["agent"])).astype(np.uint8)
    lengths = [_array(pc.binary_length(table[name]), 0).astype(np.int64) for name in TEXTS]
    return {
        **{
            name: _array(table[name], 0).astype(np.int32)
            for name in ("step", "sample", "prompt_tokens", "tokens", "age")
        },
        **{name: _array(table[name], np.nan).astype(np.float32) for name in ("score", "advantage")},
        "flags": flags,
        "figures": _array(pc.list_value_length(rollout), 0).astype(np.int64),
        "mismatch": _mismatch(rollout, train),
        "bytes": np.sum(lengths, axis=0),
    }


def _mismatch(rollout: pa.ListArray, train: pa.ListArray) -> np.ndarray:
    """Returns the mean absolute difference of each row's logprobs, float32 [rows]; NaN where a row lacks either."""
    sizes, others = (_array(pc.list_value_length(array), 0) for array in (rollout, train))
    both = (sizes == others) & (sizes > 0)
    found = np.full(len(sizes), np.nan, np.float32)
    if both.any():
        one, other = (_array(array.filter(pa.array(both)).flatten(), np.nan) for array in (rollout, train))
        of_row = np.repeat(np.arange(int(both.sum())), sizes[both])
        found[both] = np.bincount(of_row, np.abs(other - one), int(both.sum())) / sizes[both]
    return found


def _array(column: pa.ChunkedArray | pa.Array, null: object) -> np.ndarray:
    filled = pc.fill_null(column, pa.scalar(null, column.type))
    return filled.to_numpy() if isinstance(filled, pa.ChunkedArray) else filled.to_numpy(zero_copy_only=False)


def _filled(column: pa.ChunkedArray) -> np.ndarray:
    """Returns bool [rows]: the row has a text that is not empty."""
    return _array(pc.binary_length(column), 0) > 0


def _responses(path: Path, step: int, model: str) -> pa.Table:
    """Reads the responses of an evaluation's file into SCHEMA. model: for `megagrpo eval`, named beside the set."""
    rows = list[dict[str, Any]]()
    try:
        for response in read_responses(path):
            values = asdict(response)
            parts = {name: value for name, value in values.pop("parts").items() if value is not None}
            values |= {"set": f"{response.set} · {model}" if model else response.set, "sample": values.pop("index")}
            values |= {"step": step, "parts": list(parts.items()), "notes": list(response.notes.items())}
            rows.append({name: encodable(value) for name, value in values.items()})
    except (OSError, ValueError, TypeError):
        pass  # another's file, or one that has ended within a line
    columns = {field.name: pa.array([row.get(field.name) for row in rows], field.type) for field in SCHEMA}
    return pa.table(columns, schema=SCHEMA)

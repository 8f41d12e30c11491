"""The rollouts of a run as a table, also while the run goes on."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from megagrpo.track.rollout_files import SCHEMA, rollout_files

READERS = 4


def read_rollouts(
    directory: Path, steps: Collection[int] | None = None, columns: Sequence[str] | None = None
) -> pa.Table:
    """Reads the rows of these steps (by default all), in the order of the steps; a step's training samples come first.

    columns: names of SCHEMA, by default all; those of tokens are most of the bytes. Files that are not whole, or that
    vanish because the run goes back, are left out. Without a file the table has no rows.
    """
    schema = SCHEMA if columns is None else pa.schema([SCHEMA.field(name) for name in columns])
    paths = [path for step, path in rollout_files(directory) if steps is None or step in steps]
    with ThreadPoolExecutor(READERS) as pool:
        found = list(pool.map(partial(_read, schema=schema), paths))
    return pa.concat_tables([schema.empty_table(), *(table for table in found if table is not None)])


def _read(path: Path, schema: pa.Schema) -> pa.Table | None:
    try:
        with pq.ParquetFile(path) as file:
            return file.read(schema.names, use_threads=False).select(schema.names).cast(schema)
    except (OSError, pa.ArrowException, KeyError):
        return None

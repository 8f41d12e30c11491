"""Rows of an epoch, counted without being read, against what reading and mixing the files gives."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megagrpo.data.files import records, row_count
from megagrpo.data.mixture import epoch_rows, mix
from megagrpo.errors import DataError
from megagrpo.recipe.schema import DataFileConfig


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    table, lines = tmp_path / "a.parquet", tmp_path / "b.jsonl"
    pq.write_table(pa.table({"number": list(range(23))}), table, row_group_size=5)
    lines.write_text("".join(json.dumps({"number": i}) + "\n\n" * (i % 3) for i in range(17)) + '{"number": 17}')
    return table, lines


def test_rows_are_counted_as_they_are_read(files: tuple[Path, Path]) -> None:
    for path in files:
        assert row_count(path) == len(list(records(path)))
    assert row_count(files[0]) == 23


@pytest.mark.parametrize("amounts", [("all", "all"), (5, "all"), (0.5, 2.5), (1.0, 3)])
def test_an_epoch_has_as_many_rows_as_mixing_takes(
    files: tuple[Path, Path], amounts: tuple[str | int | float, str | int | float]
) -> None:
    asked = [DataFileConfig(path=str(path), amount=amount) for path, amount in zip(files, amounts, strict=True)]

    def read(path: Path, label: str) -> tuple[list[object], int, int]:
        found: list[object] = [record for _, record in records(path)]
        return found, len(found), 0

    assert epoch_rows(asked) == len(mix(asked, read, seed=1)[0])


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        epoch_rows([DataFileConfig(path=str(tmp_path / "none.jsonl"))])

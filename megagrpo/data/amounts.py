"""How many rows an epoch has, from the files' row counts and their amounts, without reading what is in them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megagrpo.data.files import row_count
from megagrpo.recipe.schema import DataFileConfig


def epoch_rows(files: Sequence[DataFileConfig]) -> int:
    """Rows of one epoch, over-long ones included. Raises DataError for a file that cannot be read."""
    return sum(_taken(row_count(Path(file.path)), file.amount) for file in files)


def _taken(available: int, amount: int | float | str) -> int:
    """As mixture.take takes them."""
    if isinstance(amount, str):  # all
        return available
    return amount if isinstance(amount, int) else round(amount * available)

"""Numbers for every response token of a step, on the driver: rows of different lengths, laid end to end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Ragged:
    """The numbers of every response token: `values[offsets[r] : offsets[r + 1]]` are row r's, its first token first.

    values: [tokens]; offsets: int64 [rows + 1], from 0 to the number of tokens.
    """

    values: np.ndarray
    offsets: np.ndarray

    def __post_init__(self) -> None:
        if self.offsets[0] != 0 or self.offsets[-1] != len(self.values) or (np.diff(self.offsets) < 0).any():
            raise ValueError(f"offsets {self.offsets} do not divide {len(self.values)} values")

    @property
    def rows(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Returns the tokens of each row, int64 [rows]."""
        return np.diff(self.offsets)

    @property
    def row_of_token(self) -> np.ndarray:
        """Returns the row of each token, int64 [tokens]."""
        return np.repeat(np.arange(self.rows), self.lengths)

    def row(self, index: int) -> np.ndarray:
        return self.values[self.offsets[index] : self.offsets[index + 1]]

    def sums(self) -> np.ndarray:
        """Returns the sum of each row, float64 [rows]; 0 where a row has no tokens."""
        return np.bincount(self.row_of_token, self.values, minlength=self.rows)

    def means(self) -> np.ndarray:
        """Returns the mean of each row, float64 [rows]; 0 where a row has no tokens."""
        return self.sums() / np.maximum(self.lengths, 1)

    def with_values(self, values: np.ndarray) -> Ragged:
        return Ragged(values, self.offsets)


def ragged_zeros(lengths: Sequence[int] | np.ndarray, dtype: type = np.float64) -> Ragged:
    """Returns a 0 for every token of rows of these lengths."""
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)
    return Ragged(np.zeros(int(offsets[-1]), dtype), offsets)

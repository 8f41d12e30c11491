"""Reads a part of a tensor of a safetensors file, by its bytes.

The library maps files into memory, and pages that were read once then count as the process's own.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch

from megagrpo.errors import CheckpointError, Problem
from megagrpo.weights.sides.checkpoint import DTYPES, FP8, Entry
from megagrpo.weights.views import torch_dtype


def read_region(path: Path, entry: Entry, start: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
    """Elements start[i] .. start[i] + shape[i] of the tensor, fp8 as such. Raises CheckpointError if it fails."""
    dtype = torch.float8_e4m3fn if entry.dtype == FP8 else torch_dtype(DTYPES[entry.dtype])
    values = torch.empty(shape, dtype=dtype)
    data = memoryview(values.view(-1).view(torch.uint8).numpy())
    try:
        with path.open("rb", buffering=0) as file:
            _read(file.fileno(), entry.begin, entry.shape, values.itemsize, start, shape, data)
    except OSError as error:
        raise CheckpointError(Problem(str(path), error.strerror or str(error), "a file that can be read")) from error
    return values


def _read(
    descriptor: int,
    begin: int,
    stored: tuple[int, ...],
    item_bytes: int,
    start: tuple[int, ...],
    shape: tuple[int, ...],
    into: memoryview,
) -> None:
    """Reads a region of the row-major tensor of shape `stored` at byte `begin`: at once if it is one run of bytes."""
    row_bytes = math.prod(stored[1:]) * item_bytes
    if shape[1:] == stored[1:]:
        offset = begin + (start[0] * row_bytes if start else 0)
        while into:
            count = os.preadv(descriptor, [into], offset)
            if not count:
                raise OSError(f"it ends before byte {offset + len(into)}")
            into, offset = into[count:], offset + count
        return
    each = len(into) // shape[0]
    for row in range(shape[0]):
        at = begin + (start[0] + row) * row_bytes
        _read(descriptor, at, stored[1:], item_bytes, start[1:], shape[1:], into[row * each : (row + 1) * each])

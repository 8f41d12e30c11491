"""Compares two checkpoints as models, element by element. Each may be of any kind."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from megagrpo.convert.job import Advance
from megagrpo.convert.source import CONFIG, Source, open_source
from megagrpo.progress import progress
from megagrpo.weights.boxes import ITEM_BYTES
from megagrpo.weights.families.parts.part import Tensor
from megagrpo.weights.sides.checkpoint import Entry
from megagrpo.weights.views import torch_dtype

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
PIECE_BYTES = 4 * 1024**2
"""Bytes of each checkpoint that are compared at once."""


@dataclass(frozen=True)
class Difference:
    """A tensor that differs. `largest` is None where values cannot be compared."""

    tensor: str
    what: str
    largest: float | None = None

    def __str__(self) -> str:
        return f"{self.tensor}: {self.what}"


@dataclass(frozen=True)
class Comparison:
    """The result of `verify`. `left_out`: tensors outside of the model that only one side stores, by checkpoint."""

    tensors: int
    bytes: int
    differences: tuple[Difference, ...]
    left_out: tuple[tuple[Path, tuple[str, ...]], ...]

    @property
    def largest(self) -> float:
        """Returns the largest difference of two values anywhere; NaN against a number counts as infinite."""
        return max((one.largest for one in self.differences if one.largest is not None), default=0.0)


@torch.no_grad()
def verify(first: Path, second: Path, *, model: Path | None = None, dtype: str | None = None) -> Comparison:
    """Compares every tensor of the model bit by bit; `dtype`: after a cast of both to it.

    A checkpoint without a config is read with that of `model`, or else of the other one.
    """
    left, right = (_open(first, second, model), _open(second, first, model))
    shapes = {tensor.name: tensor for tensor in right.tensors}
    differences: list[Difference] = []
    total = sum(_bytes(left, tensor) for tensor in left.tensors)
    with progress(f"{first.name} and {second.name}", total, "bytes") as work:
        for tensor in left.tensors:
            other = shapes.pop(tensor.name, None)
            if other is None:
                differences.append(Difference(tensor.name, f"only in {first}"))
            elif other.shape != tensor.shape:
                differences.append(Difference(tensor.name, f"{list(tensor.shape)} and {list(other.shape)}"))
            else:
                differences += _compare(left, right, tensor, dtype, work.advance)
    differences += [Difference(name, f"only in {second}") for name in shapes]
    # A Hugging Face directory has them for its exports.
    carried = [its.carried if its.directory == its.model_directory else {} for its in (left, right)]
    both = carried[0].keys() & carried[1].keys()
    differences += [
        Difference(name, "copies that differ, of a tensor that is not trained")
        for name in sorted(both)
        if not _same_bytes(*(side[name] for side in carried))
    ]
    others = ((side.directory, tuple(name for name in side.left_out if name not in both)) for side in (left, right))
    found = len(left.tensors) + len(both), total + sum(carried[0][name][1].bytes for name in both)
    return Comparison(*found, tuple(differences), tuple((directory, names) for directory, names in others if names))


def _same_bytes(left: tuple[Path, Entry], right: tuple[Path, Entry]) -> bool:
    """Returns whether two tensors of files have the same dtype, shape and bits."""
    (first, mine), (second, theirs) = left, right
    if (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape):
        return False
    with first.open("rb") as one, second.open("rb") as other:
        one.seek(mine.begin)
        other.seek(theirs.begin)
        sizes = (min(PIECE_BYTES, mine.bytes - at) for at in range(0, mine.bytes, PIECE_BYTES))
        return all(one.read(size) == other.read(size) for size in sizes)


def _open(path: Path, other: Path, model: Path | None) -> Source:
    if (path / CONFIG).is_file():
        return open_source(path)
    return open_source(path, model, otherwise=other if (other / CONFIG).is_file() else None)


def _compare(left: Source, right: Source, tensor: Tensor, dtype: str | None, advance: Advance) -> list[Difference]:
    dtypes = left.dtypes[tensor.name], right.dtypes[tensor.name]
    if dtype is None and dtypes[0] != dtypes[1]:
        advance(_bytes(left, tensor))
        return [Difference(tensor.name, f"{dtypes[0]} and {dtypes[1]}")]
    count, largest, first = 0, 0.0, ""
    for box in tensor.box.pieces(PIECE_BYTES // ITEM_BYTES[dtypes[0]]):
        values, others = left.read(box), right.read(box)
        advance(values.nbytes)
        if dtype is not None:
            values, others = values.to(torch_dtype(dtype)), others.to(torch_dtype(dtype))
        differ = values.view(BITS[values.itemsize]) != others.view(BITS[values.itemsize])
        if not differ.any():
            continue
        mine, theirs = values[differ].double(), others[differ].double()
        distance = (mine - theirs).abs()
        distance[mine == theirs] = 0.0  # zeros of both signs, infinities
        largest = max(largest, float(distance.nan_to_num(nan=math.inf, posinf=math.inf).max()))
        if not count:
            at = [index + offset for index, offset in zip(differ.nonzero()[0].tolist(), box.start, strict=True)]
            first = f"first at {at}: {mine[0].item():.9g} and {theirs[0].item():.9g}"
        count += len(mine)
    left.forget()
    right.forget()
    share = f"{count:,} of {math.prod(tensor.shape):,} elements, by at most {largest:.3g}"
    return [Difference(tensor.name, f"{share}; {first}", largest)] if count else []


def _bytes(source: Source, tensor: Tensor) -> int:
    return math.prod(tensor.shape) * ITEM_BYTES[source.dtypes[tensor.name]]

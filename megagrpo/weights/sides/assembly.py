"""Builds a manifest from whole tensors, runs of rows and shards of columns: the words in which sides describe it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from megagrpo.weights.boxes import Box, Fill, Manifest, Placement, Storage
from megagrpo.weights.families.architecture import Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """`count` consecutive rows (axis 0) of a checkpoint tensor, from row `start`. Padding, where `tensor` is None."""

    tensor: Tensor | None
    start: int
    count: int


def all_rows(tensor: Tensor) -> Rows:
    return Rows(tensor, 0, tensor.shape[0])


def shard(tensor: Tensor, index: int, shards: int) -> Rows:
    """The `index`-th of `shards` equal runs of rows."""
    count = tensor.shape[0] // shards
    return Rows(tensor, index * count, count)


def cut(fused: Iterable[Rows], first: int, count: int) -> Iterator[Rows]:
    """Rows first .. first + count of the concatenation of `fused`."""
    begin = 0
    for rows in fused:
        low, high = max(first, begin), min(first + count, begin + rows.count)
        if low < high:
            yield Rows(rows.tensor, rows.start + low - begin, high - low)
        begin += rows.count


class ManifestBuilder:
    """Collects storages and what lies in them. All storages have the same dtype."""

    def __init__(self, holder: str, dtype: str) -> None:
        self._holder = holder
        self._dtype = dtype
        self._storages: dict[str, Storage] = {}
        self._placements: list[Placement] = []
        self._fills: list[Fill] = []

    def rows(self, storage: str, parts: Iterable[Rows], rest: tuple[int, ...]) -> None:
        """A storage that is these rows one after another. `rest` is its shape after axis 0."""
        at, zeros = 0, (0,) * len(rest)
        for part in parts:
            if part.tensor is None:
                self._fills.append(Fill(storage, (at, *zeros), (part.count, *rest)))
            else:
                box = Box(part.tensor.name, (part.start, *zeros), (part.count, *rest))
                self._placements.append(Placement(storage, (at, *zeros), tuple(range(len(box.shape))), box))
            at += part.count
        self._storages[storage] = Storage(storage, (at, *rest), self._dtype)

    def whole(self, storage: str, tensor: Tensor) -> None:
        self.rows(storage, [all_rows(tensor)], tensor.shape[1:])

    def columns(self, storage: str, tensor: Tensor, index: int, shards: int) -> None:
        """A storage that is the `index`-th of `shards` equal runs of columns (axis 1) of a matrix."""
        rows, count = tensor.shape[0], tensor.shape[1] // shards
        self._storages[storage] = Storage(storage, (rows, count), self._dtype)
        self._placements.append(Placement(storage, (0, 0), (0, 1), Box(tensor.name, (0, index * count), (rows, count))))

    def stacked(self, storage: str, experts: list[list[Tensor]]) -> None:
        """A 3-D storage: at index e of axis 0, the rows of the matrices experts[e] one after another."""
        for index, tensors in enumerate(experts):
            at = 0
            for tensor in tensors:
                box = Box(tensor.name, (0, 0), (tensor.shape[0], tensor.shape[1]))
                self._placements.append(Placement(storage, (index, at, 0), (None, 0, 1), box))
                at += tensor.shape[0]
            self._storages[storage] = Storage(storage, (len(experts), at, tensors[0].shape[1]), self._dtype)

    def build(self) -> Manifest:
        return Manifest(self._holder, self._storages, tuple(self._placements), tuple(self._fills))

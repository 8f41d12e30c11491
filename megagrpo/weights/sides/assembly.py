"""Builds a manifest from whole tensors, runs of rows and shards of columns: the words in which sides describe it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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


def padded_shard(tensor: Tensor, padded: int, index: int, shards: int) -> Iterator[Rows]:
    """The `index`-th of `shards` equal runs of rows of the tensor with padding behind it, `padded` rows in all."""
    count = padded // shards
    return cut([all_rows(tensor), Rows(None, 0, padded - tensor.shape[0])], index * count, count)


def shard_padded(tensor: Tensor, index: int, shards: int, width: int) -> Iterator[Rows]:
    """The `index`-th of `shards` equal runs of rows, and padding behind it, `width` rows in all."""
    part = shard(tensor, index, shards)
    return cut([part, Rows(None, 0, width - part.count)], 0, width)


def cut(fused: Iterable[Rows], first: int, count: int) -> Iterator[Rows]:
    """Rows first .. first + count of the concatenation of `fused`."""
    begin = 0
    for rows in fused:
        low, high = max(first, begin), min(first + count, begin + rows.count)
        if low < high:
            yield Rows(rows.tensor, rows.start + low - begin, high - low)
        begin += rows.count


class ManifestBuilder:
    """Collects storages and what lies in them."""

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
        """A storage that is a checkpoint tensor, in the dtype that it has in every side (Tensor.stored_as)."""
        self.rows(storage, [all_rows(tensor)], tensor.shape[1:])
        self._storages[storage] = Storage(storage, tensor.shape, tensor.stored_as(self._dtype))

    def columns(self, storage: str, tensor: Tensor, index: int, shards: int, padded: int | None = None) -> None:
        """A storage that is the `index`-th of `shards` equal runs of columns (axis 1) of a matrix.

        `padded` is its number of columns with padding, before it is cut; None: no padding.
        """
        count = (padded or tensor.shape[1]) // shards
        real = max(0, min(tensor.shape[1] - index * count, count))
        self._columns(storage, (), tensor, index * count, real, count)
        self._storages[storage] = Storage(storage, (tensor.shape[0], count), self._dtype)

    def stacked(self, storage: str, experts: Sequence[Iterable[Rows]], columns: int) -> None:
        """A 3-D storage: at index e of axis 0, the rows experts[e] one after another, each of `columns` elements."""
        at = 0
        for index, parts in enumerate(experts):
            at = 0
            for part in parts:
                if part.tensor is None:
                    self._fills.append(Fill(storage, (index, at, 0), (1, part.count, columns)))
                else:
                    box = Box(part.tensor.name, (part.start, 0), (part.count, columns))
                    self._placements.append(Placement(storage, (index, at, 0), (None, 0, 1), box))
                at += part.count
        self._storages[storage] = Storage(storage, (len(experts), at, columns), self._dtype)

    def stacked_columns(self, storage: str, experts: Sequence[Tensor], index: int, shards: int, width: int) -> None:
        """A 3-D storage: at index e of axis 0, the `index`-th of `shards` runs of columns of the matrix experts[e].

        Each run has padding behind it, up to `width`.
        """
        for expert, tensor in enumerate(experts):
            real = tensor.shape[1] // shards
            self._columns(storage, (expert,), tensor, index * real, real, width)
        self._storages[storage] = Storage(storage, (len(experts), experts[0].shape[0], width), self._dtype)

    def _columns(
        self, storage: str, expert: tuple[int, ...], tensor: Tensor, start: int, real: int, count: int
    ) -> None:
        """`real` columns of a matrix from `start` on, and padding up to `count`; `expert` is its index in a stack."""
        rows = tensor.shape[0]
        if real:
            box = Box(tensor.name, (0, start), (rows, real))
            axes = (*(None for _ in expert), 0, 1)
            self._placements.append(Placement(storage, (*expert, 0, 0), axes, box))
        if count > real:
            shape = (*(1 for _ in expert), rows, count - real)
            self._fills.append(Fill(storage, (*expert, 0, real), shape))

    def build(self) -> Manifest:
        return Manifest(self._holder, self._storages, tuple(self._placements), tuple(self._fills))

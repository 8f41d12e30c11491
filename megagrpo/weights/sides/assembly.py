"""Tools to describe sides: the model's tensors by role, and a builder of manifests from rows and columns."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from megagrpo.weights.boxes import Box, Fill, Manifest, Placement, Storage
from megagrpo.weights.families import tensors_of
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.families.parts.part import LayerTensors, Role, Roles, Rows, Tensor, all_rows


@dataclass(frozen=True)
class ModelTensors:
    """The tensors outside the layers (embedding, final norm, head), and the layers in order."""

    roles: Roles
    layers: tuple[LayerTensors, ...]


@lru_cache(maxsize=4)
def tensors_by_role(arch: Architecture) -> ModelTensors:
    """Returns the model's tensors by role. Cached: every rank asks for them, and a large model has 100,000 tensors."""
    model: dict[Role, Tensor] = {}
    layers: list[dict[Role, Tensor]] = [{} for _ in arch.layers]
    experts: list[dict[int, dict[Role, Tensor]]] = [defaultdict(dict) for _ in arch.layers]
    for tensor in tensors_of(arch):
        if tensor.layer is None:
            model[tensor.role] = tensor
        elif tensor.expert is None:
            layers[tensor.layer][tensor.role] = tensor
        else:
            experts[tensor.layer][tensor.expert][tensor.role] = tensor
    sorted_experts = (tuple(layer[index] for index in sorted(layer)) for layer in experts)
    return ModelTensors(model, tuple(map(LayerTensors, layers, sorted_experts)))


def shard(tensor: Tensor, index: int, shards: int) -> Rows:
    """Returns the `index`-th of `shards` equal runs of rows."""
    count = tensor.shape[0] // shards
    return Rows(tensor, index * count, count)


def padded_shard(tensor: Tensor, padded: int, index: int, shards: int) -> Iterator[Rows]:
    """Returns the `index`-th of `shards` equal runs of rows of the tensor, which padding extends to `padded` rows."""
    count = padded // shards
    return cut([all_rows(tensor), Rows(None, 0, padded - tensor.shape[0])], index * count, count)


def shard_padded(tensor: Tensor, index: int, shards: int, width: int) -> Iterator[Rows]:
    """Returns the `index`-th of `shards` equal runs of rows, with padding behind it, `width` rows in all."""
    part = shard(tensor, index, shards)
    return cut([part, Rows(None, 0, width - part.count)], 0, width)


def cut(fused: Iterable[Rows], first: int, count: int) -> Iterator[Rows]:
    """Yields rows first .. first + count of the concatenation of `fused`."""
    begin = 0
    for rows in fused:
        low, high = max(first, begin), min(first + count, begin + rows.count)
        if low < high:
            yield Rows(rows.tensor, rows.start + low - begin, high - low)
        begin += rows.count


class ManifestBuilder:
    """A builder of one manifest, which collects storages and the boxes that lie in them."""

    def __init__(self, holder: str, dtype: str) -> None:
        self._holder = holder
        self.dtype = dtype
        self._storages: dict[str, Storage] = {}
        self._placements: list[Placement] = []
        self._fills: list[Fill] = []

    def rows(self, storage: str, parts: Iterable[Rows], rest: tuple[int, ...], dtype: str = "") -> None:
        """Adds a storage of these rows one after another. `rest` is its shape after axis 0."""
        count = self._rows(storage, (), parts, rest)
        self._storages[storage] = Storage(storage, (count, *rest), dtype or self.dtype)

    def whole(self, storage: str, tensor: Tensor, dtype: str = "") -> None:
        """Adds a storage of a whole checkpoint tensor, by default in the dtype of every side (Tensor.stored_as)."""
        self.rows(storage, [all_rows(tensor)], tensor.shape[1:], dtype or tensor.stored_as(self.dtype))

    def columns(self, storage: str, tensor: Tensor, index: int, shards: int, padded: int | None = None) -> None:
        """Adds a storage of the `index`-th of `shards` equal runs of columns (axis 1) of a matrix.

        `padded` is the matrix's number of columns with padding; None: no padding.
        """
        count = (padded or tensor.shape[1]) // shards
        real = max(0, min(tensor.shape[1] - index * count, count))
        self._columns(storage, (), tensor, index * count, real, count)
        self._storages[storage] = Storage(storage, (tensor.shape[0], count), self.dtype)

    def stacked(self, storage: str, experts: Sequence[Iterable[Rows]], rest: tuple[int, ...], dtype: str = "") -> None:
        """Adds a storage: at index e of axis 0, the rows experts[e] in order. `rest` is its shape after axis 1."""
        counts = [self._rows(storage, (index,), parts, rest) for index, parts in enumerate(experts)]
        self._storages[storage] = Storage(storage, (len(experts), counts[0], *rest), dtype or self.dtype)

    def alternating(
        self,
        storage: str,
        experts: Sequence[Sequence[Tensor]],
        index: int = 0,
        shards: int = 1,
        dtype: str = "",
        *,
        transposed: bool = False,
    ) -> None:
        """Adds a storage: at index e of axis 0, rows of the tensors experts[e] alternate, in run `index` of `shards`
        runs of each one's rows. `transposed`: as columns."""
        rows, *rest = experts[0][0].shape
        shape, start = (rows // shards, *rest), (index * (rows // shards), *(0 for _ in rest))
        behind = range(1, len(shape))
        axes = (None, *behind, 0, None) if transposed else (None, 0, None, *behind)
        for expert, tensors in enumerate(experts):
            for turn, tensor in enumerate(tensors):
                at = (expert, *(turn if axis is None else 0 for axis in axes[1:]))
                self._placements.append(Placement(storage, at, axes, Box(tensor.name, start, shape)))
        local = (len(experts[0]) if axis is None else shape[axis] for axis in axes[1:])
        folded = 1 if transposed else len(shape)
        self._storages[storage] = Storage(storage, (len(experts), *local), dtype or self.dtype, folded)

    def stacked_columns(self, storage: str, experts: Sequence[Tensor], index: int, shards: int, width: int) -> None:
        """Adds a 3-D storage: at index e of axis 0, run `index` of `shards` runs of columns of the matrix experts[e].

        Each run has padding behind it, up to `width`.
        """
        for expert, tensor in enumerate(experts):
            real = tensor.shape[1] // shards
            self._columns(storage, (expert,), tensor, index * real, real, width)
        self._storages[storage] = Storage(storage, (len(experts), experts[0].shape[0], width), self.dtype)

    def build(self) -> Manifest:
        return Manifest(self._holder, self._storages, tuple(self._placements), tuple(self._fills))

    def _rows(self, storage: str, expert: tuple[int, ...], parts: Iterable[Rows], rest: tuple[int, ...]) -> int:
        """Adds rows one after another and returns their number; `expert` is their index in a stack."""
        row, zeros = 0, (0,) * len(rest)
        axes = (*[None] * len(expert), *range(1 + len(rest)))
        for part in parts:
            at, shape = (*expert, row, *zeros), (part.count, *rest)
            if part.tensor is None:
                self._fills.append(Fill(storage, at, (*(1 for _ in expert), *shape)))
            else:
                box = Box(part.tensor.name, (part.start, *zeros), shape)
                self._placements.append(Placement(storage, at, axes, box))
            row += part.count
        return row

    def _columns(
        self, storage: str, expert: tuple[int, ...], tensor: Tensor, start: int, real: int, count: int
    ) -> None:
        """Adds `real` columns of a matrix from `start` on, and padding up to `count`; `expert` as in `_rows`."""
        rows = tensor.shape[0]
        if real:
            box = Box(tensor.name, (0, start), (rows, real))
            self._placements.append(Placement(storage, (*expert, 0, 0), (*(None for _ in expert), 0, 1), box))
        if count > real:
            shape = (*(1 for _ in expert), rows, count - real)
            self._fills.append(Fill(storage, (*expert, 0, real), shape))

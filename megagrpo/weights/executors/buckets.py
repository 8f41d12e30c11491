"""A plan carried by flat byte arrays, for any transport that moves bytes: shared memory, a process group.

Both ends hold the same plan, so a bucket says only which one it is; what lies where in it follows from the plan.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np
import torch

from megagrpo.weights.boxes import ITEM_BYTES, Box, Placement
from megagrpo.weights.plan import WeightPlan
from megagrpo.weights.routes import Transfer
from megagrpo.weights.views import box_view, torch_dtype

ALIGNMENT = 16
SLOTS = 2
"""Buckets that one end holds at a time: one is filled while the other is taken."""


@torch.no_grad()
def pack_pieces(pieces: Iterable[Piece], storages: Mapping[str, torch.Tensor], flat: torch.Tensor) -> None:
    """Values of `storages` into a bucket: `flat` is uint8, at least as long as the last piece's end."""
    for piece in pieces:
        piece.view_in(flat).copy_(box_view(storages[piece.source.storage], piece.source))


@torch.no_grad()
def unpack_pieces(pieces: Iterable[Piece], storages: Mapping[str, torch.Tensor], flat: torch.Tensor) -> None:
    """Values of a bucket into `storages`."""
    for piece in pieces:
        box_view(storages[piece.destination.storage], piece.destination).copy_(piece.view_in(flat))


def finish_copies(flat: torch.Tensor) -> None:
    """Copies on a GPU are done when the other end may look."""
    if flat.is_cuda:
        torch.cuda.current_stream(flat.device).synchronize()


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a transfer, at bytes begin .. end of its bucket, in row-major order of its box."""

    source: Placement
    destination: Placement
    dtype: torch.dtype
    begin: int
    end: int

    def view_in(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self.begin : self.end].view(self.dtype).view(self.source.box.shape)


@lru_cache(maxsize=1024)
def contents(plan: WeightPlan, source: int, destination: int, bucket_bytes: int) -> tuple[tuple[Piece, ...], ...]:
    """What each bucket from `source` straight to `destination` carries. The same at both ends."""
    return cut_into_buckets(plan, plan.between(source, destination), bucket_bytes)


def cut_into_buckets(
    plan: WeightPlan, transfers: Iterable[Transfer], bucket_bytes: int
) -> tuple[tuple[Piece, ...], ...]:
    """Transfers to one destination, in their order, as buckets of at most `bucket_bytes` (but one element at least)."""
    buckets: list[list[Piece]] = []
    begin = bucket_bytes
    for transfer in transfers:
        storage = plan.destinations[transfer.destination].storages[transfer.destination_placement.storage]
        item_bytes = ITEM_BYTES[storage.dtype]
        for box in _cut(transfer.box, max(1, bucket_bytes // item_bytes)):
            end = begin + box.elements * item_bytes
            if end > bucket_bytes:
                buckets.append([])
                begin, end = 0, box.elements * item_bytes
            come, go = transfer.source_placement.part(box), transfer.destination_placement.part(box)
            buckets[-1].append(Piece(come, go, torch_dtype(storage.dtype), begin, end))
            begin = -(-end // ALIGNMENT) * ALIGNMENT
    return tuple(tuple(pieces) for pieces in buckets)


def _cut(box: Box, elements: int) -> Iterator[Box]:
    """The box in parts of at most this many elements: runs of rows, and parts of a row where one is too long."""
    if box.elements <= elements:
        yield box
        return
    axis = next(index for index, size in enumerate(box.shape) if size > 1)
    step = max(1, elements // prod(box.shape[axis + 1 :]))
    for low in range(0, box.shape[axis], step):
        start = (*box.start[:axis], box.start[axis] + low, *box.start[axis + 1 :])
        shape = (*box.shape[:axis], min(step, box.shape[axis] - low), *box.shape[axis + 1 :])
        yield from _cut(Box(box.tensor, start, shape), elements)


def read_only_tensor(data: np.ndarray) -> torch.Tensor:
    """The bytes as a tensor, without a copy. A mapped file may be read-only, of which torch warns."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(data)

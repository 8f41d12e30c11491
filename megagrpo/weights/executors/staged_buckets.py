"""Whole tensors cut into buckets without cutting a tensor: what an engine's server is given in one request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod

from megagrpo.weights.boxes import ITEM_BYTES, Storage
from megagrpo.weights.executors.buckets import ALIGNMENT


@dataclass(frozen=True)
class StagedBucket:
    """Whole tensors that go to a server in one request: by name, the byte in the slot where each begins."""

    begins: Mapping[str, int]
    bytes: int


def staged_buckets(
    storages: Iterable[Storage],
    bucket_bytes: int,
    together: Callable[[str], str] = str,
    alignment: int = ALIGNMENT,
) -> tuple[StagedBucket, ...]:
    """In their order, at most `bucket_bytes` at once, but whole: a larger tensor is a bucket of its own.

    Tensors that follow one another and for which `together` gives the same text are not separated.
    """
    units: list[list[Storage]] = []
    key = None
    for storage in storages:
        if not units or together(storage.name) != key:
            units.append([])
        key = together(storage.name)
        units[-1].append(storage)
    buckets: list[dict[str, int]] = []
    end = 0
    for unit in units:
        unit_bytes = sum(_aligned(storage_bytes(storage), alignment) for storage in unit)
        if not buckets or end + unit_bytes > bucket_bytes:
            buckets.append({})
            end = 0
        for storage in unit:
            buckets[-1][storage.name] = end
            end += _aligned(storage_bytes(storage), alignment)
    sizes = {storage.name: storage_bytes(storage) for unit in units for storage in unit}
    return tuple(
        StagedBucket(begins, max(at + _aligned(sizes[name], alignment) for name, at in begins.items()))
        for begins in buckets
    )


def storage_bytes(storage: Storage) -> int:
    return prod(storage.shape) * ITEM_BYTES[storage.dtype]


def _aligned(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment

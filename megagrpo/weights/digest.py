"""Digests that verify a sync: one for each checkpoint tensor, independent of how the tensor is cut over ranks.

    digest(tensor) = sum over its elements of mix(element) * w0[i0] * w1[i1] ...   mod 2**64
    mix(element)   = GAMMA + sum over its bytes b of byte[b] * 511**b               byte[b] from -128 to 127

where i0, i1 are the element's indices in the checkpoint tensor, and w0 and w1 are fixed pseudo-random odd numbers. Sums
over disjoint boxes add, so the digest of a tensor that is cut over many ranks is the sum of theirs.

A single changed element of up to four bytes always changes the digest: bytes differ by 255 at most, so the digits of a
difference in base 511 are unique, and an odd weight loses no bit. Any other change, of whichever elements, is missed by
fewer than one in 2**50 choices of the weights: with the weights of an axis drawn last, the sum of what one changed
element stands for takes 2**(63 - v) values equally often, where 2**v divides the change of mix; v is 7 at most, if only
the highest bits of bytes changed, and each further axis loses about a bit (Carter and Wegman, "Universal classes of
hash functions", 1979).

A digest is linear in the bytes, so that on a CPU the sums over columns are products of int8 matrices, which read memory
as it lies: weights are ten digits in base 128, small enough that no processor's int8 products overflow.

Every training rank digests its part of what each engine rank must have. The driver adds the parts up and compares them
with the engine rank's own digests, tensor by tensor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import lru_cache, reduce

import torch

from megagrpo import splitmix64
from megagrpo.errors import Problem
from megagrpo.weights.boxes import Placement
from megagrpo.weights.plan import WeightPlan
from megagrpo.weights.views import box_view, torch_dtype

MODULUS = 1 << 64
DIGIT_BITS, DIGITS = 7, 10
DIGIT_COLUMNS = 16
"""Products are as fast with 16 columns as with 10, or faster."""
POWERS = 1 << (DIGIT_BITS * torch.arange(DIGIT_COLUMNS, device="cpu")).clamp(max=63)
"""The power of 128 of each column of digits, int64 on the CPU."""
PRODUCT_BYTES_MAX = 1 << 17
"""Bytes of a row in one product, so that their sum fits int32."""
CHUNK_BYTES = {"cpu": 1 << 22, "cuda": 1 << 24}
"""Bytes that are digested at a time. On a GPU the 64-bit temporary is 128 MiB."""


@torch.no_grad()
def digests(
    tensors: Mapping[str, torch.Tensor], placements: Iterable[Placement], dtype: str | None = None
) -> dict[str, int]:
    """Returns partial digests, by checkpoint tensor, of the elements in `placements` of these local tensors.

    With `dtype` (a Storage's), the values are cast to it first. Digests of different dtypes are not comparable.
    """
    names, sums, threads = [], [], torch.get_num_threads()
    torch.set_num_threads(1)  # where ranks and engines share the cores, several would wait for one another
    try:
        for placement in placements:
            view = box_view(tensors[placement.storage], placement)
            names.append(placement.box.tensor)
            sums.append(_digest(view, placement.box.start, torch_dtype(dtype) if dtype else view.dtype))
    finally:
        torch.set_num_threads(threads)
    totals = torch.stack(sums).tolist() if sums else []
    return combine({name: total} for name, total in zip(names, totals, strict=True))


def combine(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Returns the sums of partial digests by tensor: the whole tensors' if the parts count every element once."""
    totals: dict[str, int] = defaultdict(int)
    for part in parts:
        for name, value in part.items():
            totals[name] = (totals[name] + value) % MODULUS
    return dict(totals)


def sent_digests(
    plan: WeightPlan, source: int, tensors: Mapping[str, torch.Tensor], destinations: Iterable[int] | None = None
) -> dict[int, dict[str, int]]:
    """Returns the partial digests of all bytes from `source`, relayed or not, by destination and checkpoint tensor.
    Values are digested in the destination's dtype, and only once if they go to several destinations."""
    wanted = range(len(plan.destinations)) if destinations is None else frozenset(destinations)
    known: dict[tuple[Placement, str], dict[str, int]] = {}
    parts: dict[int, list[Mapping[str, int]]] = defaultdict(list)
    for transfer in plan.outgoing(source):
        if transfer.destination not in wanted:
            continue
        placement = transfer.source_placement
        dtype = plan.destinations[transfer.destination].storages[transfer.destination_placement.storage].dtype
        if (placement, dtype) not in known:
            known[placement, dtype] = digests(tensors, [placement], dtype)
        parts[transfer.destination].append(known[placement, dtype])
    return {destination: combine(of_one) for destination, of_one in parts.items()}


def expected_digests(parts: Iterable[Mapping[int, Mapping[str, int]]]) -> dict[int, dict[str, int]]:
    """Returns the digests that each destination must have, by checkpoint tensor, from all sources' `sent_digests`."""
    by_destination: dict[int, list[Mapping[str, int]]] = defaultdict(list)
    for part in parts:
        for destination, of_tensor in part.items():
            by_destination[destination].append(of_tensor)
    return {destination: combine(of_one) for destination, of_one in by_destination.items()}


def digest_problems(holder: str, expected: Mapping[str, int], arrived: Mapping[str, int]) -> list[Problem]:
    """Returns a problem for each tensor whose digest on `holder`, such as "engine 0 rank 1", is not as sent."""
    return [
        Problem(
            where=f"{tensor} on {holder} after the sync",
            given=f"digest {arrived[tensor]:016x}" if tensor in arrived else "nothing",
            needed=f"digest {expected[tensor]:016x}, as on the training ranks"
            if tensor in expected
            else "no such tensor",
            fix="the bytes changed on the way, or a side places the tensor wrongly; this engine will not generate",
        )
        for tensor in sorted(expected.keys() | arrived.keys())
        if expected.get(tensor) != arrived.get(tensor)
    ]


def _digest(view: torch.Tensor, start: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Returns the digest of a block that begins at `start` in its tensor: an int64 scalar on the block's device."""
    device, one = view.device, torch.ones(1, dtype=torch.int64, device=view.device)
    *others, last = sorted(range(view.dim()), key=view.stride, reverse=True) or [0]  # as they lie in memory
    spans = (_weights(axis, start[axis], view.shape[axis], device) for axis in others)
    rows = reduce(lambda left, right: (left[:, None] * right).flatten(), spans, one)
    if view.dim() == 0:  # no index, no weight
        span, block = None, view.reshape(1, 1)
    else:
        span, block = (last, start[last], view.shape[last]), view.permute(*others, last).reshape(len(rows), -1)
    columns, digits, constant = _columns(span, dtype.itemsize, device)
    total = rows.sum() * constant
    step = max(1, CHUNK_BYTES[device.type] // len(columns))
    for low in range(0, len(rows), step):
        values, weights = block[low : low + step].to(dtype), rows[low : low + step]
        data = (values if values.stride(1) == 1 else values.contiguous()).view(torch.int8)
        if data.is_cuda or len(weights) == 1:
            total += ((data * columns).sum(1) * weights).sum()
            continue
        for part, of_part in zip(data.split(PRODUCT_BYTES_MAX, 1), digits.split(PRODUCT_BYTES_MAX), strict=True):
            total += ((torch._int_mm(part, of_part) * weights[:, None]).sum(0) * POWERS).sum()
    return total


@lru_cache(maxsize=64)
def _columns(
    span: tuple[int, int, int] | None, itemsize: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the weights of all bytes of a row, int64 [bytes]; the same in base 128, int8 [bytes, DIGIT_COLUMNS]; and
    the weighted sum of a row of zeros, int64. `span` is an axis's number, start and count; None: one element without
    an index."""
    weights = _weights(*span, device) if span else torch.ones(1, dtype=torch.int64, device=device)
    constant = weights.sum() * splitmix64.GAMMA
    weights = (weights[:, None] * torch.tensor([511**place for place in range(itemsize)], device=device)).flatten()
    digits = torch.zeros(len(weights), DIGIT_COLUMNS, dtype=torch.int8, device=device)
    rest = weights
    for place in range(DIGITS):
        digits[:, place] = ((rest + 64) & 127) - 64
        rest = (rest - digits[:, place]) >> DIGIT_BITS
    return weights, digits, constant


def _weights(axis: int, start: int, count: int, device: torch.device) -> torch.Tensor:
    """Returns the odd weights of indices start .. start + count on one axis: int64 [count]."""
    return _weight_table(axis, 1 << (start + count - 1).bit_length(), device)[start : start + count]


@lru_cache(maxsize=64)
def _weight_table(axis: int, count: int, device: torch.device) -> torch.Tensor:
    """Returns SplitMix64 of each index, seeded by the axis and made odd."""
    states = torch.arange(1, count + 1, dtype=torch.int64, device=device) * splitmix64.GAMMA
    return splitmix64.mixed(states + splitmix64.signed(0xD1B54A32D192ED03) * (axis + 1) % (1 << 62)) | 1

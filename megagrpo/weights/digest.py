"""Did the bytes arrive? A digest of each checkpoint tensor that does not depend on how the tensor is cut over ranks.

    digest(tensor) = sum over its elements of mix(bits) * w0[i0] * w1[i1] ...   mod 2**64

where i0, i1 are the element's indices in the checkpoint tensor, w0 and w1 are fixed pseudo-random odd numbers, and mix
is a bijection on 64-bit integers (a multiplication and a xor-shift). Sums over disjoint boxes add, so the digest of a
tensor that is cut over many ranks is the sum of theirs. An odd weight loses no bit: a single changed element always
changes the digest.

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
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CHUNK_ELEMENTS = {"cpu": 1 << 15, "cuda": 1 << 24}
"""Elements at once. On a CPU as many as torch gives to one thread: more threads gain nothing, and wait for one another
if ranks and engines share the cores. On a GPU the two 64-bit temporaries are a few hundred MiB."""


@torch.no_grad()
def digests(
    tensors: Mapping[str, torch.Tensor], placements: Iterable[Placement], dtype: str | None = None
) -> dict[str, int]:
    """Partial digests, by checkpoint tensor, of what lies in `placements` of these local tensors.

    With `dtype` (a Storage's), the values are cast to it first. Digests of different dtypes are not comparable.
    """
    names, sums = [], []
    for placement in placements:
        view = box_view(tensors[placement.storage], placement)
        names.append(placement.box.tensor)
        sums.append(_digest(view, placement.box.start, torch_dtype(dtype) if dtype else view.dtype))
    totals = torch.stack(sums).tolist() if sums else []
    return combine({name: total} for name, total in zip(names, totals, strict=True))


def combine(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The digests of whole tensors from partial ones that together count every element once."""
    totals: dict[str, int] = defaultdict(int)
    for part in parts:
        for name, value in part.items():
            totals[name] = (totals[name] + value) % MODULUS
    return dict(totals)


def sent_digests(
    plan: WeightPlan, source: int, tensors: Mapping[str, torch.Tensor], destinations: Iterable[int] | None = None
) -> dict[int, dict[str, int]]:
    """By destination and checkpoint tensor: the partial digest of all that comes from `source`, relayed or not, in the
    destination's dtype. What goes to several destinations is digested once.
    """
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
    """By destination and checkpoint tensor: what must lie there, from the `sent_digests` of all sources."""
    by_destination: dict[int, list[Mapping[str, int]]] = defaultdict(list)
    for part in parts:
        for destination, of_tensor in part.items():
            by_destination[destination].append(of_tensor)
    return {destination: combine(of_one) for destination, of_one in by_destination.items()}


def digest_problems(holder: str, expected: Mapping[str, int], arrived: Mapping[str, int]) -> list[Problem]:
    """One problem for each tensor whose digest on `holder`, such as "engine 0 rank 1", is not the training ranks'."""
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
    """The digest of a block that begins at `start` in its tensor, as an int64 scalar on the block's device."""
    device = view.device
    if view.dim() == 0:  # no index, no weight
        view, rows = view.reshape(1), torch.ones(1, dtype=torch.int64, device=device)
    else:
        rows = _weights(0, start[0], view.shape[0], device)
    columns = reduce(
        lambda left, right: (left[:, None] * right).flatten(),
        (_weights(axis, start[axis], view.shape[axis], device) for axis in range(1, view.dim())),
        torch.ones(1, dtype=torch.int64, device=device),
    )
    step = max(1, CHUNK_ELEMENTS[device.type] // columns.numel())
    buffers = torch.empty(2, min(step, view.shape[0]), columns.numel(), dtype=torch.int64, device=device)
    factor = torch.tensor(splitmix64.GAMMA, device=device)
    total = torch.zeros((), dtype=torch.int64, device=device)
    for low in range(0, view.shape[0], step):
        values = view[low : low + step]
        mixed, shifted = buffers[:, : values.shape[0]]
        mixed.copy_(values.to(dtype).contiguous().view(BITS[dtype.itemsize]).view(values.shape[0], -1))
        torch.add(factor, mixed, alpha=splitmix64.GAMMA, out=mixed)  # (bits + 1) * factor: a zero counts
        mixed.bitwise_xor_(torch.bitwise_right_shift(mixed, 32, out=shifted))
        total += (mixed.mul_(columns).sum(1) * rows[low : low + step]).sum()
    return total


def _weights(axis: int, start: int, count: int, device: torch.device) -> torch.Tensor:
    """The odd weights of indices start .. start + count on one axis: int64 [count]."""
    return _weight_table(axis, 1 << (start + count - 1).bit_length(), device)[start : start + count]


@lru_cache(maxsize=64)
def _weight_table(axis: int, count: int, device: torch.device) -> torch.Tensor:
    """SplitMix64 of the index, seeded by the axis, made odd."""
    states = torch.arange(1, count + 1, dtype=torch.int64, device=device) * splitmix64.GAMMA
    return splitmix64.mixed(states + splitmix64.signed(0xD1B54A32D192ED03) * (axis + 1) % (1 << 62)) | 1

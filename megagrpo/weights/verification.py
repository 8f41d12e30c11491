"""Did the bytes arrive? Digests of what training ranks sent against digests of what engine ranks hold.

Every training rank digests its part of what each engine rank must have; the driver adds the parts up and compares them
with the engine rank's own digests, tensor by tensor. Where they differ, digests of single buckets say which one it was.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

import torch

from megagrpo.errors import Problem
from megagrpo.weights.boxes import Placement
from megagrpo.weights.digest import MODULUS, combine, digests
from megagrpo.weights.executors import streams
from megagrpo.weights.executors.buckets import Piece
from megagrpo.weights.executors.streams import Parcel, Party
from megagrpo.weights.plan import WeightPlan


def sent_digests(
    plan: WeightPlan, source: int, tensors: Mapping[str, torch.Tensor], destinations: Iterable[int] | None = None
) -> dict[int, dict[str, int]]:
    """By destination and checkpoint tensor: the partial digest of all that comes from `source`, relayed or not.

    Of the values as they arrive, in the destination's dtype. What goes to several destinations is digested once.
    """
    wanted = range(len(plan.destinations)) if destinations is None else frozenset(destinations)
    known: dict[tuple[Placement, str], int] = {}
    totals: dict[int, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for transfer in plan.outgoing(source):
        if transfer.destination not in wanted:
            continue
        placement = transfer.source_placement
        dtype = plan.destinations[transfer.destination].storages[transfer.destination_placement.storage].dtype
        if (placement, dtype) not in known:
            known[placement, dtype] = digests(tensors, [placement], dtype)[placement.box.tensor]
        of_tensor = totals[transfer.destination]
        name = placement.box.tensor
        of_tensor[name] = (of_tensor[name] + known[placement, dtype]) % MODULUS
    return {destination: dict(of_tensor) for destination, of_tensor in totals.items()}


def expected_digests(parts: Iterable[Mapping[int, Mapping[str, int]]]) -> dict[int, dict[str, int]]:
    """What every destination must have, from the `sent_digests` of all sources."""
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


def sent_bucket_digests(
    plan: WeightPlan,
    party: Party,
    tensors: Mapping[str, torch.Tensor],
    tensor: str,
    active: frozenset[int],
    bucket_bytes: int,
) -> dict[str, int]:
    """Partial digests of one checkpoint tensor in each bucket that a party sends it in, by the bucket's label."""
    parcels = streams.outgoing(plan, party, active, bucket_bytes)
    return _by_bucket(plan, parcels, tensors, tensor, lambda piece: piece.source)


def arrived_bucket_digests(
    plan: WeightPlan,
    destination: int,
    tensors: Mapping[str, torch.Tensor],
    tensor: str,
    active: frozenset[int],
    bucket_bytes: int,
) -> dict[str, int]:
    """Likewise, of what a destination holds where each bucket went."""
    parcels = streams.incoming(plan, destination, active, bucket_bytes)
    return _by_bucket(plan, parcels, tensors, tensor, lambda piece: piece.destination)


def bucket_problems(tensor: str, sent: Mapping[str, int], arrived: Mapping[str, int]) -> list[Problem]:
    """One problem for each bucket whose part of `tensor` is not what was sent. `sent` may hold other buckets too."""
    return [
        Problem(
            where=f"{tensor}: {label}",
            given=f"digest {digest:016x}",
            needed=f"digest {sent[label]:016x}, as sent" if label in sent else "a bucket that was sent",
            fix="the bytes changed on the way; if it comes again, look at that link and at the memory of its ends",
        )
        for label, digest in arrived.items()
        if sent.get(label) != digest
    ]


def _by_bucket(
    plan: WeightPlan,
    parcels: Iterable[Parcel],
    tensors: Mapping[str, torch.Tensor],
    tensor: str,
    end: Callable[[Piece], Placement],
) -> dict[str, int]:
    """Digests at one end of the pieces of one checkpoint tensor, by their bucket's label."""
    found = {}
    for parcel in parcels:
        if pieces := [piece for piece in parcel.pieces if piece.source.box.tensor == tensor]:
            found[streams.label(plan, parcel)] = _digest(tensors, pieces, [end(piece) for piece in pieces])
    return found


def _digest(tensors: Mapping[str, torch.Tensor], pieces: list[Piece], placements: list[Placement]) -> int:
    total = 0
    for piece, placement in zip(pieces, placements, strict=True):
        dtype = str(piece.dtype).removeprefix("torch.")
        total += sum(digests(tensors, [placement], dtype).values())
    return total % MODULUS

"""Who sends which buckets to whom in one sync. Both ends derive it from the plan alone, and derive the same."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import zip_longest

from megagrpo.errors import Problem, WeightPlanError
from megagrpo.weights.boxes import Placement
from megagrpo.weights.executors.buckets import Piece, cut_into_buckets
from megagrpo.weights.plan import WeightPlan
from megagrpo.weights.routes import Transfer

Party = int
"""Everybody who takes part in a plan, by one number: its sources, then its destinations."""


@dataclass(frozen=True)
class Parcel:
    """The `number`-th of the `count` buckets from one party to another."""

    sender: Party
    receiver: Party
    number: int
    count: int
    pieces: tuple[Piece, ...]

    @property
    def bytes(self) -> int:
        return self.pieces[-1].end


def destination_party(plan: WeightPlan, destination: int) -> Party:
    return len(plan.sources) + destination


def holder_of(plan: WeightPlan, party: Party) -> str:
    return (*plan.sources, *plan.destinations)[party].holder


def outgoing(plan: WeightPlan, party: Party, active: frozenset[int], bucket_bytes: int) -> Iterator[Parcel]:
    """What a party sends to the `active` destinations: a bucket to each in turn, and each party begins with another."""
    sources = len(plan.sources)
    if party < sources:
        receivers = sorted({transfer.destination for transfer in plan.outgoing(party)} & active)
    else:
        receivers = sorted(set(plan.relays_of(party - sources)) & active)
    first = party % len(receivers) if receivers else 0
    of_each = [
        parcels(plan, party, receiver, active, bucket_bytes) for receiver in receivers[first:] + receivers[:first]
    ]
    for in_turn in zip_longest(*of_each):
        for parcel in in_turn:
            if parcel is not None:
                yield parcel if party < sources else _passed_on(plan, party - sources, parcel)


def incoming(plan: WeightPlan, destination: int, active: frozenset[int], bucket_bytes: int) -> Iterator[Parcel]:
    """What arrives at an active destination, from all parties."""
    senders = {_sender(plan, transfer, active) for transfer in plan.incoming(destination)}
    for sender in sorted(senders):
        yield from parcels(plan, sender, destination, active, bucket_bytes)


@lru_cache(maxsize=1024)
def parcels(
    plan: WeightPlan, sender: Party, destination: int, active: frozenset[int], bucket_bytes: int
) -> tuple[Parcel, ...]:
    """All from one party to one destination. Kept from sync to sync."""
    transfers = [transfer for transfer in plan.incoming(destination) if _sender(plan, transfer, active) == sender]
    transfers.sort(key=lambda transfer: (transfer.destination_placement.storage, transfer.destination_placement.at))
    buckets = cut_into_buckets(plan, transfers, bucket_bytes)
    receiver = destination_party(plan, destination)
    return tuple(Parcel(sender, receiver, number, len(buckets), pieces) for number, pieces in enumerate(buckets))


def label(plan: WeightPlan, parcel: Parcel) -> str:
    """For errors: which bucket, between whom, with what."""
    tensors = sorted({piece.source.box.tensor for piece in parcel.pieces})
    more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
    return (
        f"bucket {parcel.number + 1} of {parcel.count} from {holder_of(plan, parcel.sender)} to "
        f"{holder_of(plan, parcel.receiver)} ({tensors[0]}{more})"
    )


def overdue(plan: WeightPlan, parcel: Parcel, timeout_seconds: float, missing: str) -> Problem:
    return Problem(
        label(plan, parcel),
        f"{missing} within {timeout_seconds:g} s",
        fix="look for what stopped that process; weights.timeout_seconds is the longest wait",
    )


def _passed_on(plan: WeightPlan, via: int, parcel: Parcel) -> Parcel:
    """The same bytes, where they lie in the destination that received them first."""
    pieces = []
    for piece in parcel.pieces:
        box = piece.destination.box
        around = next((held for held in _by_tensor(plan, via)[box.tensor] if held.box.intersect(box) == box), None)
        if around is None:
            raise WeightPlanError(
                Problem(label(plan, parcel), f"{box} is not there", "a relay that holds what it passes on")
            )
        pieces.append(replace(piece, source=around.part(box)))
    return replace(parcel, pieces=tuple(pieces))


@lru_cache(maxsize=8)
def _by_tensor(plan: WeightPlan, destination: int) -> dict[str, list[Placement]]:
    held: dict[str, list[Placement]] = defaultdict(list)
    for placement in plan.destinations[destination].placements:
        held[placement.box.tensor].append(placement)
    return held


def _sender(plan: WeightPlan, transfer: Transfer, active: frozenset[int]) -> Party:
    """Straight from the source where the relay does not take part."""
    if transfer.via is None or transfer.via not in active:
        return transfer.source
    return destination_party(plan, transfer.via)

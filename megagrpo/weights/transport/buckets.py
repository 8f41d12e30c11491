"""Buckets: the transfers between two peers, cut into messages. Both ends derive the same ones from the plan alone, so
that a message has a bucket's key, not its contents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import zip_longest

import torch

from megagrpo.errors import Problem, WeightPlanError
from megagrpo.weights.boxes import ITEM_BYTES, Placement, Transfer
from megagrpo.weights.coverage import Located
from megagrpo.weights.plan import WeightPlan
from megagrpo.weights.views import box_view, torch_dtype

ALIGNMENT = 16

Peer = int
"""All holders of a plan, by one number: its sources, then its destinations."""
Key = tuple[Peer, Peer, int]
"""A bucket, by its sender, its receiver and its number."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a transfer, at bytes begin .. end of its bucket, in row-major order of its box."""

    source: Placement
    destination: Placement
    dtype: str
    begin: int
    end: int

    def view_in(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self.begin : self.end].view(torch_dtype(self.dtype)).view(self.source.box.shape)


@dataclass(frozen=True)
class Bucket:
    """The `number`-th of the `count` buckets from one peer to another."""

    path: tuple[Peer, ...]
    """The sender, a source that forwards it if it takes two hops, and the receiver."""
    number: int
    count: int
    pieces: tuple[Piece, ...]

    @property
    def sender(self) -> Peer:
        return self.path[0]

    @property
    def receiver(self) -> Peer:
        return self.path[-1]

    @property
    def key(self) -> Key:
        return self.sender, self.receiver, self.number

    def before(self, peer: Peer) -> Peer:
        """Returns the peer from which `peer` receives the bucket."""
        return self.path[self.path.index(peer) - 1]

    def after(self, peer: Peer) -> Peer:
        """Returns the peer to which `peer` sends the bucket."""
        return self.path[self.path.index(peer) + 1]

    @property
    def bytes(self) -> int:
        return self.pieces[-1].end

    @torch.no_grad()
    def pack(self, storages: Mapping[str, torch.Tensor], flat: torch.Tensor) -> None:
        """Copies values of `storages` into `flat`, which is uint8 [self.bytes or more]."""
        for piece in self.pieces:
            piece.view_in(flat).copy_(box_view(storages[piece.source.storage], piece.source))

    @torch.no_grad()
    def unpack(self, storages: Mapping[str, torch.Tensor], flat: torch.Tensor) -> None:
        """Copies values of `flat` into `storages`."""
        for piece in self.pieces:
            box_view(storages[piece.destination.storage], piece.destination).copy_(piece.view_in(flat))


def destination_peer(plan: WeightPlan, destination: int) -> Peer:
    return len(plan.sources) + destination


def name_of(plan: WeightPlan, peer: Peer) -> str:
    """Returns a peer's name, such as "engine 0 rank 1", or its number if the plan has no such peer."""
    peers = (*plan.sources, *plan.destinations)
    return peers[peer].holder if 0 <= peer < len(peers) else f"peer {peer}"


def label_of(plan: WeightPlan, bucket: Bucket) -> str:
    """Returns a bucket's label for errors: its number, its peers, and its tensors."""
    tensors = sorted({piece.source.box.tensor for piece in bucket.pieces})
    more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
    return (
        f"bucket {bucket.number + 1} of {bucket.count} from {name_of(plan, bucket.sender)} to "
        f"{name_of(plan, bucket.receiver)} ({tensors[0]}{more})"
    )


def outgoing(plan: WeightPlan, peer: Peer, active: frozenset[int], bucket_bytes: int) -> Iterator[Bucket]:
    """Yields the buckets that a peer sends to the `active` destinations: one to each in turn. Each peer begins with
    another destination."""
    via = peer - len(plan.sources)
    transfers = plan.outgoing(peer) if via < 0 else plan.passed_on(via)
    receivers = sorted({transfer.destination for transfer in transfers} & active)
    first = peer % len(receivers) if receivers else 0
    of_each = [
        buckets_between(plan, peer, receiver, active, bucket_bytes)
        for receiver in receivers[first:] + receivers[:first]
    ]
    for in_turn in zip_longest(*of_each):
        for bucket in in_turn:
            if bucket is not None:
                yield bucket if via < 0 else _passed_on(plan, via, bucket)


def incoming(plan: WeightPlan, peer: Peer, active: frozenset[int], bucket_bytes: int) -> Iterator[Bucket]:
    """Yields the buckets that arrive at an active destination, or at a source that forwards them to active ones."""
    destination = peer - len(plan.sources)
    receivers = [destination] if destination >= 0 else sorted(active & set(plan.topology.forwards_to(peer)))
    for receiver in receivers:
        senders = {_sender(plan, transfer, active) for transfer in plan.incoming(receiver)}
        for sender in sorted(senders):
            buckets = buckets_between(plan, sender, receiver, active, bucket_bytes)
            yield from (bucket for bucket in buckets if peer in bucket.path[1:])


@lru_cache(maxsize=1024)
def buckets_between(
    plan: WeightPlan, sender: Peer, destination: int, active: frozenset[int], bucket_bytes: int
) -> tuple[Bucket, ...]:
    """Returns all buckets from one peer to one destination, as both ends see them. Cached from sync to sync."""
    transfers = [transfer for transfer in plan.incoming(destination) if _sender(plan, transfer, active) == sender]
    transfers.sort(key=lambda transfer: (transfer.destination_placement.storage, transfer.destination_placement.at))
    cut = _cut_into_buckets(plan, transfers, bucket_bytes)
    forwarder = plan.topology.forwarder(sender, destination) if sender < len(plan.sources) else None
    by = () if forwarder is None else (forwarder,)
    path = (sender, *by, destination_peer(plan, destination))
    return tuple(Bucket(path, number, len(cut), tuple(pieces)) for number, pieces in enumerate(cut))


def _sender(plan: WeightPlan, transfer: Transfer, active: frozenset[int]) -> Peer:
    """Returns the peer that sends a transfer: the source itself if the destination that passes it on is not active."""
    if transfer.via is None or transfer.via not in active:
        return transfer.source
    return destination_peer(plan, transfer.via)


def _cut_into_buckets(plan: WeightPlan, transfers: Iterable[Transfer], bucket_bytes: int) -> list[list[Piece]]:
    """Cuts transfers to one destination, in their order, into buckets of at most `bucket_bytes`, or of one element."""
    buckets: list[list[Piece]] = []
    begin = bucket_bytes
    for transfer in transfers:
        dtype = plan.destinations[transfer.destination].storages[transfer.destination_placement.storage].dtype
        item_bytes = ITEM_BYTES[dtype]
        for box in transfer.box.pieces(bucket_bytes // item_bytes):
            end = begin + box.elements * item_bytes
            if end > bucket_bytes:
                buckets.append([])
                begin, end = 0, box.elements * item_bytes
            origin, target = transfer.source_placement.part(box), transfer.destination_placement.part(box)
            buckets[-1].append(Piece(origin, target, dtype, begin, end))
            begin = -(-end // ALIGNMENT) * ALIGNMENT
    return buckets


def _passed_on(plan: WeightPlan, via: int, bucket: Bucket) -> Bucket:
    """Returns a bucket of the same bytes, read from the storages of the destination that received them first."""
    pieces = []
    for piece in bucket.pieces:
        box = piece.destination.box
        held = _located(plan, via).around(box, piece.dtype)
        if not held:
            raise WeightPlanError(
                Problem(label_of(plan, bucket), f"{box} is missing", "a relay that holds the bytes that it forwards")
            )
        pieces.append(replace(piece, source=held[0].part(box)))
    return replace(bucket, pieces=tuple(pieces))


@lru_cache(maxsize=8)
def _located(plan: WeightPlan, destination: int) -> Located:
    return Located(plan.destinations[destination])


# --- which bucket was wrong -------------------------------------------------------------------------------------------


def bucket_problems(tensor: str, sent: Mapping[str, int], arrived: Mapping[str, int]) -> list[Problem]:
    """Returns a problem for each bucket whose part of `tensor` is not as sent. `sent` may hold other buckets."""
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

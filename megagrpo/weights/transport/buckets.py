"""Buckets: what is in each bucket between two peers, and how buckets flow through a transport that moves bytes.

Both ends derive the buckets from the plan alone, and derive the same ones: a message says only which bucket it is. A
sender packs a bucket into a free slot, gives it to the transport, and tells the receiver through the rendezvous. The
receiver unpacks it and tells the sender that the slot is free again. A sender thus packs one bucket while another is
being unpacked, and no end holds more than two. All waiting is in the rendezvous: an abort or the deadline ends it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import zip_longest
from typing import Any, Literal, Protocol

import torch

from megagrpo.errors import Problem, WeightPlanError, WeightSyncError
from megagrpo.weights.boxes import ITEM_BYTES, Placement, Transfer
from megagrpo.weights.coverage import Located, few
from megagrpo.weights.digest import MODULUS, digests, sent_digests
from megagrpo.weights.plan import WeightPlan
from megagrpo.weights.transport.rendezvous import Member, Rendezvous, Sync
from megagrpo.weights.views import box_view, fill_padding, stored_tensors, torch_dtype

ALIGNMENT = 16
SLOTS = 2
"""Buckets that one end holds at a time: one is filled while the other is received."""

Peer = int
"""All holders of a plan, by one number: its sources, then its destinations."""

Ticket = int | tuple[str | dict[str, Any], int]
"""What a transport's receiver needs to find a bucket: a slot, or a memory's name (on GPUs its handle) and a place."""

Message = tuple[Literal["sent"], Peer, int, int, Ticket] | tuple[Literal["received"], int]
"""Sender, number, slot and ticket of a bucket; or the slot of one that has been unpacked."""


class Transport(Protocol):
    """Moves the bytes of buckets between peers, and knows nothing of weights. All methods may raise WeightSyncError."""

    def connect(
        self, sync: Sync, member: Member, peers: Mapping[Peer, str], device: torch.device, slot_bytes: int
    ) -> None:
        """Before anything is sent in a sync: makes connections, and SLOTS slots of at least `slot_bytes` (0: this end
        sends nothing) on `device`. `peers` are all that take part, with their names, in the same order at every end."""
        ...

    def slot(self, index: int) -> torch.Tensor:
        """uint8 [slot_bytes or more], into which a bucket is packed."""
        ...

    def send(self, index: int, bucket_bytes: int, receiver: Peer) -> Any:
        """Begins to send the bucket in a slot. Returns, as JSON, the ticket that the receiver needs."""
        ...

    def sent(self, index: int, label: str) -> None:
        """The receiver has acknowledged the bucket in this slot. `label` names it in errors."""
        ...

    def receive(self, sender: Peer, bucket_bytes: int, ticket: Any, label: str) -> Callable[[], torch.Tensor]:
        """Begins to receive a bucket. The function that it returns waits for it: uint8 [bucket_bytes or more]."""
        ...

    def close(self) -> None:
        """Frees everything. May be called twice."""
        ...


# --- what is in each bucket -------------------------------------------------------------------------------------------


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


@dataclass(frozen=True)
class Bucket:
    """The `number`-th of the `count` buckets from one peer to another."""

    sender: Peer
    receiver: Peer
    number: int
    count: int
    pieces: tuple[Piece, ...]

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
    """Such as "engine 0 rank 1"."""
    return (*plan.sources, *plan.destinations)[peer].holder


def label_of(plan: WeightPlan, bucket: Bucket) -> str:
    """For errors: which bucket it is, its peers, and its tensors."""
    tensors = sorted({piece.source.box.tensor for piece in bucket.pieces})
    more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
    return (
        f"bucket {bucket.number + 1} of {bucket.count} from {name_of(plan, bucket.sender)} to "
        f"{name_of(plan, bucket.receiver)} ({tensors[0]}{more})"
    )


def outgoing(plan: WeightPlan, peer: Peer, active: frozenset[int], bucket_bytes: int) -> Iterator[Bucket]:
    """All that a peer sends to the `active` destinations: one bucket to each in turn. Each peer begins with another
    destination."""
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


def incoming(plan: WeightPlan, destination: int, active: frozenset[int], bucket_bytes: int) -> Iterator[Bucket]:
    """All that arrives at an active destination, from all peers."""
    senders = {_sender(plan, transfer, active) for transfer in plan.incoming(destination)}
    for sender in sorted(senders):
        yield from buckets_between(plan, sender, destination, active, bucket_bytes)


@lru_cache(maxsize=1024)
def buckets_between(
    plan: WeightPlan, sender: Peer, destination: int, active: frozenset[int], bucket_bytes: int
) -> tuple[Bucket, ...]:
    """All buckets from one peer to one destination, as both ends see them. Kept from sync to sync."""
    transfers = [transfer for transfer in plan.incoming(destination) if _sender(plan, transfer, active) == sender]
    transfers.sort(key=lambda transfer: (transfer.destination_placement.storage, transfer.destination_placement.at))
    cut = _cut_into_buckets(plan, transfers, bucket_bytes)
    receiver = destination_peer(plan, destination)
    return tuple(Bucket(sender, receiver, number, len(cut), tuple(pieces)) for number, pieces in enumerate(cut))


def _sender(plan: WeightPlan, transfer: Transfer, active: frozenset[int]) -> Peer:
    """The peer that sends a transfer: the source itself if the destination that should pass it on takes no part."""
    if transfer.via is None or transfer.via not in active:
        return transfer.source
    return destination_peer(plan, transfer.via)


def _cut_into_buckets(plan: WeightPlan, transfers: Iterable[Transfer], bucket_bytes: int) -> list[list[Piece]]:
    """Transfers to one destination, in their order, as buckets of at most `bucket_bytes` (but one element at least)."""
    buckets: list[list[Piece]] = []
    begin = bucket_bytes
    for transfer in transfers:
        storage = plan.destinations[transfer.destination].storages[transfer.destination_placement.storage]
        item_bytes = ITEM_BYTES[storage.dtype]
        for box in transfer.box.pieces(bucket_bytes // item_bytes):
            end = begin + box.elements * item_bytes
            if end > bucket_bytes:
                buckets.append([])
                begin, end = 0, box.elements * item_bytes
            come, go = transfer.source_placement.part(box), transfer.destination_placement.part(box)
            buckets[-1].append(Piece(come, go, torch_dtype(storage.dtype), begin, end))
            begin = -(-end // ALIGNMENT) * ALIGNMENT
    return buckets


def _passed_on(plan: WeightPlan, via: int, bucket: Bucket) -> Bucket:
    """The same bytes, read from the storages of the destination that received them first."""
    pieces = []
    for piece in bucket.pieces:
        box = piece.destination.box
        held = _located(plan, via).around(box, str(piece.dtype).removeprefix("torch."))
        if not held:
            raise WeightPlanError(
                Problem(label_of(plan, bucket), f"{box} is not there", "a relay that holds what it passes on")
            )
        pieces.append(replace(piece, source=held[0].part(box)))
    return replace(bucket, pieces=tuple(pieces))


@lru_cache(maxsize=8)
def _located(plan: WeightPlan, destination: int) -> Located:
    return Located(plan.destinations[destination])


# --- both ends --------------------------------------------------------------------------------------------------------


class _BucketEnd:
    """What both ends have. An end lasts from sync to sync."""

    def __init__(
        self, plan: WeightPlan, peer: Peer, rendezvous: Rendezvous, bucket_bytes: int, transport: Transport
    ) -> None:
        self._plan, self._peer, self._bucket_bytes, self._transport = plan, peer, bucket_bytes, transport
        self._member = rendezvous.join(name_of(plan, peer))
        self._member.announce()

    def close(self) -> None:
        """Frees buffers and connections. May be called twice."""
        self._transport.close()

    def _outgoing(self, active: frozenset[int]) -> list[Bucket]:
        return list(outgoing(self._plan, self._peer, active, self._bucket_bytes))


class BucketSender(_BucketEnd):
    """The end of the `source`-th training rank of `plan`."""

    def __init__(
        self, plan: WeightPlan, source: int, rendezvous: Rendezvous, bucket_bytes: int, transport: Transport
    ) -> None:
        super().__init__(plan.part_for_source(source), source, rendezvous, bucket_bytes, transport)

    def send(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Sends to the destinations of the open sync what the plan says, cast to their dtype. `tensors` are by storage
        name, on any device, and may be changed once this returns.

        Raises WeightSyncError, naming the missing peer and the bucket, or ModelError.
        """
        with self._member.attend(version) as sync:
            storages = stored_tensors(self._plan.sources[self._peer], tensors)
            flow = _Flow(self._plan, self._peer, self._member, self._transport, sync, storages)
            flow.run(self._outgoing(sync.destinations), [])

    def digests(self, tensors: Mapping[str, torch.Tensor], active: Sequence[int]) -> dict[int, dict[str, int]]:
        """This rank's part of the digests expected at each of the `active` destinations."""
        return sent_digests(self._plan, self._peer, tensors, active)

    def bucket_digests(
        self, tensors: Mapping[str, torch.Tensor], tensor: str, active: frozenset[int]
    ) -> dict[str, int]:
        """Partial digests of one checkpoint tensor in each bucket that this rank sends, by the bucket's label."""
        return _digests_by_bucket(self._plan, self._outgoing(active), tensors, tensor, lambda piece: piece.source)


class BucketReceiver(_BucketEnd):
    """The end of the `destination`-th engine rank of `plan`; it also passes on what the plan relays through this rank.

    It runs in the process that holds `tensors`, the rank's storages by name.
    """

    def __init__(
        self,
        plan: WeightPlan,
        destination: int,
        tensors: Mapping[str, torch.Tensor],
        rendezvous: Rendezvous,
        bucket_bytes: int,
        transport: Transport,
    ) -> None:
        self._destination = destination
        self._storages = stored_tensors(plan.destinations[destination], tensors)
        super().__init__(plan, destination_peer(plan, destination), rendezvous, bucket_bytes, transport)

    def receive(self, version: int) -> None:
        """Writes everything in place. The engine must not generate meanwhile. Raises WeightSyncError."""
        with self._member.attend(version) as sync:
            if self._destination not in sync.destinations:
                where = f"{self._member.name}: weight sync to version {version}"
                raise WeightSyncError(Problem(where, "it takes no part"))
            flow = _Flow(self._plan, self._peer, self._member, self._transport, sync, self._storages)
            flow.run(self._outgoing(sync.destinations), self._incoming(sync.destinations))
            fill_padding(self._plan.destinations[self._destination], self._storages)

    def bucket_digests(self, tensor: str, active: frozenset[int]) -> dict[str, dict[str, int]]:
        """Partial digests of one checkpoint tensor by the label of its bucket: "arrived", as this rank holds what came
        in each bucket, and "sent", for those that it passes on."""
        plan, storages, relayed, arriving = self._plan, self._storages, self._outgoing(active), self._incoming(active)
        return {
            "sent": _digests_by_bucket(plan, relayed, storages, tensor, lambda piece: piece.source),
            "arrived": _digests_by_bucket(plan, arriving, storages, tensor, lambda piece: piece.destination),
        }

    def _incoming(self, active: frozenset[int]) -> list[Bucket]:
        return list(incoming(self._plan, self._destination, active, self._bucket_bytes))


class _Flow:
    """One peer's part in one sync."""

    def __init__(
        self,
        plan: WeightPlan,
        peer: Peer,
        member: Member,
        transport: Transport,
        sync: Sync,
        storages: Mapping[str, torch.Tensor],
    ) -> None:
        self._plan, self._peer, self._member, self._transport = plan, peer, member, transport
        self._sync, self._storages = sync, storages
        self._unsent: deque[Bucket] = deque()
        self._free = list(range(SLOTS))
        self._unacknowledged: dict[int, Bucket] = {}  # by slot
        self._awaited: dict[tuple[Peer, int], Bucket] = {}  # by sender and number
        self._from_sources = 0  # buckets from sources that have not been unpacked
        self._arriving: deque[tuple[Bucket, int, Callable[[], torch.Tensor]]] = deque()

    def run(self, outgoing: list[Bucket], incoming: list[Bucket]) -> None:
        """Receives all of `incoming` and sends all of `outgoing`. A destination passes buckets on once all buckets from
        sources have arrived."""
        plan, sources = self._plan, len(self._plan.sources)
        self._unsent.extend(outgoing)
        self._awaited = {(bucket.sender, bucket.number): bucket for bucket in incoming}
        self._from_sources = sum(bucket.sender < sources for bucket in incoming)
        device = next(iter(self._storages.values())).device if self._storages else torch.device("cpu")
        peers = [*range(sources), *(destination_peer(plan, index) for index in sorted(self._sync.destinations))]
        names = {peer: name_of(plan, peer) for peer in peers}
        slot_bytes = max((bucket.bytes for bucket in outgoing), default=0)
        self._transport.connect(self._sync, self._member, names, device, slot_bytes)
        queue = str(self._peer)
        while self._unsent or self._unacknowledged or self._awaited or self._arriving:
            while self._free and self._unsent and not self._from_sources:
                self._send(self._unsent.popleft())
            message = None if len(self._arriving) == SLOTS else self._member.pop(queue, Message)
            if message is None and self._arriving:
                self._unpack_next()
                continue
            self._handle(message or self._member.wait(lambda: self._member.pop(queue, Message), self._missing))

    def _send(self, bucket: Bucket) -> None:
        index = self._free.pop()
        flat = self._transport.slot(index)
        bucket.pack(self._storages, flat)
        _finish_copies(flat)
        ticket = self._transport.send(index, bucket.bytes, bucket.receiver)
        self._unacknowledged[index] = bucket
        self._member.push(str(bucket.receiver), ["sent", bucket.sender, bucket.number, index, ticket])

    def _handle(self, message: Message) -> None:
        match message:
            case ["sent", sender, number, index, ticket]:
                bucket = self._awaited.pop((sender, number), None)
                if bucket is None:
                    peers = (*self._plan.sources, *self._plan.destinations)
                    name = peers[sender].holder if 0 <= sender < len(peers) else f"peer {sender}"
                    raise self._unplanned(f"bucket {number + 1} from {name}", "it came twice")
                received = self._transport.receive(sender, bucket.bytes, ticket, label_of(self._plan, bucket))
                self._arriving.append((bucket, index, received))
            case ["received", index]:
                bucket = self._unacknowledged.pop(index, None)
                if bucket is None:
                    raise self._unplanned(f"an acknowledgement of slot {index}", "nothing was sent from it")
                self._transport.sent(index, label_of(self._plan, bucket))
                self._free.append(index)

    def _unplanned(self, what: str, given: str) -> WeightSyncError:
        where, needed = f"{name_of(self._plan, self._peer)}: {what}", "the same plan and bucket size at both ends"
        return WeightSyncError(Problem(where, f"{given}, or it is not in the plan", needed))

    def _unpack_next(self) -> None:
        bucket, index, received = self._arriving.popleft()
        flat = received()
        bucket.unpack(self._storages, flat)
        _finish_copies(flat)
        self._from_sources -= bucket.sender < len(self._plan.sources)
        self._member.push(str(bucket.sender), ["received", index])

    def _missing(self) -> Problem:
        """Names the first bucket that is late, and all peers that are."""
        if self._unacknowledged:
            late = list(self._unacknowledged.values())
            missing = f"no acknowledgement by {self._names(bucket.receiver for bucket in late)}"
        else:
            late = list(self._awaited.values())
            missing = f"nothing came from {self._names(bucket.sender for bucket in late)}"
        return self._member.late(label_of(self._plan, late[0]), missing)

    def _names(self, peers: Iterable[Peer]) -> str:
        return few([name_of(self._plan, peer) for peer in sorted(set(peers))])


def _finish_copies(flat: torch.Tensor) -> None:
    """Waits for copies on a GPU, so that the other end may look."""
    if flat.is_cuda:
        torch.cuda.current_stream(flat.device).synchronize()


# --- which bucket was wrong -------------------------------------------------------------------------------------------


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


def _digests_by_bucket(
    plan: WeightPlan,
    buckets: Iterable[Bucket],
    tensors: Mapping[str, torch.Tensor],
    tensor: str,
    end: Callable[[Piece], Placement],
) -> dict[str, int]:
    """Digests at one end of the pieces of one checkpoint tensor, by their bucket's label."""
    found = {}
    for bucket in buckets:
        if pieces := [piece for piece in bucket.pieces if piece.source.box.tensor == tensor]:
            parts = [digests(tensors, [end(piece)], str(piece.dtype).removeprefix("torch.")) for piece in pieces]
            found[label_of(plan, bucket)] = sum(part[tensor] for part in parts) % MODULUS
    return found

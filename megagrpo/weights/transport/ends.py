"""Both ends of a weight sync: the flow of buckets between peers, through a transport that moves bytes.

A sender packs a bucket into a free slot, tells the receiver through the rendezvous, and gives it to the transport,
which may wait for the receiver. The receiver unpacks it and tells the sender that the slot is free again. So one bucket
is packed while another is unpacked. Where the plan says so, the source beside a destination receives for it and
forwards the bucket as it is. No wait goes in a circle: a bucket waits for room at the forwarder, a forwarder for its
destination, and a destination for nothing. All waiting is in the rendezvous: an abort or the deadline ends it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from megagrpo.errors import Problem, WeightSyncError, few
from megagrpo.weights.digest import combine, digests, sent_digests
from megagrpo.weights.plan import WeightPlan
from megagrpo.weights.transport.buckets import (
    Bucket,
    Key,
    Peer,
    destination_peer,
    incoming,
    label_of,
    name_of,
    outgoing,
)
from megagrpo.weights.transport.rendezvous import Member, Rendezvous, Sync
from megagrpo.weights.views import fill_padding, stored_tensors

SLOTS = 2
"""Buckets that one end packs at a time: one is filled while the other is received. As many arrive at a time."""


@dataclass(frozen=True)
class Part:
    """One peer's part in a sync, as a transport needs it to connect."""

    peers: Mapping[Peer, str]
    """All that take part, with their names, in order."""
    pairs: tuple[tuple[Peer, Peer], ...]
    """(sender, receiver) of all buckets that this peer sends, receives or forwards."""
    sent_bytes: int
    """The largest bucket that is packed here; 0: none."""
    received_bytes: int
    """The largest bucket that arrives here; 0: none."""


Ticket = int | tuple[str | dict[str, Any], int]
"""The address of a bucket for its receiver: a slot, or a memory's name (on GPUs its handle) and an offset."""

Message = tuple[Literal["sent"], Key, int, Ticket] | tuple[Literal["received"], int]
"""Key, slot and ticket of a bucket; or the slot of one that has been unpacked."""


Way = Callable[[WeightPlan, Peer, frozenset[int], int], Iterator[Bucket]]
"""`outgoing` or `incoming` of buckets.py."""


class Transport(Protocol):
    """A carrier of buckets between peers, which knows nothing of weights. All methods may raise WeightSyncError.

    A bucket lies in a slot while it is on its way to the next peer: slots 0 .. SLOTS - 1 are packed here, and slots
    SLOTS .. 2 * SLOTS - 1 are for buckets that arrive.
    """

    def connect(self, sync: Sync, member: Member, part: Part, device: torch.device) -> None:
        """Makes all connections of a sync, and slots on `device`, before anything is sent."""

    def slot(self, index: int) -> torch.Tensor:
        """Returns the memory of a slot, uint8 [sent_bytes or more], into which a bucket is packed."""

    def may_send(self, receiver: Peer) -> bool:
        """Returns whether another bucket may follow one that is still on its way to this peer."""

    def ticket(self, index: int, receiver: Peer) -> Ticket:
        """Returns the receiver's ticket for the bucket in a slot, as JSON. The receiver gets it before `send`, which
        may wait for the receiver."""

    def send(self, index: int, bucket_bytes: int, receiver: Peer) -> None:
        """Begins to send the bucket in a slot."""

    def sent(self, index: int, label: str) -> None:
        """Finishes the send of this slot's bucket, which the receiver has acknowledged. `label` names it in errors."""

    def receive(
        self, sender: Peer, bucket_bytes: int, ticket: Ticket, index: int, label: str
    ) -> Callable[[], torch.Tensor]:
        """Begins to receive a bucket, into a slot unless this transport reads it where it lies. Returns a function that
        waits for the bucket and returns it: uint8 [bucket_bytes or more]."""

    def close(self) -> None:
        """Frees everything. May be called twice."""


class _BucketEnd:
    """The common part of both ends. An end lasts from sync to sync."""

    def __init__(
        self, plan: WeightPlan, peer: Peer, rendezvous: Rendezvous, bucket_bytes: int, transport: Transport
    ) -> None:
        self._plan, self._peer, self._bucket_bytes, self._transport = plan, peer, bucket_bytes, transport
        self._member = rendezvous.join(name_of(plan, peer))
        self._member.announce()

    def close(self) -> None:
        """Frees buffers and connections. May be called twice."""
        self._transport.close()

    @contextmanager
    def _taking_part(self, version: int) -> Iterator[Sync]:
        """Attends a sync. A failure closes the transport: nothing of it may still wait for a peer, or run on a GPU."""
        with ExitStack() as failing, self._member.attend(version) as sync:
            failing.callback(self._transport.close)  # after all others know why
            try:
                yield sync
            except WeightSyncError:
                self._member.check_abort()  # then that is why something of a peer is gone
                raise
            failing.pop_all()

    def _buckets(self, way: Way, active: frozenset[int]) -> list[Bucket]:
        return list(way(self._plan, self._peer, active, self._bucket_bytes))

    def _digests(
        self, way: Way, storages: Mapping[str, torch.Tensor], tensor: str, active: frozenset[int]
    ) -> dict[str, int]:
        """Returns partial digests, at this end, of one checkpoint tensor in each bucket, by the bucket's label."""
        sums = {}
        for bucket in self._buckets(way, active):
            pieces = [piece for piece in bucket.pieces if piece.source.box.tensor == tensor]
            at = ((piece.source if way is outgoing else piece.destination, piece.dtype) for piece in pieces)
            if pieces:
                total = combine(digests(storages, [placement], dtype) for placement, dtype in at)
                sums[label_of(self._plan, bucket)] = total[tensor]
        return sums


class BucketSender(_BucketEnd):
    """The end of the `source`-th training rank of `plan`; it forwards buckets for engine ranks beside it."""

    def __init__(
        self, plan: WeightPlan, source: int, rendezvous: Rendezvous, bucket_bytes: int, transport: Transport
    ) -> None:
        super().__init__(plan.part_for_source(source), source, rendezvous, bucket_bytes, transport)

    def send(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Sends the plan's boxes to the destinations of the open sync, cast to their dtype. `tensors` are by storage
        name, on any device, and may be changed once this returns.

        Raises WeightSyncError, naming the missing peer and the bucket, or ModelError.
        """
        with self._taking_part(version) as sync:
            _Flow(self, sync, stored_tensors(self._plan.sources[self._peer], tensors)).run()

    def digests(self, tensors: Mapping[str, torch.Tensor], active: Sequence[int]) -> dict[int, dict[str, int]]:
        """Returns this rank's part of the digests expected at each of the `active` destinations."""
        return sent_digests(self._plan, self._peer, tensors, active)

    def bucket_digests(
        self, tensors: Mapping[str, torch.Tensor], tensor: str, active: frozenset[int]
    ) -> dict[str, int]:
        """Returns partial digests of one checkpoint tensor in each bucket that this rank sends, by bucket label."""
        return self._digests(outgoing, tensors, tensor, active)


class BucketReceiver(_BucketEnd):
    """The end of the `destination`-th engine rank of `plan`; it passes on what the plan relays through this rank.

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
        with self._taking_part(version) as sync:
            if self._destination not in sync.destinations:
                where = f"{self._member.name}: weight sync to version {version}"
                raise WeightSyncError(Problem(where, "it takes no part"))
            _Flow(self, sync, self._storages).run()
            fill_padding(self._plan.destinations[self._destination], self._storages)

    def bucket_digests(self, tensor: str, active: frozenset[int]) -> dict[str, dict[str, int]]:
        """Returns partial digests of one checkpoint tensor by bucket label: "arrived", of the values here that each
        bucket brought, and "sent", of the buckets that this rank passes on."""
        ways: dict[str, Way] = {"sent": outgoing, "arrived": incoming}
        return {name: self._digests(way, self._storages, tensor, active) for name, way in ways.items()}


class _Flow:
    """One peer's part in one sync."""

    def __init__(self, end: _BucketEnd, sync: Sync, storages: Mapping[str, torch.Tensor]) -> None:
        self._plan, self._peer, self._member, self._transport = end._plan, end._peer, end._member, end._transport
        self._sync, self._storages = sync, storages
        self._outgoing, self._incoming = (end._buckets(way, sync.destinations) for way in (outgoing, incoming))
        self._unsent = deque(self._outgoing)
        self._free = list(range(SLOTS))
        self._free_to_receive = list(range(SLOTS, 2 * SLOTS))
        self._unacknowledged: dict[int, Bucket] = {}  # by slot
        self._awaited = {bucket.key: bucket for bucket in self._incoming}
        kept = (bucket for bucket in self._incoming if bucket.receiver == self._peer)
        self._from_sources = sum(bucket.sender < len(self._plan.sources) for bucket in kept)
        """The number of buckets from sources that have not been unpacked."""
        self._announced: deque[tuple[Bucket, int, Ticket]] = deque()  # with the slot that they are in, and their ticket
        self._arriving: deque[tuple[Bucket, int, int, Callable[[], torch.Tensor]]] = deque()  # and their slot here

    def run(self) -> None:
        """Sends and receives all buckets of this peer, and forwards others'. A destination passes buckets on once all
        buckets from sources have arrived."""
        device = next(iter(self._storages.values())).device if self._storages else torch.device("cpu")
        self._transport.connect(self._sync, self._member, self._part(), device)
        queue = str(self._peer)
        while self._unsent or self._unacknowledged or self._awaited or self._announced or self._arriving:
            while self._free and self._may_send():
                self._send(self._unsent.popleft())
            while self._free_to_receive and self._announced:
                self._begin_to_receive(*self._announced.popleft())
            message = self._member.pop(queue, Message)
            if message is None and self._arriving:
                self._take_next()
                continue
            self._handle(message or self._member.wait(lambda: self._member.pop(queue, Message), self._missing))

    def _part(self) -> Part:
        plan, peer = self._plan, self._peer
        peers = [*range(len(plan.sources)), *(destination_peer(plan, i) for i in sorted(self._sync.destinations))]
        hops = {(peer, bucket.after(peer)) for bucket in self._outgoing}
        hops |= {(bucket.before(peer), peer) for bucket in self._incoming}
        hops |= {(peer, bucket.receiver) for bucket in self._incoming if bucket.receiver != peer}
        sent, received = (max((its.bytes for its in of), default=0) for of in (self._outgoing, self._incoming))
        return Part({its: name_of(plan, its) for its in peers}, tuple(sorted(hops)), sent, received)

    def _may_send(self) -> bool:
        if not self._unsent or self._from_sources:
            return False
        return self._transport.may_send(self._unsent[0].after(self._peer))

    def _send(self, bucket: Bucket) -> None:
        index = self._free.pop()
        flat = self._transport.slot(index)
        bucket.pack(self._storages, flat)
        _finish_copies(flat)
        self._hand_over(bucket, index)

    def _hand_over(self, bucket: Bucket, index: int) -> None:
        """Hands a bucket to the next peer, which gets its ticket first: the transport may wait for that peer."""
        receiver = bucket.after(self._peer)
        self._unacknowledged[index] = bucket
        ticket = self._transport.ticket(index, receiver)
        self._member.push(str(receiver), ["sent", bucket.key, index, ticket])
        self._transport.send(index, bucket.bytes, receiver)

    def _handle(self, message: Message) -> None:
        match message:
            case ["sent", key, index, ticket]:
                bucket = self._awaited.pop(key, None)
                if bucket is None:
                    sender, _, number = key
                    where = f"bucket {number + 1} from {name_of(self._plan, sender)}"
                    raise self._unplanned(where, "it came twice")
                self._announced.append((bucket, index, ticket))
            case ["received", index]:
                bucket = self._unacknowledged.pop(index, None)
                if bucket is None:
                    raise self._unplanned(f"an acknowledgement of slot {index}", "nothing was sent from it")
                self._transport.sent(index, label_of(self._plan, bucket))
                (self._free if index < SLOTS else self._free_to_receive).append(index)

    def _unplanned(self, what: str, given: str) -> WeightSyncError:
        where, needed = f"{name_of(self._plan, self._peer)}: {what}", "the same plan and bucket size at both ends"
        return WeightSyncError(Problem(where, f"{given}, or it is not in the plan", needed))

    def _begin_to_receive(self, bucket: Bucket, slot_there: int, ticket: Ticket) -> None:
        index, sender, label = self._free_to_receive.pop(), bucket.before(self._peer), label_of(self._plan, bucket)
        received = self._transport.receive(sender, bucket.bytes, ticket, index, label)
        self._arriving.append((bucket, slot_there, index, received))

    def _take_next(self) -> None:
        bucket, slot_there, index, received = self._arriving.popleft()
        flat = received()
        if bucket.receiver == self._peer:
            bucket.unpack(self._storages, flat)
            _finish_copies(flat)
            self._from_sources -= bucket.sender < len(self._plan.sources)
            self._free_to_receive.append(index)
        else:
            _finish_copies(flat)
            self._hand_over(bucket, index)
        self._member.push(str(bucket.before(self._peer)), ["received", slot_there])

    def _missing(self) -> Problem:
        """Returns a problem that names the first late bucket and all late peers."""
        if self._unacknowledged:
            late = list(self._unacknowledged.values())
            missing = f"no acknowledgement by {self._names(bucket.after(self._peer) for bucket in late)}"
        else:
            late = list(self._awaited.values())
            missing = f"nothing came from {self._names(bucket.before(self._peer) for bucket in late)}"
        return self._member.late(label_of(self._plan, late[0]), missing)

    def _names(self, peers: Iterable[Peer]) -> str:
        return few([name_of(self._plan, peer) for peer in sorted(set(peers))])


def _finish_copies(flat: torch.Tensor) -> None:
    """Waits for copies on a GPU, so that the other end may read."""
    if flat.is_cuda:
        torch.cuda.current_stream(flat.device).synchronize()

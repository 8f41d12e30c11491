"""How buckets flow between two parties, whatever carries the bytes: two slots at the sending end, acknowledged.

A sender packs a bucket into a free slot, hands it to the carrier, and tells the receiver through the meeting. The
receiver fetches and unpacks it, and tells the sender that the slot is free again. So a sender packs one bucket while
another is being unpacked, no end holds more than two buckets, and nobody waits for bytes that nobody has sent yet: all
waiting is in the meeting, where an abort and the deadline end it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch

from megagrpo.errors import Problem, WeightSyncError
from megagrpo.weights.coverage import few
from megagrpo.weights.executors import streams
from megagrpo.weights.executors.buckets import SLOTS, finish_copies, pack_pieces, unpack_pieces
from megagrpo.weights.executors.meeting import Meeting, Member, Sync
from megagrpo.weights.executors.streams import Parcel, Party
from megagrpo.weights.plan import WeightPlan
from megagrpo.weights.views import fill_padding, stored_tensors


class Carrier(Protocol):
    """Moves the bytes of a bucket. `label` says in errors which bucket it is. All may raise WeightSyncError."""

    def begin(self, sync: Sync, member: Member, device: torch.device, slot_bytes: int) -> None:
        """Before a sync, with SLOTS slots of at least `slot_bytes` (0: nothing will be sent) on `device`."""
        ...

    def slot(self, index: int) -> torch.Tensor:
        """uint8 [slot_bytes or more] to pack a bucket into."""
        ...

    def hand_over(self, index: int, parcel_bytes: int, receiver: Party) -> Any:
        """Starts on the way what was packed. Returns, as JSON, what the receiver needs to fetch it."""
        ...

    def taken(self, index: int, label: str) -> None:
        """The receiver has acknowledged this slot."""
        ...

    def fetch(self, sender: Party, parcel_bytes: int, handed_over: Any, label: str) -> Callable[[], torch.Tensor]:
        """Begins to receive. What it returns waits for the bytes: uint8 [parcel_bytes or more]."""
        ...

    def close(self) -> None:
        """Frees everything. May be called twice."""
        ...


class FlowSender:
    """Implements Sender (ways.py) with a carrier."""

    def __init__(self, plan: WeightPlan, source: int, meeting: Meeting, bucket_bytes: int, carrier: Carrier) -> None:
        self._plan = plan.part_for_source(source)
        self._source, self._bucket_bytes, self._carrier = source, bucket_bytes, carrier
        self._member = meeting.join(plan.sources[source].holder)
        self._member.announce()

    def send(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        with self._member.attend(version) as sync:
            storages = stored_tensors(self._plan.sources[self._source], tensors)
            parcels = list(streams.outgoing(self._plan, self._source, sync.destinations, self._bucket_bytes))
            _Flow(self._plan, self._source, self._member, self._carrier, sync, storages).run(parcels, [])

    def close(self) -> None:
        self._carrier.close()


class FlowReceiver:
    """Implements Receiver (ways.py) with a carrier. Also passes on what the plan relays through this destination."""

    def __init__(
        self,
        plan: WeightPlan,
        destination: int,
        tensors: Mapping[str, torch.Tensor],
        meeting: Meeting,
        bucket_bytes: int,
        carrier: Carrier,
    ) -> None:
        self._plan = plan
        self._destination, self._bucket_bytes, self._carrier = destination, bucket_bytes, carrier
        self._storages = stored_tensors(plan.destinations[destination], tensors)
        self._member = meeting.join(plan.destinations[destination].holder)
        self._member.announce()

    def receive(self, version: int) -> None:
        with self._member.attend(version) as sync:
            plan, party = self._plan, streams.destination_party(self._plan, self._destination)
            if self._destination not in sync.destinations:
                holder = plan.destinations[self._destination].holder
                raise WeightSyncError(Problem(f"{holder}: weight sync to version {version}", "it takes no part"))
            relayed = list(streams.outgoing(plan, party, sync.destinations, self._bucket_bytes))
            arriving = list(streams.incoming(plan, self._destination, sync.destinations, self._bucket_bytes))
            _Flow(plan, party, self._member, self._carrier, sync, self._storages).run(relayed, arriving)
            fill_padding(plan.destinations[self._destination], self._storages)

    def close(self) -> None:
        self._carrier.close()


class _Flow:
    """One party's part in one sync."""

    def __init__(
        self,
        plan: WeightPlan,
        party: Party,
        member: Member,
        carrier: Carrier,
        sync: Sync,
        storages: Mapping[str, torch.Tensor],
    ) -> None:
        self._plan, self._party, self._member, self._carrier = plan, party, member, carrier
        self._sync, self._storages = sync, storages
        self._unsent: deque[Parcel] = deque()
        self._free = list(range(SLOTS))
        self._unacknowledged: dict[int, Parcel] = {}  # by slot
        self._awaited: dict[tuple[Party, int], Parcel] = {}  # by sender and number
        self._direct = 0  # of the awaited ones, those that come straight from a source
        self._arriving: deque[tuple[Parcel, int, Callable[[], torch.Tensor]]] = deque()

    def run(self, outgoing: list[Parcel], incoming: list[Parcel]) -> None:
        """Sends all of `outgoing` (a relay: once all has come that comes straight from sources), takes `incoming`."""
        self._unsent.extend(outgoing)
        slot_bytes = max((parcel.bytes for parcel in outgoing), default=0)
        self._awaited = {(parcel.sender, parcel.number): parcel for parcel in incoming}
        self._direct = sum(parcel.sender < len(self._plan.sources) for parcel in incoming)
        device = next(iter(self._storages.values())).device if self._storages else torch.device("cpu")
        self._carrier.begin(self._sync, self._member, device, slot_bytes)
        address = str(self._party)
        while self._unsent or self._unacknowledged or self._awaited or self._arriving:
            while self._free and self._unsent and not self._direct:
                self._send(self._unsent.popleft())
            message = None if len(self._arriving) == SLOTS else self._member.pop(address)
            if message is None and self._arriving:
                self._land()
                continue
            self._handle(message or self._member.wait(lambda: self._member.pop(address), self._overdue))

    def _send(self, parcel: Parcel) -> None:
        index = self._free.pop()
        flat = self._carrier.slot(index)
        pack_pieces(parcel.pieces, self._storages, flat)
        finish_copies(flat)
        handed_over = self._carrier.hand_over(index, parcel.bytes, parcel.receiver)
        self._unacknowledged[index] = parcel
        self._member.push(str(parcel.receiver), ["sent", parcel.sender, parcel.number, index, handed_over])

    def _handle(self, message: list[Any]) -> None:
        match message:
            case ["sent", sender, number, index, handed_over]:
                parcel = self._awaited.pop((sender, number), None)
                if parcel is None:
                    raise WeightSyncError(
                        Problem(
                            f"{streams.holder_of(self._plan, self._party)}: bucket {number + 1} from "
                            f"{streams.holder_of(self._plan, sender)}",
                            "it came twice, or is not in the plan",
                            "the same plan and bucket size at both ends",
                        )
                    )
                label = streams.label(self._plan, parcel)
                fetched = self._carrier.fetch(sender, parcel.bytes, handed_over, label)
                self._arriving.append((parcel, index, fetched))
            case ["taken", index]:
                parcel = self._unacknowledged.pop(index)
                self._carrier.taken(index, streams.label(self._plan, parcel))
                self._free.append(index)

    def _land(self) -> None:
        parcel, index, fetched = self._arriving.popleft()
        flat = fetched()
        unpack_pieces(parcel.pieces, self._storages, flat)
        finish_copies(flat)
        self._direct -= parcel.sender < len(self._plan.sources)
        self._member.push(str(parcel.sender), ["taken", index])

    def _overdue(self) -> Problem:
        """Names the first bucket that is late, and everybody who is."""
        if self._unacknowledged:
            late = list(self._unacknowledged.values())
            missing = f"no acknowledgement by {self._names(parcel.receiver for parcel in late)}"
        else:
            late = list(self._awaited.values())
            missing = f"nothing came from {self._names(parcel.sender for parcel in late)}"
        return streams.overdue(self._plan, late[0], self._member.meeting.timeout_seconds, missing)

    def _names(self, parties: Iterable[Party]) -> str:
        return few([streams.holder_of(self._plan, party) for party in sorted(set(parties))])

"""Whole tensors put together in memory that an engine's server maps: how the ways `direct` and `tensors` carry a plan.

The receiver of an engine owns one area for each of its destinations, with two slots. It tells the sources which tensors
lie where in which bucket; every source writes its slices at their final places, each byte once; when all have, the
receiver has the server load the slot while the sources write the other one. Areas are kept from sync to sync.

Areas on GPUs, shared by CUDA IPC, are written after torch's sources and have not been run.
"""

from __future__ import annotations

import mmap
import secrets
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from megagrpo.errors import EngineError, Problem, WeightSyncError
from megagrpo.weights.boxes import Storage
from megagrpo.weights.executors import sglang_payloads as payloads
from megagrpo.weights.executors.buckets import SLOTS, finish_copies
from megagrpo.weights.executors.meeting import Meeting, Member
from megagrpo.weights.executors.shared_memory import CudaArea, FileArea, file_stem, map_cuda, map_file
from megagrpo.weights.executors.staged_buckets import StagedBucket, storage_bytes
from megagrpo.weights.plan import Transfer, WeightPlan
from megagrpo.weights.views import box_view, stored_tensors, torch_dtype

BEFORE_SLOTS = mmap.PAGESIZE
"""Bytes of an area before its first slot: torch's header, and the slots begin on a page."""

Post = Callable[[str, Mapping[str, Any]], Mapping[str, Any]]
"""post(path, body): one request to the engine's server; its answer. Raises EngineError, naming the engine."""


class StagingSender:
    """Implements Sender (ways.py): writes this source's slices where the receivers ask for them.

    `ranks_of_destination` is how many destinations of a Sync each destination of this plan stands for: 1, or all tensor
    ranks of an engine.
    """

    def __init__(self, plan: WeightPlan, source: int, meeting: Meeting, ranks_of_destination: int = 1) -> None:
        self._plan, self._source, self._ranks = plan, source, ranks_of_destination
        self._member = meeting.join(plan.sources[source].holder)
        self._member.announce()
        self._mapped: dict[int, tuple[Any, torch.Tensor]] = {}

    def send(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        with self._member.attend(version) as sync:
            storages = stored_tensors(self._plan.sources[self._source], tensors)
            active = {index // self._ranks for index in sync.destinations}
            unwritten: dict[int, list[Transfer]] = defaultdict(list)
            for transfer in self._plan.outgoing(self._source):
                if transfer.destination in active:
                    unwritten[transfer.destination].append(transfer)
            asked: dict[str, _Request] = {}
            queue = source_queue(self._source)
            while unwritten:
                message = next_word(self._member, queue, lambda: self._overdue(unwritten, asked))
                match message:
                    case ["open", engine, tickets, places]:
                        asked[engine] = _Request(
                            {int(index): self._map(int(index), ticket) for index, ticket in tickets.items()}, places
                        )
                    case ["write", engine, bucket, at]:
                        self._write(asked[engine], bucket, at, unwritten, storages)
                        self._member.push(engine, ["written", self._source, bucket])

    def close(self) -> None:
        self._mapped.clear()

    @torch.no_grad()
    def _write(
        self,
        request: _Request,
        bucket: int,
        at: int,
        unwritten: dict[int, list[Transfer]],
        storages: Mapping[str, torch.Tensor],
    ) -> None:
        for index, flat in request.areas.items():
            of_storage = self._plan.destinations[index].storages
            left = []
            for transfer in unwritten.pop(index, []):
                into = transfer.destination_placement
                number, begin = request.places[into.storage]
                if number != bucket:
                    left.append(transfer)
                    continue
                view = view_in(flat, at + begin, of_storage[into.storage])
                box_view(view, into).copy_(
                    box_view(storages[transfer.source_placement.storage], transfer.source_placement)
                )
            if left:
                unwritten[index] = left
            finish_copies(flat)

    def _map(self, index: int, ticket: Any) -> torch.Tensor:
        known, flat = self._mapped.get(index, (None, None))
        if flat is None or known != ticket:
            holder = self._plan.destinations[index].holder
            stem = file_stem(self._member.meeting.run)
            cuda = isinstance(ticket, dict)
            flat = map_cuda(ticket, holder) if cuda else map_file(stem, ticket, holder, writable=True)
            self._mapped[index] = (ticket, flat)
        return flat

    def _overdue(self, unwritten: Mapping[int, list[Transfer]], asked: Mapping[str, _Request]) -> Problem:
        index, transfers = next(iter(unwritten.items()))
        begun = any(index in request.areas for request in asked.values())
        what = f"the rest of {len(transfers)} slices" if begun else "anything"
        return Problem(
            f"{self._member.name} to {self._plan.destinations[index].holder}",
            f"was not asked for {what} within {self._member.meeting.timeout_seconds:g} s "
            f"(next: {transfers[0].box.tensor})",
            fix="look for what stopped that engine; weights.timeout_seconds is the longest wait",
        )


@dataclass(frozen=True)
class _Request:
    """What one receiver said about its areas: by destination; by storage name, its bucket and where it begins in it."""

    areas: Mapping[int, torch.Tensor]
    places: Mapping[str, Sequence[int]]


class Staging:
    """An engine's end: its areas, and the order in which sources write and the server loads.

    `destinations` are the plan's indices of this engine, which all have the same storages by name; `queue` is what its
    messages are sent to. Areas are on `devices`, one for each destination.
    """

    def __init__(
        self,
        plan: WeightPlan,
        destinations: Sequence[int],
        member: Member,
        queue: str,
        buckets: tuple[StagedBucket, ...],
        devices: Sequence[torch.device],
    ) -> None:
        self._plan, self._destinations, self._member, self._queue = plan, destinations, member, queue
        self.buckets = buckets
        self._devices = devices
        self._slot_bytes = -(-max(bucket.bytes for bucket in buckets) // mmap.PAGESIZE) * mmap.PAGESIZE
        number_of = {name: number for number, bucket in enumerate(buckets) for name in bucket.begins}
        self._places = {name: [number, buckets[number].begins[name]] for name, number in number_of.items()}
        self._sources: list[set[int]] = [set() for _ in buckets]
        for index in destinations:
            for transfer in plan.incoming(index):
                self._sources[number_of[transfer.destination_placement.storage]].add(transfer.source)
        self._areas: list[FileArea | CudaArea] = []

    def run(self, load: Callable[[int], None]) -> None:
        """Has every bucket written, and then calls `load` with its number. Raises WeightSyncError."""
        self._open_areas()
        for source in sorted(set().union(*self._sources)):
            areas = zip(self._destinations, self._areas, strict=True)
            tickets = {index: area.ticket(source) for index, area in areas}
            self._member.push(source_queue(source), ["open", self._queue, tickets, self._places])
        missing = [set(sources) for sources in self._sources]
        for number in range(min(SLOTS, len(self.buckets))):
            self._ask(number)
        for number in range(len(self.buckets)):
            while missing[number]:
                overdue = partial(self._overdue, number, missing[number])
                message = self._member.wait(lambda: self._member.pop(self._queue), overdue)
                missing[message[2]].discard(message[1])
            self._fill_padding(number)
            load(number)
            if number + SLOTS < len(self.buckets):
                self._ask(number + SLOTS)

    def shared(self, position: int, number: int) -> list[tuple[str, Any]]:
        """The tensors of a bucket of the `position`-th destination, to be put into one payload."""
        area, storages = self._areas[position], self._plan.destinations[self._destinations[position]].storages
        file = payloads.mapped_file(area)
        return [
            (
                name,
                payloads.shared_tensor(
                    area, file, self._at(number) + begin, storages[name].shape, torch_dtype(storages[name].dtype)
                ),
            )
            for name, begin in self.buckets[number].begins.items()
        ]

    def shared_slot(self, position: int, number: int) -> Any:
        """All of a bucket as one uint8 tensor."""
        area = self._areas[position]
        return payloads.shared_tensor(
            area, payloads.mapped_file(area), self._at(number), (self.buckets[number].bytes,), torch.uint8
        )

    def label(self, number: int) -> str:
        names = list(self.buckets[number].begins)
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return f"bucket {number + 1} of {len(self.buckets)} for {self._member.name} ({names[0]}{more})"

    def close(self) -> None:
        """Frees the areas. May be called twice."""
        for area in self._areas:
            area.close()
        self._areas = []

    def _open_areas(self) -> None:
        if self._areas:
            return
        size = BEFORE_SLOTS + SLOTS * self._slot_bytes
        for device in self._devices:
            if device.type == "cuda":
                self._areas.append(CudaArea(size, device))
                continue
            area = FileArea(file_stem(self._member.meeting.run) + secrets.token_hex(8), size)
            payloads.begin_users(area)
            self._areas.append(area)

    def _at(self, number: int) -> int:
        return BEFORE_SLOTS + number % SLOTS * self._slot_bytes

    def _ask(self, number: int) -> None:
        for source in self._sources[number]:
            self._member.push(source_queue(source), ["write", self._queue, number, self._at(number)])

    @torch.no_grad()
    def _fill_padding(self, number: int) -> None:
        begins = self.buckets[number].begins
        for index, area in zip(self._destinations, self._areas, strict=True):
            manifest = self._plan.destinations[index]
            for fill in manifest.fills:
                if fill.storage in begins:
                    view = view_in(area.flat, self._at(number) + begins[fill.storage], manifest.storages[fill.storage])
                    view[tuple(slice(at, at + size) for at, size in zip(fill.at, fill.shape, strict=True))] = fill.value
            finish_copies(area.flat)

    def _overdue(self, number: int, missing: set[int]) -> Problem:
        names = ", ".join(self._plan.sources[source].holder for source in sorted(missing))
        return Problem(
            self.label(number),
            f"nothing from {names} within {self._member.meeting.timeout_seconds:g} s",
            fix="look for what stopped them; weights.timeout_seconds is the longest wait",
        )


def posted(post: Post, path: str, body: Mapping[str, Any], label: str) -> Mapping[str, Any]:
    """The server's answer. Raises WeightSyncError, saying of which bucket, if it died or refused."""
    try:
        return post(path, body)
    except EngineError as error:
        problems = [replace(problem, where=f"{label}: {problem.where}") for problem in error.problems]
        raise WeightSyncError(problems) from error


def next_word(member: Member, queue: str, overdue: Callable[[], Problem]) -> list[Any]:
    """The next message of somebody who may himself be waiting for others. He is given twice the time, counted from his
    last word: if one of them is missing, it is he who knows which, and says so first."""
    patient = True

    def look() -> Any:
        nonlocal patient
        message = member.pop(queue)
        if message is None and patient and not member.seconds_left():
            patient = False
            member.start_clock()
        return message

    message: list[Any] = member.wait(look, overdue)
    member.start_clock()
    return message


def source_queue(source: int) -> str:
    return f"source {source}"


def engine_queue(engine: int) -> str:
    return f"engine {engine}"


def view_in(flat: torch.Tensor, begin: int, storage: Storage) -> torch.Tensor:
    """The storage that begins at this byte of `flat`, in its dtype and shape."""
    return flat[begin : begin + storage_bytes(storage)].view(torch_dtype(storage.dtype)).view(storage.shape)

"""Whole checkpoint tensors, gathered by the first training rank and broadcast to every engine, as SGLang offers it.

The plan is whole_tensors.plan_for_source with source 0. The other sources pack what they owe to a bucket when asked,
and it travels point to point in the training ranks' own process group; a bucket is gathered while the one before is
being broadcast. All engines of a sync join one group: the model is gathered once and leaves source 0 once, whatever
their number. The price is that a fault of one engine ends the sync for all of them, as it does anyway; the next attempt
makes a new group of those who then take part.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from megagrpo.errors import Problem, WeightSyncError
from megagrpo.weights.executors.buckets import Piece, cut_into_buckets, pack_pieces
from megagrpo.weights.executors.meeting import Meeting, Sync
from megagrpo.weights.executors.process_group import ProcessGroup
from megagrpo.weights.executors.staged_buckets import staged_buckets
from megagrpo.weights.executors.staging import SLOTS, Post, engine_queue, finish_copies, posted, source_queue, view_in
from megagrpo.weights.executors.update_group import Broadcast, connect, group_name, naming_group
from megagrpo.weights.executors.whole_tensors import loaded_together
from megagrpo.weights.plan import WeightPlan
from megagrpo.weights.views import box_view, stored_tensors

GATHERER = 0
"""The source that gathers and broadcasts."""
UNLIMITED = 1 << 62


class BroadcastSender:
    """Implements Sender (ways.py). Every training rank has one; all of them take part in every sync.

    An engine has `ranks_per_engine` tensor ranks; `device` is the one that its weights and this rank's are on.
    """

    def __init__(
        self,
        plan: WeightPlan,
        source: int,
        meeting: Meeting,
        bucket_bytes: int,
        ranks_per_engine: int,
        device: torch.device,
    ) -> None:
        self._plan, self._source, self._bucket_bytes = plan, source, bucket_bytes
        self._ranks_per_engine, self._device = ranks_per_engine, device
        self._member = meeting.join(plan.sources[source].holder)
        self._member.announce()
        self._carrier = ProcessGroup(plan, source)
        self._engines: Any = None
        self._generation = -1

    def send(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        with self._member.attend(version) as sync:
            storages = stored_tensors(self._plan.sources[self._source], tensors)
            if self._source == GATHERER:
                self._gather(sync, storages)
            else:
                self._contribute(sync, storages)

    def close(self) -> None:
        self._carrier.close()
        if self._engines is not None:
            self._engines.abort()
        self._engines, self._generation = None, -1

    # --- the sources that are asked -----------------------------------------------------------------------------------

    def _contribute(self, sync: Sync, storages: Mapping[str, torch.Tensor]) -> None:
        _, layout = self._next("how the tensors are cut into buckets", "layout")
        of_bucket = self._pieces(self._source, layout)
        self._carrier.begin(_training(sync), self._member, self._device, max(map(_end, of_bucket), default=0))
        wanted = sum(bool(pieces) for pieces in of_bucket)
        unacknowledged = wanted
        while unacknowledged:
            match self._next(f"{wanted} buckets to be asked for or acknowledged", "want", "taken"):
                case ["want", number]:
                    flat = self._carrier.slot(number % SLOTS)
                    pack_pieces(of_bucket[number], storages, flat)
                    finish_copies(flat)
                    handed_over = self._carrier.hand_over(number % SLOTS, _end(of_bucket[number]), GATHERER)
                    self._member.push(source_queue(GATHERER), ["sent", self._source, number, handed_over])
                case ["taken", number]:
                    self._carrier.taken(
                        number % SLOTS, f"bucket {number + 1} of {len(layout)} from {self._member.name}"
                    )
                    unacknowledged -= 1

    # --- the source that gathers --------------------------------------------------------------------------------------

    @torch.no_grad()
    def _gather(self, sync: Sync, storages: Mapping[str, torch.Tensor]) -> None:
        whole = self._plan.destinations[0].storages
        buckets = staged_buckets(whole.values(), self._bucket_bytes, loaded_together, alignment=1)
        layout = [list(bucket.begins) for bucket in buckets]
        others = [source for source in range(len(self._plan.sources)) if source != GATHERER]
        for source in others:
            self._member.push(source_queue(source), ["layout", layout])
        pieces = {source: self._pieces(source, layout) for source in others}
        own = self._pieces(GATHERER, layout)
        self._carrier.begin(_training(sync), self._member, self._device, 0)
        self._connect_engines(sync)
        slot_bytes = max(bucket.bytes for bucket in buckets)
        slots = [torch.empty(slot_bytes, dtype=torch.uint8, device=self._device) for _ in range(SLOTS)]
        broadcast: Broadcast | None = None
        for number, bucket in enumerate(buckets):
            label = f"bucket {number + 1} of {len(buckets)} ({layout[number][0]})"
            views = {name: view_in(slots[number % SLOTS], begin, whole[name]) for name, begin in bucket.begins.items()}
            asked = {source for source in others if pieces[source][number]}
            for source in asked:
                self._member.push(source_queue(source), ["want", number])
            for piece in own[number]:
                target = box_view(views[piece.destination.storage], piece.destination)
                target.copy_(box_view(storages[piece.source.storage], piece.source))
            while asked:
                names = ", ".join(self._plan.sources[source].holder for source in sorted(asked))
                _, source, _, handed_over = self._next(f"{label} from {names}", "sent")
                of_source = pieces[source][number]
                flat = self._carrier.fetch(source, _end(of_source), handed_over, label)()
                for piece in of_source:
                    box_view(views[piece.destination.storage], piece.destination).copy_(piece.view_in(flat))
                finish_copies(flat)
                self._member.push(source_queue(source), ["taken", number])
                asked.discard(source)
            if broadcast is not None:
                broadcast.finish(self._member)
            for engine in self._active(sync):
                entries = [[name, whole[name].dtype, list(whole[name].shape)] for name in layout[number]]
                self._member.push(engine_queue(engine), ["bucket", number, len(buckets), entries])
            broadcast = Broadcast(self._engines, slots[number % SLOTS][: bucket.bytes], label)
        if broadcast is not None:
            broadcast.finish(self._member)

    def _connect_engines(self, sync: Sync) -> None:
        """The group that the engines' servers join by /init_weights_update_group; made anew when they change."""
        if self._generation == sync.generation:
            return
        if self._engines is not None:
            self._engines.abort()
        self._engines, self._generation = None, -1
        missing = set(self._active(sync))
        while missing:
            names = ", ".join(f"engine {engine}" for engine in sorted(missing))
            _, engine = self._next(f"the update group to be joined by {names}", "joining")
            missing.discard(engine)
        made: list[Any] = []
        failed: list[WeightSyncError] = []

        def make() -> None:
            try:
                with naming_group(f"{self._member.name}: update group with the engines"):
                    made.append(connect(sync, self._member.meeting.join(self._member.name), self._device))
            except WeightSyncError as error:
                failed.append(error)

        # In a thread, since torch waits in it for servers that may have failed, and hears no abort.
        threading.Thread(target=make, daemon=True).start()
        waited_for = Problem(
            f"{self._member.name}: update group with the engines",
            f"not complete within {self._member.meeting.timeout_seconds:g} s",
            "every tensor rank of every engine in it",
        )
        self._member.wait(lambda: made or failed or None, lambda: waited_for)
        if failed:
            raise failed[0]
        self._engines, self._generation = made[0], sync.generation

    def _active(self, sync: Sync) -> list[int]:
        return sorted({index // self._ranks_per_engine for index in sync.destinations})

    def _pieces(self, source: int, layout: Sequence[Sequence[str]]) -> list[tuple[Piece, ...]]:
        """What a source owes to each bucket."""
        number_of = {name: number for number, names in enumerate(layout) for name in names}
        transfers: list[list[Any]] = [[] for _ in layout]
        for transfer in self._plan.outgoing(source):
            transfers[number_of[transfer.destination_placement.storage]].append(transfer)
        cut = [cut_into_buckets(self._plan, of_bucket, UNLIMITED) for of_bucket in transfers]
        return [buckets[0] if buckets else () for buckets in cut]

    def _next(self, what: str, *kinds: str) -> list[Any]:
        """The next message, which must be of one of these kinds."""
        missing = Problem(
            f"{self._member.name} waits for {what}",
            f"nothing within {self._member.meeting.timeout_seconds:g} s",
            fix="look for what stopped that process; weights.timeout_seconds is the longest wait",
        )
        message: list[Any] = self._member.wait(lambda: self._member.pop(source_queue(self._source)), lambda: missing)
        if message[0] not in kinds:
            raise WeightSyncError(Problem(f"{self._member.name} waits for {what}", f"{message[0]} came instead"))
        return message


class BroadcastReceiver:
    """Implements Receiver (ways.py) for the `engine`-th engine, whose ranks are these `destinations` of a Sync.

    `backend` is gloo or nccl, as the engine's device has it.
    """

    def __init__(
        self, engine: int, destinations: Sequence[int], meeting: Meeting, post: Post, name: str, backend: str
    ) -> None:
        self._engine, self._first, self._post, self._backend = engine, destinations[0], post, backend
        self._member = meeting.join(name)
        self._member.announce()
        self._group: str | None = None
        self._generation = -1

    def receive(self, version: int) -> None:
        """Between the server's /begin_weight_update and /end_weight_update."""
        with self._member.attend(version) as sync:
            if self._generation != sync.generation:
                self._join(sync)
            number, count = -1, 1
            while number + 1 < count:
                look = partial(self._member.pop, engine_queue(self._engine))
                _, number, count, entries = self._member.wait(look, partial(self._overdue, number + 1))
                body = {
                    "names": [name for name, _, _ in entries],
                    "dtypes": [dtype for _, dtype, _ in entries],
                    "shapes": [shape for _, _, shape in entries],
                    "group_name": self._group,
                    "load_format": "flattened_bucket",
                    "flush_cache": False,
                }
                label = f"bucket {number + 1} of {count} for {self._member.name} ({entries[0][0]})"
                posted(self._post, "/update_weights_from_distributed", body, label)

    def close(self) -> None:
        """Leaves the group to the server, which may be gone."""
        self._group, self._generation = None, -1

    def _join(self, sync: Sync) -> None:
        where = f"{self._member.name}: update group"
        if self._group is not None:
            posted(self._post, "/destroy_weights_update_group", {"group_name": self._group}, where)
        self._group = None
        ranks = sorted(sync.destinations)
        self._member.push(source_queue(GATHERER), ["joining", self._engine])
        meeting = self._member.meeting
        body = {
            "master_address": meeting.host,
            "master_port": meeting.port,
            "rank_offset": 1 + ranks.index(self._first),
            "world_size": 1 + len(ranks),
            "group_name": group_name(meeting, sync),
            "backend": self._backend,
        }
        posted(self._post, "/init_weights_update_group", body, where)
        self._group, self._generation = group_name(meeting, sync), sync.generation

    def _overdue(self, number: int) -> Problem:
        return Problem(
            f"{self._member.name}: bucket {number + 1}",
            f"no broadcast by the first training rank within {self._member.meeting.timeout_seconds:g} s",
            fix="look for what stopped it; weights.timeout_seconds is the longest wait",
        )


def _training(sync: Sync) -> Sync:
    """As the training ranks' own group sees it: no engine rank is in it."""
    return replace(sync, destinations=frozenset())


def _end(pieces: Sequence[Piece]) -> int:
    return pieces[-1].end if pieces else 0

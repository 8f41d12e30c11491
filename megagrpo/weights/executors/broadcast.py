"""Whole checkpoint tensors, gathered by the first training rank and broadcast to every engine, as SGLang offers it.

The plan is whole_tensors.plan_for_source with source 0. The other sources pack what they owe to a bucket when asked,
and it travels point to point in the training ranks' own process group; a bucket is gathered while the one before is
being broadcast. Each engine has a group of its own with source 0: the model leaves source 0 once for each engine, and
in exchange an engine that dies, or is brought up to date alone, touches no other (see update_group.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from megagrpo.errors import Problem, WeightSyncError
from megagrpo.weights.executors.buckets import SLOTS, Piece, cut_into_buckets, finish_copies, pack_pieces
from megagrpo.weights.executors.meeting import Meeting, Sync
from megagrpo.weights.executors.process_group import ProcessGroup
from megagrpo.weights.executors.staged_buckets import staged_buckets
from megagrpo.weights.executors.staging import (
    Post,
    engine_queue,
    next_word,
    posted,
    source_queue,
    view_in,
)
from megagrpo.weights.executors.update_group import UpdateGroup
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
        self._groups: dict[int, UpdateGroup] = {}

    def send(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        with self._member.attend(version) as sync:
            storages = stored_tensors(self._plan.sources[self._source], tensors)
            if self._source == GATHERER:
                self._gather(sync, storages)
            else:
                self._contribute(sync, storages)

    def close(self) -> None:
        self._carrier.close()
        for group in self._groups.values():
            group.leave()
        self._groups.clear()

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
        groups = self._join_engines(sync)
        slot_bytes = max(bucket.bytes for bucket in buckets)
        slots = [torch.empty(slot_bytes, dtype=torch.uint8, device=self._device) for _ in range(SLOTS)]
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
            for group in groups.values():
                group.finish(self._member)
            entries = [[name, whole[name].dtype, list(whole[name].shape)] for name in layout[number]]
            for engine, group in groups.items():
                group.broadcast(slots[number % SLOTS][: bucket.bytes], label)
                self._member.push(engine_queue(engine), ["bucket", number, len(buckets), entries])
        for group in groups.values():
            group.finish(self._member)

    def _join_engines(self, sync: Sync) -> dict[int, UpdateGroup]:
        """By engine. A group is used again as long as both ends know the same one and all went well in it."""
        active = sorted({index // self._ranks_per_engine for index in sync.destinations})
        missing = set(active)
        while missing:
            names = ", ".join(f"engine {engine}" for engine in sorted(missing))
            _, engine, known = self._next(f"the update groups of {names}", "here")
            group = self._groups.get(engine)
            if group is None or group.name != known or not group.usable:
                if group is not None:
                    group.leave()
                name = f"megagrpo-{self._member.meeting.run}-{engine}-{sync.attempt}"
                group = UpdateGroup(
                    name, f"engine {engine}", self._ranks_per_engine, self._member.meeting, self._device
                )
                self._groups[engine] = group
            self._member.push(engine_queue(engine), ["group", group.name])
            missing.discard(engine)
        for engine in active:
            self._groups[engine].wait_until_joined(self._member)
        return {engine: self._groups[engine] for engine in active}

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
        queue = source_queue(self._source)
        if self._source == GATHERER:
            message: list[Any] = self._member.wait(partial(self._member.pop, queue), lambda: missing)
        else:
            message = next_word(self._member, queue, lambda: missing)
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
        self._engine, self._ranks, self._post, self._backend = engine, len(destinations), post, backend
        self._member = meeting.join(name)
        self._member.announce()
        self._group: str | None = None

    def receive(self, version: int) -> None:
        """Between the server's /begin_weight_update and /end_weight_update."""
        with self._member.attend(version):
            self._member.push(source_queue(GATHERER), ["here", self._engine, self._group])
            _, group = self._next(0)
            if group != self._group:
                self._join(group)
            number, count = -1, 1
            while number + 1 < count:
                _, number, count, entries = self._next(number + 1)
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
        self._group = None

    def _join(self, group: str) -> None:
        where = f"{self._member.name}: update group"
        if self._group is not None:
            posted(self._post, "/destroy_weights_update_group", {"group_name": self._group}, where)
        self._group = None
        body = {
            "master_address": self._member.meeting.host,
            "master_port": self._member.meeting.port,
            "rank_offset": 1,
            "world_size": 1 + self._ranks,
            "group_name": group,
            "backend": self._backend,
        }
        posted(self._post, "/init_weights_update_group", body, where)
        self._group = group

    def _next(self, number: int) -> list[Any]:
        overdue = Problem(
            f"{self._member.name}: bucket {number + 1}",
            f"nothing from the first training rank within {self._member.meeting.timeout_seconds:g} s",
            fix="look for what stopped it; weights.timeout_seconds is the longest wait",
        )
        return next_word(self._member, engine_queue(self._engine), lambda: overdue)


def _training(sync: Sync) -> Sync:
    """As the training ranks' own group sees it: no engine rank is in it."""
    return replace(sync, destinations=frozenset())


def _end(pieces: Sequence[Piece]) -> int:
    return pieces[-1].end if pieces else 0

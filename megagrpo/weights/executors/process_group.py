"""Buckets between any nodes: point to point in a process group of training ranks and engine ranks (gloo or NCCL).

The group is made in the meeting's store, apart from torch's default group, which Megatron and SGLang each have to
themselves. It is made again when those who take part have changed or a sync has failed: see Sync.generation.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from megagrpo.errors import Problem
from megagrpo.weights.executors import streams
from megagrpo.weights.executors.buckets import SLOTS
from megagrpo.weights.executors.meeting import Member, Sync
from megagrpo.weights.executors.streams import Party
from megagrpo.weights.executors.torch_groups import Connecting, transport_errors
from megagrpo.weights.plan import WeightPlan


class ProcessGroup:
    """Implements Carrier (flow.py) for one party. Each slot is a send of its own, matched by the slot's number."""

    def __init__(self, plan: WeightPlan, party: Party) -> None:
        self._plan, self._party = plan, party
        self._group: Any = None
        self._generation = -1
        self._rank_of: dict[Party, int] = {}
        # NCCL refuses two ranks on one GPU: training ranks and engines that share theirs meet in host memory, by gloo.
        places = plan.topology
        self._on_host = bool({*places.sources} & {place for place in places.destinations if place.device is not None})
        self._device = torch.device("cpu")
        self._slots: list[torch.Tensor] = []
        self._landing: list[torch.Tensor] = [torch.empty(0, dtype=torch.uint8)] * SLOTS
        self._landed = 0
        self._sends: dict[int, Any] = {}
        self._seconds_left: Callable[[], float] = lambda: 0.0

    def begin(self, sync: Sync, member: Member, device: torch.device, slot_bytes: int) -> None:
        device = torch.device("cpu") if self._on_host else device
        self._device, self._seconds_left = device, member.seconds_left
        if self._generation != sync.generation:
            self.close()
            parties = [*range(len(self._plan.sources))]
            parties += [streams.destination_party(self._plan, index) for index in sorted(sync.destinations)]
            self._rank_of = {party: rank for rank, party in enumerate(parties)}
            self._roll_call(sync, member)
            where = f"{member.name}: process group of {len(parties)} training and engine ranks"
            prefix, rank = f"group/{sync.generation}", self._rank_of[self._party]
            connecting = Connecting(where, member.meeting, [prefix], rank, len(parties), device)
            overdue = Problem(
                where,
                f"not connected within {member.meeting.timeout_seconds:g} s, though all were there",
                fix="look for what ended or stopped one of them; nodes must reach each other on any port",
            )
            self._group = connecting.wait(member, lambda: overdue)
            self._generation = sync.generation
        if not self._slots or slot_bytes > self._slots[0].numel():
            self._slots = [torch.empty(slot_bytes, dtype=torch.uint8, device=device) for _ in range(SLOTS)]

    def slot(self, index: int) -> torch.Tensor:
        return self._slots[index]

    def hand_over(self, index: int, parcel_bytes: int, receiver: Party) -> Any:
        with transport_errors(f"sending to {streams.holder_of(self._plan, receiver)}"):
            self._sends[index] = self._group.send([self._slots[index][:parcel_bytes]], self._rank_of[receiver], index)
        return index

    def taken(self, index: int, label: str) -> None:
        with transport_errors(label):
            self._sends.pop(index).wait(self._timeout())

    def fetch(self, sender: Party, parcel_bytes: int, handed_over: Any, label: str) -> Callable[[], torch.Tensor]:
        index, self._landed = self._landed, (self._landed + 1) % SLOTS
        if self._landing[index].numel() < parcel_bytes:
            self._landing[index] = torch.empty(parcel_bytes, dtype=torch.uint8, device=self._device)
        flat = self._landing[index][:parcel_bytes]
        with transport_errors(label):
            work = self._group.recv([flat], self._rank_of[sender], handed_over)

        def wait() -> torch.Tensor:
            with transport_errors(label):
                work.wait(self._timeout())
            return flat

        return wait

    def close(self) -> None:
        self._sends.clear()
        if self._group is not None:
            self._group.abort()
        self._group, self._generation = None, -1

    def _roll_call(self, sync: Sync, member: Member) -> None:
        """Everybody is there before anybody connects: a missing one is named, and an abort is heard."""
        key = f"group/{sync.generation}/{{}}"
        member.say(key.format(self._party), True)
        for party in self._rank_of:
            member.wait(partial(member.hear, key.format(party)), partial(self._missing, member, party))

    def _missing(self, member: Member, party: Party) -> Problem:
        return Problem(
            f"{member.name}: process group for weights",
            f"{streams.holder_of(self._plan, party)} did not join within {member.meeting.timeout_seconds:g} s",
            f"all {len(self._rank_of)} training and engine ranks",
        )

    def _timeout(self) -> timedelta:
        return timedelta(seconds=max(0.001, self._seconds_left()))

"""Buckets between any nodes: point to point in a process group of training ranks and engine ranks (gloo or NCCL).

The group is made directly, in the rendezvous's store: torch's registry does not know it, so it needs no default group
in this process, and leaves those of Megatron and SGLang alone. It is made anew when the peers have changed or a sync
has failed: see Sync.generation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megagrpo.errors import Problem, WeightSyncError, brief
from megagrpo.ports import own_address
from megagrpo.weights.transport.buckets import SLOTS, Peer
from megagrpo.weights.transport.rendezvous import Member, Rendezvous, Sync


class ProcessGroup:
    """Implements Transport (buckets.py) for one peer. Each slot is a send of its own, matched by the slot's number.

    With `on_host` the bytes go through host memory, by gloo, also if the weights are on GPUs.
    """

    def __init__(self, peer: Peer, *, on_host: bool) -> None:
        self._peer, self._on_host = peer, on_host
        self._group: Any = None
        self._generation = -1
        self._rank_of: dict[Peer, int] = {}
        self._names: Mapping[Peer, str] = {}
        self._device = torch.device("cpu")
        self._slots: list[torch.Tensor] = []
        self._landing: list[torch.Tensor] = [torch.empty(0, dtype=torch.uint8)] * SLOTS
        self._landed = 0
        self._sends: dict[int, Any] = {}
        self._seconds_left: Callable[[], float] = lambda: 0.0

    def connect(
        self, sync: Sync, member: Member, peers: Mapping[Peer, str], device: torch.device, slot_bytes: int
    ) -> None:
        device = torch.device("cpu") if self._on_host else device
        self._device, self._seconds_left = device, member.seconds_left
        if self._generation != sync.generation:
            self.close()
            self._names, self._rank_of = peers, {peer: rank for rank, peer in enumerate(peers)}
            self._call_roll(sync, member)
            self._group = self._connected(sync, member)
            self._generation = sync.generation
        if not self._slots or slot_bytes > self._slots[0].numel():
            self._slots = [torch.empty(slot_bytes, dtype=torch.uint8, device=device) for _ in range(SLOTS)]

    def slot(self, index: int) -> torch.Tensor:
        return self._slots[index]

    def send(self, index: int, bucket_bytes: int, receiver: Peer) -> Any:
        with _transport_errors(f"sending to {self._names[receiver]}"):
            self._sends[index] = self._group.send([self._slots[index][:bucket_bytes]], self._rank_of[receiver], index)
        return index

    def sent(self, index: int, label: str) -> None:
        with _transport_errors(label):
            self._sends.pop(index).wait(self._timeout())

    def receive(self, sender: Peer, bucket_bytes: int, ticket: Any, label: str) -> Callable[[], torch.Tensor]:
        if ticket not in range(SLOTS):
            raise WeightSyncError(Problem(label, f"a ticket {brief(ticket)}", "the same weights.transfer at both ends"))
        index, self._landed = self._landed, (self._landed + 1) % SLOTS
        if self._landing[index].numel() < bucket_bytes:
            self._landing[index] = torch.empty(bucket_bytes, dtype=torch.uint8, device=self._device)
        flat = self._landing[index][:bucket_bytes]
        with _transport_errors(label):
            work = self._group.recv([flat], self._rank_of[sender], ticket)

        def wait() -> torch.Tensor:
            with _transport_errors(label):
                work.wait(self._timeout())
            return flat

        return wait

    def close(self) -> None:
        self._sends.clear()
        if self._group is not None:
            self._group.abort()
        self._group, self._generation = None, -1

    def _call_roll(self, sync: Sync, member: Member) -> None:
        """Waits until all peers are there, before any of them connects. Names a missing peer; an abort ends it."""
        key = f"group/{sync.generation}/{{}}"
        member.write(key.format(self._peer), True)
        for peer in self._rank_of:
            missing = partial(member.late, self._where(member), f"{self._names[peer]} did not join")
            member.wait(partial(member.read, key.format(peer), bool), missing)

    def _where(self, member: Member) -> str:
        return f"{member.name}: process group of {len(self._rank_of)} training and engine ranks"

    def _connected(self, sync: Sync, member: Member) -> Any:
        """The new group. It is made in a thread, because torch waits for all the others, aborted or not."""
        where = self._where(member)
        made: list[Any] = []
        failed: list[Exception] = []

        def make() -> None:
            try:
                with _transport_errors(where):
                    # A connection of its own: a wait in one connection holds up all others that use it.
                    store = member.rendezvous.join(where).store
                    made.append(self._new_group(dist.PrefixStore(f"group/{sync.generation}", store), member.rendezvous))
            except (WeightSyncError, ValueError, TypeError) as error:
                failed.append(error)

        thread = threading.Thread(target=make, daemon=True)
        thread.start()
        given = f"not connected within {member.rendezvous.timeout_seconds:g} s, though all were there"
        fix = "look for what ended or stopped one of them; nodes must reach each other on any port"
        overdue = Problem(where, given, fix=fix)
        member.wait(lambda: None if thread.is_alive() else True, lambda: overdue)
        if failed:
            raise failed[0]
        return made.pop()  # its new owner alone ends it

    def _new_group(self, store: dist.Store, rendezvous: Rendezvous) -> Any:
        rank, ranks = self._rank_of[self._peer], len(self._rank_of)
        timeout = timedelta(seconds=rendezvous.timeout_seconds)
        if self._device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            with torch.cuda.device(self._device):  # a new thread begins on the first device
                return dist.ProcessGroupNCCL(store, rank, ranks, options)
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timeout
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_address(rendezvous.store.host))]
        return dist.ProcessGroupGloo(store, rank, ranks, options)

    def _timeout(self) -> timedelta:
        return timedelta(seconds=max(0.001, self._seconds_left()))


@contextmanager
def _transport_errors(where: str) -> Iterator[None]:
    """torch's transports raise RuntimeError for a peer that died and for a timeout; sockets raise OSError."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        fix = "look for what ended or stopped that process"
        raise WeightSyncError(Problem(where, reason, "both ends alive and connected", fix)) from error

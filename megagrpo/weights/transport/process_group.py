"""Buckets between any nodes: point to point in a process group of training ranks and engine ranks (gloo or NCCL).

The group is made directly, in the rendezvous's store: torch's registry does not know it, so it needs no default group
in this process, and leaves those of Megatron and SGLang alone. It is made anew when the peers have changed or a sync
has failed: see Sync.generation.

NCCL makes a communicator for each pair of ranks when they first send, and blocks both until both are there. Therefore
all pairs that a sync uses connect before it begins, every end in the same order of pairs: the first pair of those that
are left always has both its ends. A pair's operations run in order on a stream of its own. While one waits for its
peer, a GPU may start no later one of any stream (CUDA_DEVICE_MAX_CONNECTIONS is 1 in training ranks). Therefore each
direction has a group of its own, and a peer is sent one bucket at a time: no operation ever lies behind another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megagrpo.errors import Problem, WeightSyncError, brief, first_line
from megagrpo.processes.ports import own_address
from megagrpo.weights.transport.buckets import Peer
from megagrpo.weights.transport.ends import SLOTS, Part, Ticket
from megagrpo.weights.transport.rendezvous import Member, Rendezvous, Sync, in_thread
from megagrpo.weights.transport.shared_memory import SharedMemory

GREETING = 2 * SLOTS
"""The tag of the byte with which a pair connects; buckets have the numbers of their slots."""


class ProcessGroup:
    """A Transport (ends.py) for one peer, by a group of all peers. Each slot is a send of its own, matched by the
    slot's number. `memory` returns a slot's memory; None: slots are made here."""

    def __init__(self, peer: Peer, memory: Callable[[int], torch.Tensor] | None = None) -> None:
        self._peer, self._memory = peer, memory
        self._slots = [torch.empty(0, dtype=torch.uint8)] * 2 * SLOTS
        self._generation = -1
        self._groups: tuple[Any, ...] = ()  # to higher ranks, and to lower ones
        self._rank_of: dict[Peer, int] = {}
        self._names: Mapping[Peer, str] = {}
        self._sends: dict[int, tuple[Any, Peer]] = {}
        self.device = torch.device("cpu")

    def connect(self, sync: Sync, member: Member, part: Part, device: torch.device) -> None:
        """Makes the group of part.peers and connects part.pairs, unless they are those of the sync before."""
        self.device, self._member = device, member
        if self._generation != sync.generation:
            self.close()
            self._names, self._rank_of = part.peers, {peer: rank for rank, peer in enumerate(part.peers)}
            # All peers join before any of them connects: a peer that is missing is named, and an abort ends the wait.
            key = f"group/{sync.generation}/{{}}"
            member.write(key.format(self._peer), True)
            for peer in self._rank_of:
                missing = partial(member.late, self._where(member), f"{self._names[peer]} did not join")
                member.wait(partial(member.read, key.format(peer), bool), missing)
            self._groups = self._connected(sync, member, part)
            self._generation = sync.generation
        if self._memory is None:
            for index, needed in enumerate([part.sent_bytes] * SLOTS + [part.received_bytes] * SLOTS):
                if needed > self._slots[index].numel():
                    self._slots[index] = torch.empty(needed, dtype=torch.uint8, device=device)

    def slot(self, index: int) -> torch.Tensor:
        return self._memory(index) if self._memory else self._slots[index]

    def ticket(self, index: int, receiver: Peer) -> int:
        return index

    @property
    def _in_order(self) -> bool:
        """Returns whether a pair's operations run in order on one stream: NCCL."""
        return self.device.type == "cuda"

    def may_send(self, receiver: Peer) -> bool:
        return not self._in_order or all(receiver != to for _, to in self._sends.values())

    def send(self, index: int, bucket_bytes: int, receiver: Peer) -> None:
        with _errors(f"sending to {self._names[receiver]}"):
            group, flat = self._group(self._peer, receiver), self.slot(index)[:bucket_bytes]
            self._sends[index] = group.send([flat], self._rank_of[receiver], index), receiver

    def sent(self, index: int, label: str) -> None:
        self._finish(self._sends.pop(index)[0], label)

    def receive(
        self, sender: Peer, bucket_bytes: int, ticket: Ticket, index: int, label: str
    ) -> Callable[[], torch.Tensor]:
        if not isinstance(ticket, int) or ticket not in range(SLOTS):
            raise WeightSyncError(Problem(label, f"a ticket {brief(ticket)}", "the same weights.transfer at both ends"))
        flat = self.slot(index)[:bucket_bytes]
        with _errors(label):
            work = self._group(sender, self._peer).recv([flat], self._rank_of[sender], ticket)

        def wait() -> torch.Tensor:
            self._finish(work, label)
            return flat

        return wait

    def close(self) -> None:
        self._sends.clear()
        for group in set(self._groups):
            group.abort()
        self._groups, self._generation = (), -1

    def _group(self, sender: Peer, receiver: Peer) -> Any:
        return self._groups[self._rank_of[sender] > self._rank_of[receiver]]

    def _finish(self, work: Any, label: str) -> None:
        """Waits until the bytes have moved. A wait for NCCL only orders streams, and may return before."""
        with _errors(label):
            if self._in_order:
                late = partial(self._member.late, label, "its bytes did not arrive")
                self._member.wait(lambda: work.is_completed() or None, late)
            work.wait(self._timeout())

    def _where(self, member: Member) -> str:
        return f"{member.name}: process group of {len(self._rank_of)} ranks"

    def _connected(self, sync: Sync, member: Member, part: Part) -> tuple[Any, ...]:
        """Returns the new groups, with all pairs connected."""
        where = self._where(member)

        def make() -> tuple[Any, ...]:
            with _errors(where):
                if self.device.type == "cuda":
                    torch.cuda.set_device(self.device)  # a new thread begins on the first
                # A connection of its own: a wait in one connection holds up all others that use it.
                store = member.rendezvous.join(where).store
                groups = self._new_groups(dist.PrefixStore(f"group/{sync.generation}", store), member.rendezvous)
                self._greet(groups, part)
                return groups

        made = in_thread(make)
        given = f"not connected within {member.rendezvous.timeout_seconds:g} s, though all were there"
        fix = "look for what ended or stopped one of them; nodes must reach each other on any port"
        overdue = Problem(where, given, fix=fix)
        member.wait(lambda: made.done() or None, lambda: overdue)
        return made.result()

    def _new_groups(self, store: dist.Store, rendezvous: Rendezvous) -> tuple[Any, ...]:
        rank, ranks = self._rank_of[self._peer], len(self._rank_of)
        timeout = timedelta(seconds=rendezvous.timeout_seconds)
        if self.device.type == "cuda":
            # Its watchdog ends the process of an operation that is late: not before we have given it up.
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = 2 * timeout
            stores = dist.PrefixStore("up", store), dist.PrefixStore("down", store)
            return tuple(dist.ProcessGroupNCCL(its, rank, ranks, options) for its in stores)
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timeout
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_address(rendezvous.store.host))]
        group = dist.ProcessGroupGloo(store, rank, ranks, options)
        return group, group

    def _greet(self, groups: tuple[Any, ...], part: Part) -> None:
        """Sends or receives a byte for each pair of this peer, one after another: by their lower rank, then higher."""
        rank_of, rank = self._rank_of, self._rank_of[self._peer]
        pairs = [(rank_of[sender], rank_of[receiver]) for sender, receiver in part.pairs]
        byte = torch.zeros(1, dtype=torch.uint8, device=self.device)
        for sender, receiver in sorted(pairs, key=lambda pair: (*sorted(pair), pair)):
            group = groups[sender > receiver]
            begin, other = (group.send, receiver) if sender == rank else (group.recv, sender)
            work = begin([byte], other, GREETING)
            work.wait(self._timeout())
            if self.device.type == "cuda":
                torch.cuda.current_stream().synchronize()

    def _timeout(self) -> timedelta:
        return timedelta(seconds=max(0.001, self._member.seconds_left()))


@contextmanager
def _errors(where: str) -> Iterator[None]:
    """Raises WeightSyncError for torch's RuntimeError (a peer died, or a timeout) and for the OSError of sockets."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        needed, fix = "both ends alive and connected", "look for what ended or stopped that process"
        raise WeightSyncError(Problem(where, first_line(error), needed, fix)) from error


class TwoHops:
    """A Transport (ends.py) for one peer, where engines share GPUs with training ranks on several nodes: NCCL allows no
    two processes on one GPU. The first `sources` peers are training ranks.

    Between nodes a bucket goes to the training rank beside its receiver, in a process group of training ranks alone,
    and lands in that rank's shared memory, which the receiver maps. Within a node it goes through shared memory.
    """

    def __init__(self, peer: Peer, sources: int, run: str) -> None:
        self._peer, self._sources = peer, sources
        self._near = SharedMemory(run)
        self._far = ProcessGroup(peer, self._near.slot)
        self._on_the_way: set[int] = set()  # slots whose bucket goes to another node

    def connect(self, sync: Sync, member: Member, part: Part, device: torch.device) -> None:
        far = tuple(pair for pair in part.pairs if max(pair) < self._sources)
        arrives = any(receiver == self._peer for _, receiver in far)
        if arrives:
            self._near.make_slots(2 * SLOTS, max(part.sent_bytes, part.received_bytes), device)
        else:
            self._near.connect(sync, member, part, device)
        if self._peer < self._sources:
            ranks = {peer: name for peer, name in part.peers.items() if peer < self._sources}
            self._far.connect(sync, member, replace(part, peers=ranks, pairs=far), device)

    def slot(self, index: int) -> torch.Tensor:
        return self._near.slot(index)

    def may_send(self, receiver: Peer) -> bool:
        return receiver >= self._sources or self._far.may_send(receiver)

    def ticket(self, index: int, receiver: Peer) -> Ticket:
        return index if receiver < self._sources else self._near.ticket(index, receiver)

    def send(self, index: int, bucket_bytes: int, receiver: Peer) -> None:
        if receiver < self._sources:
            self._on_the_way.add(index)
            self._far.send(index, bucket_bytes, receiver)

    def sent(self, index: int, label: str) -> None:
        if index in self._on_the_way:
            self._on_the_way.remove(index)
            self._far.sent(index, label)

    def receive(
        self, sender: Peer, bucket_bytes: int, ticket: Ticket, index: int, label: str
    ) -> Callable[[], torch.Tensor]:
        if self._peer < self._sources:
            return self._far.receive(sender, bucket_bytes, ticket, index, label)
        return self._near.receive(sender, bucket_bytes, ticket, index, label)

    def close(self) -> None:
        self._on_the_way.clear()
        self._far.close()
        self._near.close()

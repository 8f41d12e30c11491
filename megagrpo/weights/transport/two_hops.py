"""Buckets of engines that share GPUs with training ranks on several nodes: NCCL allows no two processes on one GPU.

Between nodes a bucket goes to the training rank beside its receiver, in a process group of training ranks alone, and
lands in that rank's shared memory, which the receiver maps. Within a node it goes through shared memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from megagrpo.weights.transport.buckets import Peer
from megagrpo.weights.transport.ends import SLOTS, Part, Ticket
from megagrpo.weights.transport.process_group import ProcessGroup
from megagrpo.weights.transport.rendezvous import Member, Sync
from megagrpo.weights.transport.shared_memory import SharedMemory


class TwoHops:
    """A Transport (ends.py) for one peer. The first `sources` peers are training ranks."""

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

"""The ranks' side of the weight tests: real Megatron models that send, and peers that die or stop on the way."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megagrpo.errors import Problem
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.megatron import model, process
from megagrpo.weights.digest import sent_digests
from megagrpo.weights.plan import WeightPlan
from megagrpo.weights.transport.buckets import BucketReceiver, BucketSender, Peer, Transport, destination_peer
from megagrpo.weights.transport.choice import Channel, TransportName, open_sender
from megagrpo.weights.transport.process_group import ProcessGroup
from megagrpo.weights.transport.rendezvous import Rendezvous
from megagrpo.weights.transport.shared_memory import SharedMemory
from tests.distributed.parity_ranks import load_model
from tests.weight_streams import empty
from tests.weights_oracle import Tensors


def send_model(
    directory: Path,
    layout: ParallelLayout,
    plan: WeightPlan,
    rendezvous: Rendezvous,
    transports: list[TransportName],
    bucket_bytes: int,
) -> dict[int, dict[str, int]]:
    """Sends the model once by each transport, as version 0, 1, ..., each doubled. The digests of the last."""
    source = torch.distributed.get_rank()
    process.start_parallel(layout, seed=1)
    tensors = model.named_tensors(load_model(directory, layout, torch.float32)[0])
    member = rendezvous.join(f"rank {source}")
    for version, transport in enumerate(transports):
        member.wait(lambda key=f"go {version}": member.read(key), lambda: Problem("the test does not go on"))
        for tensor in tensors.values():
            tensor.mul_(2)
        sender = open_sender(Channel(transport, rendezvous, bucket_bytes), plan, source)
        sender.send(version, tensors)
        sender.close()
    return sent_digests(plan, source, tensors)


def send_and_die(
    plan: WeightPlan, rendezvous: Rendezvous, name: TransportName, held: list[Tensors], bucket_bytes: int
) -> None:
    """Rank 1 is killed with its third bucket; in a process group once it was announced, before any byte has left."""
    source = torch.distributed.get_rank()
    transport = _transport(name, source, rendezvous)
    if source == 1:
        transport = Dying(transport, bucket=2)
    BucketSender(plan, source, rendezvous, bucket_bytes, transport).send(0, held[source])


def receive_and_stop(plan: WeightPlan, rendezvous: Rendezvous, name: TransportName, bucket_bytes: int) -> None:
    """Stops, as if it hung, when its first bucket arrives."""
    transport = Stopping(_transport(name, destination_peer(plan, 0), rendezvous))
    BucketReceiver(plan, 0, empty(plan.destinations[0]), rendezvous, bucket_bytes, transport).receive(0)


def _transport(name: TransportName, peer: Peer, rendezvous: Rendezvous) -> Any:
    match name:
        case TransportName.SHARED_MEMORY:
            return SharedMemory(rendezvous.run)
        case TransportName.PROCESS_GROUP:
            return ProcessGroup(peer, on_host=True)
    raise ValueError(f"{name} has no case here")


class Dying:
    """A transport whose process is killed at a bucket."""

    def __init__(self, transport: Transport, bucket: int) -> None:
        self._transport, self._before = transport, bucket

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def send(self, index: int, bucket_bytes: int, receiver: Peer) -> Any:
        if self._before > 0:
            self._before -= 1
            return self._transport.send(index, bucket_bytes, receiver)
        if isinstance(self._transport, SharedMemory):
            os.kill(os.getpid(), signal.SIGKILL)
        self._before = -1
        return index

    def slot(self, index: int) -> torch.Tensor:
        if self._before < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return self._transport.slot(index)

    def sent(self, index: int, label: str) -> None:
        if self._before < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self._transport.sent(index, label)


class Stopping:
    """A transport whose process is stopped when the first bucket arrives."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def receive(self, sender: Peer, bucket_bytes: int, ticket: Any, label: str) -> Callable[[], torch.Tensor]:
        os.kill(os.getpid(), signal.SIGSTOP)
        return self._transport.receive(sender, bucket_bytes, ticket, label)

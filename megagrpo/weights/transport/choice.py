"""Chooses the transport of a run, and opens both of its ends.

    host = RendezvousHost(host="10.0.0.1", timeout_seconds=600)     # driver
    transport = choose_transport("auto", topology)                  # driver
    channel = Channel(transport, host.rendezvous, bucket_bytes)     # driver, which sends it to both ends
    sender = open_sender(channel, plan, source)                     # in every training rank
    receiver = open_receiver(channel, plan, destination, tensors)   # in every engine rank

    host.open(version, destinations)               # driver, before each sync: which engine ranks take part
    sender.send(version, tensors)                  # in every training rank, all at the same time as
    receiver.receive(version)                      # in every engine rank that takes part
    host.abort(problems)                           # driver, if one of them failed: all others end with WeightSyncError

Both ends control the flow themselves: the driver only starts them and waits. An error at either end ends the attempt;
the next attempt begins with `host.open`, with the same senders and receivers.

To add a transport: a class that implements Transport (ends.py), its name and its row in TRANSPORTS, its name in the
recipe; docs/extending.md lists all files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch

from megagrpo.errors import Problem, RecipeError
from megagrpo.weights.boxes import Topology
from megagrpo.weights.plan import WeightPlan
from megagrpo.weights.transport.buckets import Peer, destination_peer
from megagrpo.weights.transport.disk import DiskFiles, DiskSender
from megagrpo.weights.transport.ends import BucketReceiver, BucketSender, Transport
from megagrpo.weights.transport.process_group import ProcessGroup, TwoHops
from megagrpo.weights.transport.rendezvous import Rendezvous
from megagrpo.weights.transport.shared_memory import SharedMemory


class TransportName(StrEnum):
    """The values of the recipe's weights.transfer, besides auto. TRANSPORTS has a row for each."""

    SHARED_MEMORY = "shared_memory"
    TWO_HOPS = "two_hops"
    PROCESS_GROUP = "process_group"
    DISK = "disk"


@dataclass(frozen=True)
class Channel:
    """The transport of a run's weights and its settings, the same at both ends."""

    transport: TransportName
    rendezvous: Rendezvous
    bucket_bytes: int


Sender = BucketSender | DiskSender
"""The end of one training rank. It lasts from sync to sync."""


@dataclass(frozen=True)
class TransportKind:
    """A transport: how its ends are opened, and the places for which it works."""

    opened: Callable[[Channel, WeightPlan, Peer], Transport] | None
    """Opens the end of a peer. None: the engine's server reads files."""
    works: Callable[[Topology], bool] = lambda topology: True
    given: str = ""
    """The reason, with `needed` and `fix`, why it does not work elsewhere."""
    needed: str = ""
    fix: str = "transfer: auto"


TRANSPORTS: dict[TransportName, TransportKind] = {
    # Exact shards within one node: files in /dev/shm, CUDA IPC buffers on GPUs.
    TransportName.SHARED_MEMORY: TransportKind(
        lambda channel, plan, peer: SharedMemory(channel.rendezvous.run),
        lambda topology: len(topology.nodes) == 1,
        " between {nodes} nodes",
        "training ranks and engines on one node: the bytes go through that node's memory",
        "transfer: auto, process_group or disk",
    ),
    # Exact shards, between nodes on which training ranks share devices with engines.
    TransportName.TWO_HOPS: TransportKind(
        lambda channel, plan, peer: TwoHops(peer, len(plan.sources), channel.rendezvous.run),
        lambda topology: None not in topology.local_sources,
        ", and engines away from training ranks",
        "a training rank beside every engine rank",
    ),
    # Exact shards, point to point between any nodes: gloo on CPUs, NCCL on GPUs, which no two ranks may share.
    TransportName.PROCESS_GROUP: TransportKind(
        lambda channel, plan, peer: ProcessGroup(peer),
        lambda topology: not topology.shared_devices,
        " between several processes on one GPU",
        "one process on each GPU, for NCCL",
        "transfer: auto; engines on GPUs of their own, or on all GPUs of the training ranks",
    ),
    # A checkpoint on a file system that both ends reach.
    TransportName.DISK: TransportKind(None),
}
"""In the order in which auto tries them; the last one must be named."""


def choose_transport(wanted: str, topology: Topology) -> TransportName:
    """Returns the transport for `wanted`: the recipe's weights.transfer, or disk for auto with external servers.

    Raises RecipeError if the recipe names a transport that cannot work here.
    """
    if wanted == "auto":
        *tried, last = (name for name, kind in TRANSPORTS.items() if kind.opened)
        transport = next((name for name in tried if TRANSPORTS[name].works(topology)), last)
    else:
        transport = TransportName(wanted)
    kind = TRANSPORTS[transport]
    if not kind.works(topology):
        given = f"{transport}{kind.given}"
        raise RecipeError(Problem("weights.transfer", given.format(nodes=len(topology.nodes)), kind.needed, kind.fix))
    return transport


def open_sender(channel: Channel, plan: WeightPlan, source: int, files: DiskFiles | None = None) -> Sender:
    """Returns the end of the `source`-th training rank. DISK writes to `files`; the other transports do not need it."""
    if opened := TRANSPORTS[channel.transport].opened:
        return BucketSender(plan, source, channel.rendezvous, channel.bucket_bytes, opened(channel, plan, source))
    if files is None:
        raise ValueError("disk needs DiskFiles, which say where to write")
    return DiskSender(plan, source, channel.rendezvous, files)


def open_receiver(
    channel: Channel, plan: WeightPlan, destination: int, tensors: Mapping[str, torch.Tensor]
) -> BucketReceiver:
    """Returns an engine rank's end, for exact shards, in the process that holds `tensors`, its storages by name.

    `plan` may be the rank's part of the whole. Raises ModelError if `tensors` are not those of the manifest.
    """
    if (opened := TRANSPORTS[channel.transport].opened) is None:
        raise ValueError("disk has no end in an engine rank: the engine's server reads the files")
    transport = opened(channel, plan, destination_peer(plan, destination))
    return BucketReceiver(plan, destination, tensors, channel.rendezvous, channel.bucket_bytes, transport)

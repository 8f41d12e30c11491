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

To add a transport: a class that implements Transport (ends.py), its name and its case here, its name in the recipe;
docs/architecture.md lists all files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch

from megagrpo.errors import Problem, RecipeError
from megagrpo.weights.boxes import Topology
from megagrpo.weights.plan import WeightPlan
from megagrpo.weights.transport.buckets import Peer, destination_peer
from megagrpo.weights.transport.disk import DiskFiles, DiskSender
from megagrpo.weights.transport.ends import BucketReceiver, BucketSender, Transport
from megagrpo.weights.transport.process_group import ProcessGroup
from megagrpo.weights.transport.rendezvous import Rendezvous
from megagrpo.weights.transport.shared_memory import SharedMemory
from megagrpo.weights.transport.two_hops import TwoHops


class TransportName(StrEnum):
    """The values of the recipe's weights.transfer, besides auto."""

    SHARED_MEMORY = "shared_memory"
    """Exact shards within one node: files in /dev/shm, CUDA IPC buffers on GPUs."""

    TWO_HOPS = "two_hops"
    """Exact shards, between nodes on which training ranks share devices with engines: through a process group of
    training ranks, and through shared memory on each node."""

    PROCESS_GROUP = "process_group"
    """Exact shards, point to point between any nodes: gloo on CPUs, NCCL on GPUs, which no two ranks may share."""

    DISK = "disk"
    """A checkpoint on a file system that both ends reach."""


@dataclass(frozen=True)
class Channel:
    """The transport of a run's weights and its settings, the same at both ends."""

    transport: TransportName
    rendezvous: Rendezvous
    bucket_bytes: int


Sender = BucketSender | DiskSender
"""The end of one training rank. It lasts from sync to sync."""


def choose_transport(wanted: str, topology: Topology) -> TransportName:
    """Returns the transport for `wanted`: the recipe's weights.transfer, or disk for auto with external servers.

    Raises RecipeError if the recipe names a transport that cannot work here.
    """
    nodes = {place.node for place in (*topology.sources, *topology.destinations)}
    beside = None not in topology.beside
    if wanted == "auto":
        between = TransportName.TWO_HOPS if beside else TransportName.PROCESS_GROUP
        transport = TransportName.SHARED_MEMORY if len(nodes) == 1 else between
    else:
        transport = TransportName(wanted)
    needed, fix = "", "transfer: auto"
    if len(nodes) > 1 and transport is TransportName.SHARED_MEMORY:
        given = f"{transport} between {len(nodes)} nodes"
        needed = "training ranks and engines on one node: the bytes go through that node's memory"
        fix = "transfer: auto, process_group or disk"
    elif transport is TransportName.TWO_HOPS and not beside:
        given, needed = f"{transport}, and engines away from training ranks", "a training rank beside every engine rank"
    elif transport is TransportName.PROCESS_GROUP and topology.shared_devices:
        given, needed = f"{transport} between several processes on one GPU", "one process on each GPU, for NCCL"
        fix = "transfer: auto; engines on GPUs of their own, or on all those of the training ranks"
    if needed:
        raise RecipeError(Problem("weights.transfer", given, needed, fix))
    return transport


def open_sender(channel: Channel, plan: WeightPlan, source: int, files: DiskFiles | None = None) -> Sender:
    """Returns the end of the `source`-th training rank. DISK writes to `files`; the other transports do not need it."""
    rendezvous = channel.rendezvous
    if channel.transport is not TransportName.DISK:
        return BucketSender(plan, source, rendezvous, channel.bucket_bytes, _transport(channel, plan, source))
    if files is None:
        raise ValueError("disk needs DiskFiles, which say where to write")
    return DiskSender(plan, source, rendezvous, files)


def open_receiver(
    channel: Channel, plan: WeightPlan, destination: int, tensors: Mapping[str, torch.Tensor]
) -> BucketReceiver:
    """Returns an engine rank's end, for exact shards, in the process that holds `tensors`, its storages by name.

    `plan` may be the rank's part of the whole. Raises ModelError if `tensors` are not those of the manifest.
    """
    transport = _transport(channel, plan, destination_peer(plan, destination))
    return BucketReceiver(plan, destination, tensors, channel.rendezvous, channel.bucket_bytes, transport)


def _transport(channel: Channel, plan: WeightPlan, peer: Peer) -> Transport:
    match channel.transport:
        case TransportName.SHARED_MEMORY:
            return SharedMemory(channel.rendezvous.run)
        case TransportName.PROCESS_GROUP:
            return ProcessGroup(peer)
        case TransportName.TWO_HOPS:
            return TwoHops(peer, len(plan.sources), channel.rendezvous.run)
        case TransportName.DISK:
            raise ValueError("disk has no end in an engine rank: the engine's server reads the files")

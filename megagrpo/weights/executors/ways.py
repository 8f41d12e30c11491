"""The ways that carry a weight plan into engines, behind one pair of protocols.

    host = MeetingHost(host="10.0.0.1", timeout_seconds=600)            # driver
    sender = open_sender(way, plan, source, host.meeting, bucket_bytes)                     # in every training rank
    receiver = open_receiver(way, plan, destination, tensors, host.meeting, bucket_bytes)   # in every engine rank

    host.open(version, destinations)             # driver, before each sync: who takes part; a new attempt
    sender.send(version, tensors)                # in every training rank, all at the same time as
    receiver.receive(version)                    # in every engine rank that takes part
    host.abort(problem)                          # driver, if anyone failed: all others end with WeightSyncError

Both ends control the flow themselves: the driver only starts them and waits. After an error at either end the attempt
is over; the next begins with `host.open` and the same senders and receivers.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Protocol

import torch

from megagrpo.weights.executors import streams
from megagrpo.weights.executors.flow import Carrier, FlowReceiver, FlowSender
from megagrpo.weights.executors.meeting import Meeting
from megagrpo.weights.executors.process_group import ProcessGroup
from megagrpo.weights.executors.shared_memory import SharedMemory
from megagrpo.weights.plan import WeightPlan


class Way(StrEnum):
    """How weights travel; the values of the recipe's weights.transfer."""

    SHARED_MEMORY = "shared_memory"
    """Exact shards, sender and receiver on one node: files in /dev/shm, CUDA IPC buffers on GPUs."""

    PROCESS_GROUP = "process_group"
    """Exact shards, point to point between any nodes: gloo on CPUs, NCCL on GPUs."""

    DIRECT = "direct"
    """Exact shards as whole local parameters in shared memory, through SGLang's own load_format="direct"."""

    TENSORS = "tensors"
    """Whole checkpoint tensors in flattened buckets of shared memory, through SGLang's own loader."""

    BROADCAST = "broadcast"
    """Whole checkpoint tensors, broadcast by one training rank through SGLang's own update group."""

    DISK = "disk"
    """A checkpoint on a file system that both ends reach."""


IN_PLACE = (Way.SHARED_MEMORY, Way.PROCESS_GROUP)
"""Ways whose receiver runs in the engine rank's own process."""


class Sender(Protocol):
    """One training rank's end. Kept from sync to sync."""

    def send(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Streams what this rank owes to the destinations of the open sync, cast to their dtype; `tensors` are by
        storage name, on any device, and may be changed once this returns.

        Raises: WeightSyncError naming who was waited for, and the bucket; ModelError if `tensors` are not those of
        the source's manifest.
        """
        ...

    def close(self) -> None:
        """Frees buffers and connections. May be called twice."""
        ...


class Receiver(Protocol):
    """One engine rank's end. Kept from sync to sync."""

    def receive(self, version: int) -> None:
        """Writes everything in place. The engine must not generate meanwhile. Raises WeightSyncError likewise."""
        ...

    def close(self) -> None:
        """Frees buffers and connections. May be called twice."""
        ...


def open_sender(way: Way, plan: WeightPlan, source: int, meeting: Meeting, bucket_bytes: int) -> Sender:
    """The end of the plan's `source`-th training rank. `plan` may be its part of the whole (part_for_source)."""
    return FlowSender(plan, source, meeting, bucket_bytes, _carrier(way, plan, source, meeting))


def open_receiver(
    way: Way,
    plan: WeightPlan,
    destination: int,
    tensors: Mapping[str, torch.Tensor],
    meeting: Meeting,
    bucket_bytes: int,
) -> Receiver:
    """The end of the plan's `destination`-th engine rank, in its own process: `tensors` are its storages by name.

    Only for ways that write exact shards in place. `plan` may be its part of the whole (part_for_destination).

    Raises: ModelError if `tensors` are not the manifest's.
    """
    carrier = _carrier(way, plan, streams.destination_party(plan, destination), meeting)
    return FlowReceiver(plan, destination, tensors, meeting, bucket_bytes, carrier)


def _carrier(way: Way, plan: WeightPlan, party: streams.Party, meeting: Meeting) -> Carrier:
    match way:
        case Way.SHARED_MEMORY:
            return SharedMemory(meeting.run)
        case Way.PROCESS_GROUP:
            return ProcessGroup(plan, party)
        case _:
            raise ValueError(f"no carrier of buckets for {way}")

"""The ranks' side of the weight tests: real Megatron models that send, and parties that die or stop on the way."""

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
from megagrpo.weights.executors import streams
from megagrpo.weights.executors.flow import FlowReceiver, FlowSender
from megagrpo.weights.executors.meeting import Meeting
from megagrpo.weights.executors.process_group import ProcessGroup
from megagrpo.weights.executors.shared_memory import SharedMemory
from megagrpo.weights.executors.streams import Party
from megagrpo.weights.executors.ways import Way, open_sender
from megagrpo.weights.plan import WeightPlan
from megagrpo.weights.verification import sent_digests
from tests.distributed.parity_ranks import load_model
from tests.weight_streams import empty
from tests.weights_oracle import Tensors


def send_model(
    directory: Path, layout: ParallelLayout, plan: WeightPlan, meeting: Meeting, ways: list[Way], bucket_bytes: int
) -> dict[int, dict[str, int]]:
    """Sends the model once each way, as version 0, 1, ..., each doubled. The digests of the last."""
    source = torch.distributed.get_rank()
    process.start_parallel(layout, seed=1)
    tensors = model.named_tensors(load_model(directory, layout, torch.float32)[0])
    member = meeting.join(f"rank {source}")
    for version, way in enumerate(ways):
        member.wait(lambda key=f"go {version}": member.hear(key), lambda: Problem("the test does not go on"))
        for tensor in tensors.values():
            tensor.mul_(2)
        sender = open_sender(way, plan, source, meeting, bucket_bytes)
        sender.send(version, tensors)
        sender.close()
    return sent_digests(plan, source, tensors)


def send_and_die(plan: WeightPlan, meeting: Meeting, way: Way, held: list[Tensors], bucket_bytes: int) -> None:
    """Rank 1 is killed with its third bucket; in a process group once it was announced, before any byte has left."""
    source = torch.distributed.get_rank()
    carrier = _carrier(way, plan, source, meeting)
    if source == 1:
        carrier = Dying(carrier, bucket=2)
    FlowSender(plan, source, meeting, bucket_bytes, carrier).send(0, held[source])


def receive_and_stop(plan: WeightPlan, meeting: Meeting, way: Way, bucket_bytes: int) -> None:
    """Stops, as if it hung, with its first bucket before it."""
    party = streams.destination_party(plan, 0)
    carrier = Stopping(_carrier(way, plan, party, meeting), bucket=0)
    FlowReceiver(plan, 0, empty(plan.destinations[0]), meeting, bucket_bytes, carrier).receive(0)


def _carrier(way: Way, plan: WeightPlan, party: Party, meeting: Meeting) -> Any:
    return SharedMemory(meeting.run) if way is Way.SHARED_MEMORY else ProcessGroup(plan, party)


class Dying:
    """A carrier whose process is killed at a bucket."""

    def __init__(self, carrier: Any, bucket: int) -> None:
        self._carrier, self._before = carrier, bucket

    def __getattr__(self, name: str) -> Any:
        return getattr(self._carrier, name)

    def hand_over(self, index: int, parcel_bytes: int, receiver: Party) -> Any:
        if self._before > 0:
            self._before -= 1
            return self._carrier.hand_over(index, parcel_bytes, receiver)
        if isinstance(self._carrier, SharedMemory):
            os.kill(os.getpid(), signal.SIGKILL)
        self._before = -1
        return index

    def slot(self, index: int) -> torch.Tensor:
        if self._before < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return self._carrier.slot(index)

    def taken(self, index: int, label: str) -> None:
        if self._before < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self._carrier.taken(index, label)


class Stopping:
    """A carrier whose process is stopped at a bucket."""

    def __init__(self, carrier: Any, bucket: int) -> None:
        self._carrier, self._before = carrier, bucket

    def __getattr__(self, name: str) -> Any:
        return getattr(self._carrier, name)

    def fetch(self, sender: Party, parcel_bytes: int, handed_over: Any, label: str) -> Callable[[], torch.Tensor]:
        if self._before == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        self._before -= 1
        return self._carrier.fetch(sender, parcel_bytes, handed_over, label)

"""The ways through SGLang's own endpoints, behind one set of functions; ways.py has those that need our loader.

The receivers run beside an engine's server, on its node, and talk HTTP to it; one serves all ranks of its engine.
Except for `direct`, what travels is whole checkpoint tensors by a plan of their own. What the engine ranks then hold is
checked by the plan between training ranks and engine ranks, whatever the way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from megagrpo.weights.boxes import Manifest, Storage
from megagrpo.weights.executors import disk, whole_tensors
from megagrpo.weights.executors.broadcast import GATHERER, BroadcastReceiver, BroadcastSender
from megagrpo.weights.executors.direct import DirectReceiver
from megagrpo.weights.executors.disk import DiskFiles, DiskReceiver, DiskSender
from megagrpo.weights.executors.meeting import Meeting
from megagrpo.weights.executors.staging import Post, StagingSender
from megagrpo.weights.executors.tensors import TensorsReceiver
from megagrpo.weights.executors.ways import Receiver, Sender, Way
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.plan import WeightPlan, make_plan
from megagrpo.weights.topology import Topology

WAYS = (Way.DIRECT, Way.TENSORS, Way.BROADCAST, Way.DISK)


def plan_of(
    way: Way,
    sources: Sequence[Manifest],
    destinations: Sequence[Manifest],
    ranks_per_engine: int,
    arch: Architecture,
    topology: Topology | None = None,
) -> WeightPlan:
    """What travels this way, to engine ranks `destinations`, engine by engine. Raises WeightPlanError."""
    match way:
        case Way.DIRECT:
            return make_plan(sources, destinations, topology)
        case Way.TENSORS:
            return whole_tensors.plan_for_engines(sources, destinations, ranks_per_engine, topology)
        case Way.BROADCAST:
            return whole_tensors.plan_for_source(sources, destinations, GATHERER)
        case Way.DISK:
            return disk.plan_for_files(sources, destinations, arch)
        case _:
            raise ValueError(f"{way} does not go through SGLang's own endpoints")


def open_sender(
    way: Way,
    plan: WeightPlan,
    source: int,
    meeting: Meeting,
    bucket_bytes: int,
    *,
    ranks_per_engine: int,
    device: torch.device,
    files: DiskFiles | None = None,
) -> Sender:
    """The end of the `source`-th training rank, whose weights are on `device`.

    `plan` is plan_of(way, ...), whole and not a rank's part of it. `files` is for Way.DISK.
    """
    match way:
        case Way.DIRECT:
            return StagingSender(plan, source, meeting)
        case Way.TENSORS:
            return StagingSender(plan, source, meeting, ranks_per_engine)
        case Way.BROADCAST:
            return BroadcastSender(plan, source, meeting, bucket_bytes, ranks_per_engine, device)
        case Way.DISK if files is not None:
            return DiskSender(plan, source, meeting, files, ranks_per_engine)
        case _:
            raise ValueError(f"{way} does not go through SGLang's own endpoints, or needs files")


def open_receiver(
    way: Way,
    plan: WeightPlan,
    engine: int,
    meeting: Meeting,
    bucket_bytes: int,
    *,
    ranks_per_engine: int,
    post: Post,
    name: str,
    describe: Callable[[], Sequence[Mapping[str, Storage]]],
    devices: Sequence[torch.device],
) -> Receiver:
    """The end of the `engine`-th engine, called `name`, whose tensor ranks are on `devices`.

    `plan` is plan_of(way, ...). `post` is one request to its server. `describe` asks the server for its parameters,
    rank by rank, and is called while an update is open (RemoteLoader.describe).
    """
    destinations = range(engine * ranks_per_engine, (engine + 1) * ranks_per_engine)
    match way:
        case Way.DIRECT:
            return DirectReceiver(plan, destinations, meeting, bucket_bytes, post, name, describe, devices)
        case Way.TENSORS:
            return TensorsReceiver(plan, engine, meeting, bucket_bytes, post, name, ranks_per_engine, devices[0])
        case Way.BROADCAST:
            backend = "nccl" if devices[0].type == "cuda" else "gloo"
            return BroadcastReceiver(engine, destinations, meeting, post, name, backend)
        case Way.DISK:
            return DiskReceiver(engine, meeting, post, name)
        case _:
            raise ValueError(f"{way} does not go through SGLang's own endpoints")

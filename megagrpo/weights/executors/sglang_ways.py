"""The training ranks' ends of the ways through SGLang's own endpoints; ways.py has those of exact shards in buckets.

Except for `direct`, what travels is whole checkpoint tensors by a plan of their own, derived here from the plan between
training ranks and engine ranks. By that one is checked what the engine ranks then hold, whatever the way.
"""

from __future__ import annotations

import torch

from megagrpo.weights.executors import disk, whole_tensors
from megagrpo.weights.executors.broadcast import GATHERER, BroadcastSender
from megagrpo.weights.executors.disk import DiskFiles, DiskSender
from megagrpo.weights.executors.meeting import Meeting
from megagrpo.weights.executors.staging import StagingSender
from megagrpo.weights.executors.ways import Sender, Way
from megagrpo.weights.plan import WeightPlan

WAYS = (Way.DIRECT, Way.TENSORS, Way.BROADCAST, Way.DISK)


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
    """The end of the `source`-th training rank, whose weights are on `device`. `files` is for Way.DISK.

    `plan` is the one to the engine ranks, engine by engine, whole and not a rank's part of it. Raises WeightPlanError.
    """
    sources, destinations = plan.sources, plan.destinations
    match way:
        case Way.DIRECT:
            return StagingSender(plan, source, meeting)
        case Way.TENSORS:
            whole = whole_tensors.plan_for_engines(sources, destinations, ranks_per_engine)
            return StagingSender(whole, source, meeting, ranks_per_engine)
        case Way.BROADCAST:
            whole = whole_tensors.plan_for_source(sources, destinations, GATHERER)
            return BroadcastSender(whole, source, meeting, bucket_bytes, ranks_per_engine, device)
        case Way.DISK if files is not None:
            checkpoint = disk.plan_for_files(sources, destinations, files)
            return DiskSender(checkpoint, source, meeting, files, ranks_per_engine)
        case _:
            raise ValueError(f"{way} does not go through SGLang's own endpoints, or needs files")

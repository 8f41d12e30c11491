"""A training rank's end of a weight sync, whatever the way: it sends, and says what must have arrived."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from megagrpo.weights.executors import sglang_ways, ways
from megagrpo.weights.executors.disk import DiskFiles
from megagrpo.weights.executors.meeting import Meeting
from megagrpo.weights.executors.ways import Way
from megagrpo.weights.plan import WeightPlan
from megagrpo.weights.verification import sent_bucket_digests, sent_digests


class WeightSender:
    """The plan's `source`-th training rank, with weights on `device`. An engine has `ranks_per_engine` ranks.

    `plan` is the one between all training ranks and all engine ranks; `files` is where Way.DISK writes.
    """

    def __init__(
        self,
        way: Way,
        plan: WeightPlan,
        source: int,
        meeting: Meeting,
        bucket_bytes: int,
        *,
        ranks_per_engine: int,
        device: torch.device,
        files: DiskFiles,
    ) -> None:
        self._way, self._source, self._bucket_bytes = way, source, bucket_bytes
        self._plan = plan.part_for_source(source)
        if way in sglang_ways.WAYS:
            self._sender = sglang_ways.open_sender(
                way, plan, source, meeting, bucket_bytes, ranks_per_engine=ranks_per_engine, device=device, files=files
            )
        else:
            self._sender = ways.open_sender(way, plan, source, meeting, bucket_bytes)

    def send(
        self, version: int, tensors: Mapping[str, torch.Tensor], destinations: Iterable[int]
    ) -> dict[int, dict[str, int]]:
        """Sends what the open sync wants of this rank. Returns its part of what each destination must then hold:
        partial digests by destination and checkpoint tensor. Raises WeightSyncError or ModelError."""
        self._sender.send(version, tensors)
        return sent_digests(self._plan, self._source, tensors, destinations)

    def bucket_digests(
        self, tensors: Mapping[str, torch.Tensor], tensor: str, destinations: Iterable[int]
    ) -> dict[str, int]:
        """Digests of one checkpoint tensor in each bucket of the last sync, by label. Of exact shards only."""
        if self._way in sglang_ways.WAYS:
            return {}
        active = frozenset(destinations)
        return sent_bucket_digests(self._plan, self._source, tensors, tensor, active, self._bucket_bytes)

    def close(self) -> None:
        self._sender.close()

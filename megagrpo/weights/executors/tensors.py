"""Whole checkpoint tensors in flattened buckets of shared memory, through SGLang's own loader of the model.

Every tensor rank of the engine maps the same bucket and takes its part of each tensor. The plan is
whole_tensors.plan_for_engines, the sender staging.StagingSender with the number of ranks of an engine.
"""

from __future__ import annotations

import torch

from megagrpo.weights.executors import sglang_payloads as payloads
from megagrpo.weights.executors.meeting import Meeting
from megagrpo.weights.executors.staged_buckets import staged_buckets, storage_bytes
from megagrpo.weights.executors.staging import Post, Staging, posted
from megagrpo.weights.executors.whole_tensors import loaded_together
from megagrpo.weights.plan import WeightPlan
from megagrpo.weights.views import torch_dtype


class TensorsReceiver:
    """Implements Receiver (ways.py) for one engine, the `engine`-th destination of whole_tensors.plan_for_engines.

    `ranks` are its tensor ranks; `device` is that of the first one.
    """

    def __init__(
        self,
        plan: WeightPlan,
        engine: int,
        meeting: Meeting,
        bucket_bytes: int,
        post: Post,
        name: str,
        ranks: int,
        device: torch.device,
    ) -> None:
        self._post, self._ranks = post, ranks
        self._storages = plan.destinations[engine].storages
        self._member = meeting.join(name)
        buckets = staged_buckets(self._storages.values(), bucket_bytes, loaded_together)
        self._staging = Staging(plan, [engine], self._member, name, buckets, [device])
        self._member.announce()

    def receive(self, version: int) -> None:
        """Between the server's /begin_weight_update and /end_weight_update."""
        with self._member.attend(version):
            self._staging.run(self._load)

    def close(self) -> None:
        self._staging.close()

    def _load(self, number: int) -> None:
        entries = []
        for name, begin in self._staging.buckets[number].begins.items():
            storage = self._storages[name]
            entries.append((name, storage.shape, torch_dtype(storage.dtype), begin, begin + storage_bytes(storage)))
        payload = [payloads.flattened_bucket(self._staging.shared_slot(0, number), entries) for _ in range(self._ranks)]
        body = {"serialized_named_tensors": payload, "load_format": "flattened_bucket", "flush_cache": False}
        posted(self._post, "/update_weights_from_tensor", body, self._staging.label(number))

"""Exact shards through SGLang's load_format="direct": whole local parameters of each engine rank, copied as they are.

No loader of SGLang runs, so nothing that it derives from weights is made again. A name or a shape that the server does
not have would end it: both are compared with the server's own parameters before anything is sent. The sender is
staging.StagingSender.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from megagrpo.errors import Problem, WeightSyncError
from megagrpo.weights.boxes import Manifest, Storage
from megagrpo.weights.executors import sglang_payloads as payloads
from megagrpo.weights.executors.meeting import Meeting
from megagrpo.weights.executors.staged_buckets import staged_buckets
from megagrpo.weights.executors.staging import Post, Staging, posted
from megagrpo.weights.plan import WeightPlan


class DirectReceiver:
    """Implements Receiver (ways.py) for all ranks of one engine, on its node and beside it.

    `destinations` are the engine's ranks in the plan, in tensor rank order, and `devices` theirs. `describe` asks the
    server for the parameters of its model, rank by rank; the first `receive` compares them with the plan and raises
    WeightSyncError naming every parameter that the server has not, or has in another shape or dtype.
    """

    def __init__(
        self,
        plan: WeightPlan,
        destinations: Sequence[int],
        meeting: Meeting,
        bucket_bytes: int,
        post: Post,
        name: str,
        describe: Callable[[], Sequence[Mapping[str, Storage]]],
        devices: Sequence[torch.device],
    ) -> None:
        self._manifests = [plan.destinations[index] for index in destinations]
        self._post, self._describe, self._described = post, describe, False
        self._member = meeting.join(name)
        # Ranks of an engine hold parameters of the same names and sizes: the first says how all are cut into buckets.
        buckets = staged_buckets(self._manifests[0].storages.values(), bucket_bytes)
        self._staging = Staging(plan, destinations, self._member, name, buckets, devices)
        self._member.announce()

    def receive(self, version: int) -> None:
        """Between the server's /begin_weight_update and /end_weight_update."""
        with self._member.attend(version):
            if not self._described:
                if problems := description_problems(self._manifests, self._describe()):
                    raise WeightSyncError(problems)
                self._described = True
            self._staging.run(self._load)

    def close(self) -> None:
        self._staging.close()

    def _load(self, number: int) -> None:
        body = {
            "serialized_named_tensors": [
                payloads.named_tensors(self._staging.shared(rank, number)) for rank in range(len(self._manifests))
            ],
            "load_format": "direct",
            "flush_cache": False,
        }
        posted(self._post, "/update_weights_from_tensor", body, self._staging.label(number))


def description_problems(manifests: Sequence[Manifest], described: Sequence[Mapping[str, Storage]]) -> list[Problem]:
    """One for each parameter that the server has not, or has otherwise, or that the plan leaves out."""
    found = []
    if len(manifests) != len(described):
        found.append(
            Problem(manifests[0].holder, f"a server of {len(described)} tensor ranks", f"{len(manifests)} tensor ranks")
        )
    for manifest, own in zip(manifests, described, strict=False):
        for name in sorted(manifest.storages.keys() | own.keys()):
            planned, there = manifest.storages.get(name), own.get(name)
            if planned != there:
                found.append(
                    Problem(
                        f"{manifest.holder}: {name}", f"the plan has {_text(planned)}", f"the server has {_text(there)}"
                    )
                )
    for manifest in manifests[1:]:
        if manifest.storages != manifests[0].storages:
            found.append(Problem(manifest.holder, "other parameters than the engine's first rank", "the same on all"))
    return found


def _text(storage: Storage | None) -> str:
    return "no such parameter" if storage is None else f"{list(storage.shape)} {storage.dtype}"

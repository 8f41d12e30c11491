"""Asks the loader inside an SGLang server (sglang_loader.py), rank by rank, and reads its answers in the meeting."""

from __future__ import annotations

import base64
import json
import pickle
import secrets
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from megagrpo.errors import Problem, WeightSyncError
from megagrpo.weights.boxes import Storage
from megagrpo.weights.executors.meeting import Meeting
from megagrpo.weights.executors.sglang_loader import COMMAND
from megagrpo.weights.executors.ways import Way
from megagrpo.weights.plan import WeightPlan

Post = Callable[[list[str]], None]
"""POST /update_weights_from_tensor with load_format LOAD_FORMAT, these serialized_named_tensors (one for each tensor
rank), flush_cache false and no weight_version. Returns when the server has answered; raises EngineError."""


class RemoteLoader:
    """One engine's loader. `holders` are its tensor ranks' names, such as "engine 0 rank 1".

    Every method but `describe` needs `connect` first, and all an update that is open on the server. They raise
    WeightSyncError with what went wrong on each rank, and what `post` raises.
    """

    def __init__(self, meeting: Meeting, holders: Sequence[str], post: Post) -> None:
        self._meeting, self._holders, self._post = meeting, list(holders), post
        self._member = meeting.join(f"driver of {self._holders[0]}")

    def describe(self) -> list[dict[str, Storage]]:
        """Every parameter of the served model, by rank and name."""
        answers = self._ask("describe")
        return [
            {name: Storage(name, tuple(shape), dtype) for name, (shape, dtype) in answer.items()} for answer in answers
        ]

    def connect(self, plan: WeightPlan, destinations: Sequence[int], way: Way, bucket_bytes: int) -> None:
        """Gives each rank its part of the plan; `destinations` are the plan's indices of the ranks, in order.

        Refused, naming the parameters, if the served model has not the names, shapes and dtypes of the manifests.
        """
        parts = [pickle.dumps(plan.part_for_destination(destination)) for destination in destinations]
        self._ask(
            "plan",
            [
                {
                    "plan": base64.b64encode(part).decode(),
                    "destination": destination,
                    "way": str(way),
                    "bucket_bytes": bucket_bytes,
                }
                for destination, part in zip(destinations, parts, strict=True)
            ],
        )

    def receive(self, version: int) -> None:
        """Takes part in the open sync. Senders must be sending meanwhile."""
        self._ask_all("receive", version=version)

    def digests(self) -> list[dict[str, int]]:
        """By rank and checkpoint tensor, of what lies there."""
        return self._ask_all("digest")

    def bucket_digests(self, tensor: str, active: Sequence[int]) -> list[dict[str, dict[str, int]]]:
        """By rank: "sent" and "arrived" (verification.py) for one checkpoint tensor."""
        return self._ask_all("bucket_digests", tensor=tensor, active=list(active))

    def _ask_all(self, action: str, **fields: Any) -> list[Any]:
        return self._ask(action, [fields] * len(self._holders))

    def _ask(self, action: str, fields: Sequence[dict[str, Any]] | None = None) -> list[Any]:
        of_each = fields or [{}] * len(self._holders)
        keys = [f"answer/{secrets.token_hex(8)}" for _ in self._holders]
        self._post(
            [
                serialize({"action": action, "name": holder, "meeting": asdict(self._meeting), "answer": key} | more)
                for holder, key, more in zip(self._holders, keys, of_each, strict=True)
            ]
        )
        self._member.start_clock()
        answers = [self._hear(action, holder, key) for holder, key in zip(self._holders, keys, strict=True)]
        problems = [Problem(*problem) for answer in answers for problem in answer.get("problems", ())]
        if problems:
            raise WeightSyncError(problems)
        return [answer["value"] for answer in answers]

    def _hear(self, action: str, holder: str, key: str) -> dict[str, Any]:
        missing = Problem(
            f"{holder}: {action}", "no answer, though its server answered", "the same megagrpo in the server as here"
        )
        answer: dict[str, Any] = self._member.wait(lambda: self._member.hear(key), lambda: missing)
        self._member.forget(key)
        return answer


def serialize(command: dict[str, Any]) -> str:
    """A command as one rank's entry of serialized_named_tensors: SGLang unpickles a list of names and tensors."""
    data = torch.from_numpy(np.frombuffer(json.dumps(command).encode(), np.uint8).copy())
    return base64.b64encode(pickle.dumps([(COMMAND, data)])).decode()

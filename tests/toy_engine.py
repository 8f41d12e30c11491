"""An engine of the tests' own, with its side of the weights and its memory: one file, and one line in ENGINES."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from megagrpo.errors import Problem
from megagrpo.plan.case import Case
from megagrpo.plan.engine import EngineMemory
from megagrpo.rollout.engine import Done, Engine, EngineSpec, SoFar
from megagrpo.rollout.kinds import EngineKind
from megagrpo.types import Request, Sample
from megagrpo.weights.boxes import Manifest
from megagrpo.weights.families import read_architecture, tensors_of
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.sides.assembly import ManifestBuilder

MEMORY = EngineMemory(weights=3 << 30, cache=5 << 30, working=1 << 30, cache_tokens=4096, longest=64, asked=64)


class ToySide:
    """Whole tensors under names of their own, on one rank."""

    @staticmethod
    def manifest(arch: Architecture, dtype: str, holder: str) -> Manifest:
        builder = ManifestBuilder(holder, dtype)
        for tensor in tensors_of(arch):
            builder.whole(f"toy.{tensor.name}", tensor)
        return builder.build()

    @staticmethod
    def split_problems(
        arch: Architecture, layout: Any, device: str, quantization: str | None = None
    ) -> Sequence[Problem]:
        return [Problem("toy", f"tensor = {layout.tensor}", "1")] if layout.tensor > 1 else []


class Toy(EngineKind):
    streams = splits = True
    side = ToySide()

    def memory(self, case: Case) -> EngineMemory:
        return MEMORY

    def engine(self, spec: EngineSpec, server: Any) -> Engine:
        return ToyEngine(spec.name, ToySide.manifest(read_architecture(spec.model_directory), spec.dtype, spec.name))


class ToyEngine(Engine):
    """Answers a prompt with its tokens, backwards. Samples wait while an update is open."""

    def __init__(self, name: str, manifest: Manifest | None = None) -> None:
        super().__init__(name)
        self._manifest, self._waiting = manifest, list[tuple[Mapping[int, Request], Done]]()
        self._paused = False

    def manifests(self) -> list[Manifest]:
        assert self._manifest
        return [self._manifest]

    def connect(self, plan: Any, destinations: Sequence[int], channel: Any) -> None:
        import torch

        from megagrpo.weights.transport.choice import open_receiver
        from megagrpo.weights.views import torch_dtype

        stored = self.manifests()[0].storages.values()
        self._tensors = {one.name: torch.zeros(one.shape, dtype=torch_dtype(one.dtype)) for one in stored}
        self._receiver = open_receiver(channel, plan, destinations[0], self._tensors)

    def pause(self) -> None:
        self._paused = True

    def receive_weights(self, version: int) -> None:
        if self._manifest:
            self._receiver.receive(version)

    def close_update(self) -> list[Mapping[str, int]]:
        from megagrpo.weights.digest import digests

        return [digests(self._tensors, self._manifest.placements)] if self._manifest else []

    def resume(self) -> None:
        self._paused = False
        while self._waiting:
            self.begin(*self._waiting.pop())

    def begin(self, requests: Mapping[int, Request], done: Done) -> None:
        self.check_requests(requests.values())
        if self._paused:
            self._waiting.append((requests, done))
            return
        for ticket, at in requests.items():
            tokens = np.array(at.tokens[::-1], np.int32)[: at.sampling.max_tokens]
            logprobs, versions = np.full(len(tokens), -1, np.float32), np.full(len(tokens), self.version, np.int32)
            done(ticket, Sample(at.prompt_id, at.index, tokens, logprobs, versions, "stop", self.name))

    def give_back(self, tickets: Collection[int]) -> None:
        pass

    def so_far(self) -> SoFar:
        return SoFar.of({})

    def rests(self) -> bool:
        return True

"""Both ends of a weight sync in threads of one process, for tests: training ranks of a layout and ranks of engines."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from megagrpo.errors import MegagrpoError
from megagrpo.layout.parallel import ParallelLayout, rank_grid
from megagrpo.weights.boxes import Manifest
from megagrpo.weights.executors.meeting import MeetingHost
from megagrpo.weights.executors.ways import Receiver, Sender
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.plan import WeightPlan, make_plan
from megagrpo.weights.sides import megatron_local, sglang
from megagrpo.weights.topology import Topology
from megagrpo.weights.views import torch_dtype
from tests.weights_oracle import Tensors, rank_tensors


@dataclass(frozen=True)
class Case:
    """An architecture, trained in `layout` and served by `engines` engines of `tensor` ranks, in `dtype`."""

    arch: Architecture
    layout: ParallelLayout
    tensor: int = 1
    engines: int = 1
    expert: int = 1
    dtype: str = "float32"
    one_node: bool = True

    def plan(self) -> WeightPlan:
        """On one node every byte may be passed on from engine to engine; the training ranks are elsewhere."""
        sources = [
            megatron_local.manifest(self.arch, self.layout, where, "float32") for where in rank_grid(self.layout)
        ]
        sizes = SimpleNamespace(tensor=self.tensor, expert=self.expert)
        destinations = [
            sglang.manifest(self.arch, sizes, rank, self.dtype, "cpu", engine)
            for engine in range(self.engines)
            for rank in range(self.tensor)
        ]
        if not self.one_node:
            return make_plan(sources, destinations)
        first = len(sources)
        numbers = range(1000, 1000 + len(destinations))
        return make_plan(sources, destinations, Topology.of_nodes(range(first), numbers, 1000))

    def held(self, checkpoint: Tensors) -> list[Tensors]:
        """What each training rank holds of a checkpoint."""
        return [rank_tensors(self.arch, self.layout, where, checkpoint) for where in rank_grid(self.layout)]


def empty(manifest: Manifest) -> Tensors:
    """Storages full of NaN: whatever is not written shows."""
    return {
        name: torch.full(storage.shape, torch.nan, dtype=torch_dtype(storage.dtype))
        for name, storage in manifest.storages.items()
    }


def sync(
    host: MeetingHost,
    version: int,
    senders: Sequence[Sender],
    held: Sequence[Tensors],
    receivers: Sequence[Receiver],
    destinations: Iterable[int] | None = None,
) -> list[MegagrpoError]:
    """One sync, everybody in a thread. The errors, in the order of senders and then receivers."""
    host.open(version, range(len(receivers)) if destinations is None else destinations)
    work: list[Callable[[], None]] = [
        lambda sender=sender, tensors=tensors: sender.send(version, tensors)  # type: ignore[misc]
        for sender, tensors in zip(senders, held, strict=True)
    ]
    taking_part = range(len(receivers)) if destinations is None else destinations
    work += [lambda receiver=receivers[index]: receiver.receive(version) for index in taking_part]  # type: ignore[misc]
    return [error for error in at_once(work) if error is not None]


def at_once(work: Sequence[Callable[[], None]], deadline_seconds: float = 60.0) -> list[MegagrpoError | None]:
    """Calls all, each in its thread. The error of ours that each ended with, or None."""
    errors: list[MegagrpoError | None] = [None] * len(work)

    def call(index: int) -> None:
        try:
            work[index]()
        except MegagrpoError as error:
            errors[index] = error

    threads = [threading.Thread(target=call, args=(index,), daemon=True) for index in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(deadline_seconds)
        if thread.is_alive():
            raise TimeoutError("a party of the weight sync hangs")
    return errors

"""Both ends of a weight sync in threads of one process, for tests: training ranks of a layout and ranks of engines."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from megagrpo.errors import MegagrpoError, Problem
from megagrpo.layout.parallel import ParallelLayout, rank_grid
from megagrpo.weights.boxes import Manifest, Place, Topology, Transfer
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.plan import WeightPlan, make_plan
from megagrpo.weights.sides import sglang
from megagrpo.weights.sides.megatron_rank import LOCAL_SPEC
from megagrpo.weights.transport import rendezvous
from megagrpo.weights.transport.buckets import BucketReceiver
from megagrpo.weights.transport.choice import Sender
from megagrpo.weights.transport.rendezvous import Member, RendezvousHost, Sync
from megagrpo.weights.views import fill_padding, torch_dtype
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
        sources = [LOCAL_SPEC.manifest(self.arch, self.layout, where, "float32") for where in rank_grid(self.layout)]
        sizes = SimpleNamespace(tensor=self.tensor, expert=self.expert)
        destinations = [
            sglang.manifest(self.arch, sizes, rank, self.dtype, "cpu", engine)
            for engine in range(self.engines)
            for rank in range(self.tensor)
        ]
        if not self.one_node:
            return make_plan(sources, destinations)
        trainers, engines = (Place("trainers"),) * len(sources), (Place("engines"),) * len(destinations)
        return make_plan(sources, destinations, Topology(trainers, engines))

    def held(self, checkpoint: Tensors) -> list[Tensors]:
        """What each training rank holds of a checkpoint."""
        return [rank_tensors(self.arch, self.layout, where, checkpoint) for where in rank_grid(self.layout)]


def empty(manifest: Manifest, *, padded: bool = False) -> Tensors:
    """Storages full of NaN, so that every element that is not written shows; `padded` ones with their padding."""
    tensors = {
        name: torch.full(storage.shape, torch.nan, dtype=torch_dtype(storage.dtype))
        for name, storage in manifest.storages.items()
    }
    if padded:
        fill_padding(manifest, tensors)
    return tensors


def all_transfers(plan: WeightPlan) -> tuple[Transfer, ...]:
    return tuple(transfer for index in range(len(plan.destinations)) for transfer in plan.incoming(index))


def sync(
    host: RendezvousHost,
    version: int,
    senders: Sequence[Sender],
    held: Sequence[Tensors],
    receivers: Sequence[BucketReceiver],
    destinations: Iterable[int] | None = None,
) -> list[MegagrpoError]:
    """One sync, each end in a thread. The errors, in the order of senders and then receivers."""
    host.open(version, range(len(receivers)) if destinations is None else destinations)
    work: list[Callable[[], None]] = [
        lambda sender=sender, tensors=tensors: sender.send(version, tensors)  # type: ignore[misc]
        for sender, tensors in zip(senders, held, strict=True)
    ]
    taking_part = range(len(receivers)) if destinations is None else destinations
    work += [lambda receiver=receivers[index]: receiver.receive(version) for index in taking_part]  # type: ignore[misc]
    return [error for error in at_once(work) if error is not None]


class StandstillClock:
    """The rendezvous's clock in a test where a peer never comes: the longest wait passes at once when all ends wait in
    vain. Otherwise the clock stands still, so that no end is late because the machine is slow.

    `peers` is the number of ends that take part.
    """

    LOOKS = 50
    """Looks in vain, by each end that waits: torch has finished what it does in the background by then."""

    def __init__(self, patch: pytest.MonkeyPatch, host: RendezvousHost, peers: int) -> None:
        self._now, self._longest_wait = 0.0, host.rendezvous.timeout_seconds
        self._busy, self._lock = peers, threading.Lock()
        self._in_vain: dict[int, int] = {}
        attend, wait = Member.attend, Member.wait

        @contextmanager
        def attend_as_peer(member: Member, version: int) -> Iterator[Sync]:
            try:
                with attend(member, version) as sync:
                    yield sync
            finally:
                with self._lock:
                    self._busy -= 1

        def wait_as_peer(member: Member, look: Callable[[], object], missing: Callable[[], Problem]) -> object:
            try:
                return wait(member, lambda: self._looked(look()), missing)
            finally:
                with self._lock:
                    self._in_vain.pop(threading.get_ident(), None)

        patch.setattr(Member, "attend", attend_as_peer)
        patch.setattr(Member, "wait", wait_as_peer)
        patch.setattr(rendezvous, "time", self)

    def monotonic(self) -> float:
        return self._now

    def sleep(self, _: float) -> None:
        time.sleep(0.001)

    def _looked(self, found: object) -> object:
        with self._lock:
            thread = threading.get_ident()
            self._in_vain[thread] = self._in_vain.get(thread, 0) + 1
            standstill = len(self._in_vain) == self._busy and min(self._in_vain.values()) >= self.LOOKS
            if found is not None or standstill:
                self._in_vain.clear()
            if found is None and standstill:
                self._now += self._longest_wait
        return found


def at_once(work: Sequence[Callable[[], None]], deadline_seconds: float = 240.0) -> list[MegagrpoError | None]:
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
            raise TimeoutError("an end of the weight sync hangs")
    return errors

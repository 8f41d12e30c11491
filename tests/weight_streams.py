"""Both ends of a weight sync in threads of one process, for tests: training ranks of a layout and ranks of engines."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megagrpo.errors import MegagrpoError, ModelError, Problem
from megagrpo.layout.parallel import ParallelLayout, rank_grid
from megagrpo.recipe.schema import EngineLayoutConfig
from megagrpo.weights.boxes import Manifest, Place, Topology, Transfer
from megagrpo.weights.digest import digest_problems, expected_digests, sent_digests
from megagrpo.weights.families import read_architecture
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.files.export import begin_export, finish_export, write_part
from megagrpo.weights.files.loading import load_files
from megagrpo.weights.plan import WeightPlan, make_plan
from megagrpo.weights.sides import sglang
from megagrpo.weights.sides.megatron_rank import LOCAL_SPEC
from megagrpo.weights.transport import rendezvous
from megagrpo.weights.transport.buckets import outgoing
from megagrpo.weights.transport.rendezvous import Member, RendezvousHost, Sync
from megagrpo.weights.views import fill_padding, stored_tensors, torch_dtype
from tests.weights_oracle import Tensors, engine_tensors, held_by_ranks


def manifests(
    arch: Architecture, layout: ParallelLayout, dtype: str = "float32", spec: Any = LOCAL_SPEC
) -> list[Manifest]:
    """Returns the manifest of each training rank of a layout."""
    return [spec.manifest(arch, layout, where, dtype) for where in rank_grid(layout)]


@dataclass(frozen=True)
class Case:
    """An architecture, trained in `layout` and served by `engines` engines of `tensor` ranks, in `dtype`."""

    arch: Architecture
    layout: ParallelLayout
    tensor: int = 1
    engines: int = 1
    expert: int = 1
    dtype: str = "float32"
    device: str = "cpu"
    one_node: bool = True
    """Every byte may be passed on from engine to engine; the training ranks are elsewhere."""
    topology: Topology | None = None
    """Nodes of all ranks, in place of one_node."""
    attention_data: int = 1
    pipeline: int = 1

    @property
    def sizes(self) -> EngineLayoutConfig:
        own = {"expert": self.expert, "attention_data": self.attention_data, "pipeline": self.pipeline}
        return EngineLayoutConfig(tensor=self.tensor, **own)

    def plan(self) -> WeightPlan:
        sources = manifests(self.arch, self.layout)
        destinations = [
            sglang.manifest(self.arch, self.sizes, rank, self.dtype, self.device, engine)
            for engine in range(self.engines)
            for rank in range(self.sizes.ranks)
        ]
        if self.topology is not None:
            return make_plan(sources, destinations, self.topology)
        if not self.one_node:
            return make_plan(sources, destinations)
        trainers, engines = (Place("trainers"),) * len(sources), (Place("engines"),) * len(destinations)
        return make_plan(sources, destinations, Topology(trainers, engines))

    def on_two_nodes(self) -> Case:
        return replace(self, topology=two_nodes(self.layout.ranks, self.engines * self.tensor))

    def held(self, checkpoint: Tensors) -> list[Tensors]:
        """Returns each training rank's part of a checkpoint."""
        return held_by_ranks(self.arch, self.layout, checkpoint)

    def served(self, checkpoint: Tensors, rank: int) -> Tensors:
        """Returns this rank's part of a checkpoint in each engine."""
        return engine_tensors(self.arch, self.sizes, rank, self.device, checkpoint)


def two_nodes(*counts: int) -> Topology:
    """So many training ranks and ranks of engines by turns on two nodes without devices, and buckets in two hops."""
    sources, destinations = (tuple(Place(f"node {index % 2}") for index in range(count)) for count in counts)
    return Topology(sources, destinations, two_hops=True)


def empty(manifest: Manifest, *, padded: bool = False) -> Tensors:
    """Storages full of NaN, so that every element that is not written shows; `padded` ones with their padding."""
    tensors = {
        name: torch.full(storage.shape, torch.nan, dtype=torch_dtype(storage.dtype))
        for name, storage in manifest.storages.items()
    }
    if padded:
        fill_padding(manifest, tensors)
    return tensors


def assert_equal(found: Tensors, wanted: Tensors) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def carry_out(
    plan: WeightPlan, held: Sequence[Tensors], bucket_bytes: int = 1 << 20, relays_first: bool = False
) -> list[Tensors]:
    """Returns the destinations' tensors after a plan has run: sources send, then destinations pass on."""
    arrived = [empty(manifest, padded=True) for manifest in plan.destinations]
    storages = [stored_tensors(manifest, its) for manifest, its in zip(plan.sources, held, strict=True)] + arrived
    everyone = frozenset(range(len(arrived)))
    for peer in sorted(range(len(storages)), reverse=relays_first):
        for bucket in outgoing(plan, peer, everyone, bucket_bytes):
            assert bucket.bytes <= max(bucket_bytes, 4)
            flat = torch.empty(bucket.bytes, dtype=torch.uint8)
            bucket.pack(storages[peer], flat)
            bucket.unpack(storages[bucket.receiver], flat)
    return arrived


def unlike_sent(plan: WeightPlan, held: Sequence[Tensors], arrived: Sequence[Mapping[str, int]]) -> list[Problem]:
    """Verifies the digests on each engine rank against the training ranks' tensors; returns the differences."""
    expected = expected_digests(sent_digests(plan, source, tensors) for source, tensors in enumerate(held))
    return [
        problem
        for index, manifest in enumerate(plan.destinations)
        for problem in digest_problems(manifest.holder, expected[index], arrived[index])
    ]


def loaded(model: Path, held: Sequence[Manifest]) -> list[Tensors]:
    """Reads a model's files as ranks do. Nothing is written into a rank whose loading fails."""
    ranks = [empty(manifest) for manifest in held]
    for manifest, tensors in zip(held, ranks, strict=True):
        try:
            load_files(model, manifest, tensors)
        except ModelError:
            assert all(tensor.isnan().all() for tensor in tensors.values())
            raise
    return ranks


def through_ranks(
    model: Path,
    target: Path,
    layout: ParallelLayout,
    dtype_of_ranks: str = "float32",
    dtype: str = "float32",
    spec: Any = LOCAL_SPEC,
) -> list[Tensors]:
    """Loads a model into the ranks of a layout, which export it in `dtype` to `target`. Returns what the ranks hold."""
    arch = read_architecture(model)
    held = manifests(arch, layout, dtype_of_ranks, spec)
    ranks = loaded(model, held)
    export = begin_export(target, model, arch, dtype)
    plan = make_plan(held, export.files)
    for rank, tensors in enumerate(ranks):
        assert not target.exists()
        write_part(export, plan, rank, tensors)
    finish_export(export)
    return ranks


def all_transfers(plan: WeightPlan) -> tuple[Transfer, ...]:
    return tuple(transfer for index in range(len(plan.destinations)) for transfer in plan.incoming(index))


def sync(
    host: RendezvousHost,
    version: int,
    destinations: Iterable[int],
    senders: Sequence[Any],
    held: Sequence[Tensors],
    receivers: Iterable[Any],
) -> list[MegagrpoError]:
    """One sync to these destinations, each end in a thread. The errors, in the order of senders and then receivers."""
    host.open(version, destinations)
    work = [partial(sender.send, version, tensors) for sender, tensors in zip(senders, held, strict=True)]
    work += [partial(receiver.receive, version) for receiver in receivers]
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


def pairs(routes: Any) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Returns (source, destination) of all that sources send, and (destination, destination) of all relays."""
    segments = routes.segments
    sizes = np.diff(segments.first)[segments.group]
    ends = np.cumsum(sizes)
    within = np.arange(sizes.sum()) - np.repeat(ends - sizes, sizes)
    members = segments.members[np.repeat(segments.first[segments.group], sizes) + within]
    straight = np.unique(np.stack([segments.source, segments.landing]), axis=1)
    passed_on = np.unique(np.stack([np.repeat(segments.landing, sizes), members]), axis=1)
    own = passed_on[0] == passed_on[1]
    return list(zip(*straight.tolist(), strict=True)), list(zip(*passed_on[:, ~own].tolist(), strict=True))

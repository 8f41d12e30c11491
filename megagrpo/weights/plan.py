"""Which bytes go from where to where: intersections of boxes, the load shared among replicas, coverage checked."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from megagrpo.errors import Problem, WeightPlanError
from megagrpo.weights.boxes import ITEM_BYTES, Box, Manifest, Placement, Storage
from megagrpo.weights.bundles import HolderClass, bundles_of, classes_of
from megagrpo.weights.coverage import Located, Region, describe, storage_problems, tiling_error
from megagrpo.weights.delivery import deliver
from megagrpo.weights.routes import STRAIGHT, Flows, Listed, Routes, Stamped, Transfer
from megagrpo.weights.topology import Topology

__all__ = ["Listed", "Transfer", "WeightPlan", "make_plan", "plan_problems"]

CHECKED_PLACEMENTS = 100_000
"""About five seconds' work."""


@dataclass(frozen=True, eq=False)
class WeightPlan:
    """Transfers between holders; `source` and `destination` of a transfer are indices into the manifests.

    Both ends see the transfers between them in the same order. A plan pickles, and every rank takes its own part of it.
    Transfers of the whole are written out anew whenever they are asked for; those of a part are kept.
    """

    sources: tuple[Manifest, ...]
    destinations: tuple[Manifest, ...]
    topology: Topology
    routes: Routes

    def incoming(self, destination: int) -> tuple[Transfer, ...]:
        """All that a destination receives: first straight from sources, then passed on by other destinations."""
        return self.routes.find(destination=destination)

    def outgoing(self, source: int) -> tuple[Transfer, ...]:
        """All that comes from a source, also what others pass on for it."""
        return self.routes.find(source=source)

    def passed_on(self, via: int) -> tuple[Transfer, ...]:
        """All that a destination passes on to others. It receives each box of it itself, straight from the source."""
        return self.routes.find(via=via)

    def between(self, source: int, destination: int) -> tuple[Transfer, ...]:
        """What a source sends straight to a destination."""
        return self.routes.find(source, destination, STRAIGHT)

    def relays(self, via: int, destination: int) -> tuple[Transfer, ...]:
        """What destination `via` passes on to another one."""
        return self.routes.find(destination=destination, via=via)

    def destinations_of(self, source: int) -> list[int]:
        """Whom a source sends to itself, in order."""
        return sorted({transfer.destination for transfer in self.routes.find(source=source, via=STRAIGHT)})

    def sources_of(self, destination: int) -> list[int]:
        """Who sends straight to a destination, in order."""
        return sorted({transfer.source for transfer in self.routes.find(destination=destination, via=STRAIGHT)})

    def relays_of(self, via: int) -> list[int]:
        """Whom a destination passes bytes on to, in order."""
        return sorted({transfer.destination for transfer in self.passed_on(via)})

    def vias_of(self, destination: int) -> list[int]:
        """Which destinations pass bytes on to this one, in order."""
        return sorted({transfer.via for transfer in self.incoming(destination) if transfer.via is not None})

    def bytes_of(self, transfer: Transfer) -> int:
        """Bytes that travel: values are cast to the destination's dtype before they leave."""
        storage = self.destinations[transfer.destination].storages[transfer.destination_placement.storage]
        return transfer.box.elements * ITEM_BYTES[storage.dtype]

    def flows(self) -> Flows:
        """Bytes by sender, receiver and who passes them on, without writing the transfers out."""
        return self.routes.flows()

    def sent_bytes(self) -> list[int]:
        """By source: what it sends itself."""
        flows = self.flows()
        straight = flows.via == STRAIGHT
        return _sums(flows.source[straight], flows.bytes[straight], len(self.sources))

    def received_bytes(self) -> list[int]:
        """By destination, from sources and from others that pass them on."""
        flows = self.flows()
        return _sums(flows.destination, flows.bytes, len(self.destinations))

    def part_for_source(self, source: int) -> WeightPlan:
        """What one source needs, small enough to send it: its transfers, and what these touch of other manifests."""
        return self._part(self.outgoing(source), source=source)

    def part_for_destination(self, destination: int) -> WeightPlan:
        """Likewise what a destination receives, and what it passes on. Raises WeightPlanError if it is not sound."""
        if problems := plan_problems(self, [destination]):
            raise WeightPlanError(problems)
        return self._part((*self.incoming(destination), *self.passed_on(destination)), destination=destination)

    def _part(
        self, transfers: Sequence[Transfer], source: int | None = None, destination: int | None = None
    ) -> WeightPlan:
        come = {(transfer.source, transfer.source_placement.storage) for transfer in transfers}
        go = {(transfer.destination, transfer.destination_placement.storage) for transfer in transfers}
        destinations = _touched(self.destinations, go, destination)
        return WeightPlan(
            _touched(self.sources, come, source), destinations, self.topology, Listed(destinations, transfers)
        )


def make_plan(
    sources: Sequence[Manifest], destinations: Sequence[Manifest], topology: Topology | None = None
) -> WeightPlan:
    """Writes every destination element with a box exactly once, from a source that holds it.

    A source on the destination's device is preferred, then those on its node. Everything else crosses the network once
    for each node that needs it, and the sources that hold a box share it evenly, by bytes. Without a topology everyone
    is on a node of their own.

    Holders that differ only in their names should share one `placements` object: then they cost nothing more.

    Raises: WeightPlanError naming each tensor that no source holds, and each storage that is not covered exactly once.
    """
    topology = topology or Topology.apart(len(sources), len(destinations))
    places = len(topology.sources), len(topology.destinations)
    if places != (len(sources), len(destinations)):
        needed = f"{len(sources)} and {len(destinations)}, one for each manifest"
        raise WeightPlanError(
            Problem("topology", f"{places[0]} places of sources, {places[1]} of destinations", needed)
        )
    classes = classes_of(sources), classes_of(destinations)
    if problems := [problem for of_class in classes[1] for problem in storage_problems(of_class.manifest)]:
        raise WeightPlanError(problems)
    bundles = bundles_of(*classes)
    routes = Stamped(bundles, deliver(bundles, topology), *classes)
    plan = WeightPlan(tuple(sources), tuple(destinations), topology, routes)
    if problems := plan_problems(plan, _to_check(classes[1])):
        raise WeightPlanError(problems)
    return plan


def _to_check(destinations: Sequence[HolderClass]) -> Iterator[int]:
    """One destination of each class, as long as that takes seconds; the rest is checked when they take their parts."""
    placements = accumulate(len(of_class.manifest.placements) for of_class in destinations)
    for upto, of_class in zip(placements, destinations, strict=True):
        yield of_class.members[0]
        if upto >= CHECKED_PLACEMENTS:
            break


def _touched(manifests: Sequence[Manifest], used: set[tuple[int, str]], whole: int | None) -> tuple[Manifest, ...]:
    """The manifests with only these (index, storage) of each, but the whole of one; no placements of the others."""
    storages: dict[int, dict[str, Storage]] = defaultdict(dict)
    for index, name in sorted(used):
        storages[index][name] = manifests[index].storages[name]
    return tuple(
        manifest if index == whole else Manifest(manifest.holder, storages[index], ())
        for index, manifest in enumerate(manifests)
    )


def _sums(indices: np.ndarray, values: np.ndarray, count: int) -> list[int]:
    totals = np.zeros(count, np.int64)
    np.add.at(totals, indices, values)
    return totals.tolist()


def plan_problems(plan: WeightPlan, destinations: Iterable[int] | None = None) -> list[Problem]:
    """Checks a plan against its own manifests, trusting nothing of how it was made: all destinations, or only some.

    Both ends of a transfer must be the same box, where the manifests say that it lies; the transfers into each
    placement must tile it; and who passes a box on must be on the same node and receive it itself, in the same dtype
    and straight from the same source, or it could be passed on before it has arrived.
    """
    sources: dict[int, Located] = {}
    problems: list[Problem] = []
    for index in range(len(plan.destinations)) if destinations is None else destinations:
        manifest = plan.destinations[index]
        located = Located(manifest)
        pieces: dict[Placement, list[Region]] = defaultdict(list)
        for transfer in plan.incoming(index):
            come, go = transfer.source_placement, transfer.destination_placement
            if transfer.source not in sources:
                sources[transfer.source] = Located(plan.sources[transfer.source])
            into, out_of = located.whole_of(go), sources[transfer.source].whole_of(come)
            holder = plan.sources[transfer.source].holder
            where = f"{come.box.tensor}: {holder} to {manifest.holder}"
            region = describe((come.box.start, come.box.shape))
            if come.box != go.box:
                given = f"{region} to {describe((go.box.start, go.box.shape))}"
                problems.append(Problem(where, given, "the same box at both ends"))
            elif into is None or out_of is None:
                given = f"{region} is not there in {manifest.holder if into is None else holder}"
                problems.append(Problem(where, given, "a part of one of its placements"))
            else:
                pieces[into].append((go.box.start, go.box.shape))
        problems += _relay_problems(plan, index)
        for placement in manifest.placements:
            box = placement.box
            if error := tiling_error((box.start, box.shape), pieces[placement]):
                where = f"{box.tensor} in {manifest.holder}, {placement.storage}"
                problems.append(Problem(where, error, "every element written exactly once"))
    return problems


def _relay_problems(plan: WeightPlan, destination: int) -> list[Problem]:
    """What is passed on to one destination by somebody who does not have it first."""
    problems = []
    straight: dict[tuple[int, int], set[tuple[Box, int]]] = {}
    places = plan.topology.destinations
    for transfer in plan.incoming(destination):
        via = transfer.via
        if via is None:
            continue
        ends = transfer.source, via
        if ends not in straight:
            straight[ends] = {(own.box, plan.bytes_of(own)) for own in plan.between(*ends)}
        names = plan.destinations[destination].holder, plan.destinations[via].holder
        where = f"{transfer.box.tensor}: passed on to {names[0]} by {names[1]}"
        if places[via].node != places[destination].node or via == destination:
            given = f"on {places[via].node}, {places[destination].node}"
            problems.append(Problem(where, given, "another destination on the same node"))
        elif (transfer.box, plan.bytes_of(transfer)) not in straight[ends]:
            given = f"{names[1]} does not receive {describe((transfer.box.start, transfer.box.shape))} before"
            problems.append(Problem(where, given, f"the same box from {plan.sources[transfer.source].holder} itself"))
    return problems

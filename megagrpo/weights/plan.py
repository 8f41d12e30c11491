"""Plans of transfers from sources to destinations. A plan is checked against its manifests before it is used."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from megagrpo.errors import Problem, WeightPlanError, WeightSyncError
from megagrpo.weights.boxes import ITEM_BYTES, Box, Manifest, Place, Placement, Storage, Topology, Transfer, classes_of
from megagrpo.weights.coverage import Located, as_slice, storage_problems, tiling_error
from megagrpo.weights.planning import Routes, routes_between

CHECKED_PLACEMENTS = 100_000
"""Placements that are checked when a plan is made, which takes about five seconds."""


class ListedTransfers:
    """A list of transfers in place of Routes: one rank's part of a plan."""

    def __init__(self, transfers: Iterable[Transfer]) -> None:
        self._all = tuple(transfers)

    def select(
        self, source: int | None = None, destination: int | None = None, via: int | None = None
    ) -> tuple[Transfer, ...]:
        """Returns the transfers with these ends; None: any."""
        return tuple(
            its
            for its in self._all
            if source in (None, its.source) and destination in (None, its.destination) and via in (None, its.via)
        )


@dataclass(frozen=True, eq=False)
class WeightPlan:
    """Transfers between holders; `source` and `destination` of a transfer are indices into the manifests.

    Both ends see the transfers between them in the same order. A plan can be pickled, and every rank takes its own part
    of it. The transfers of a whole plan are written out anew at each call; those of a part are kept.
    """

    sources: tuple[Manifest, ...]
    destinations: tuple[Manifest, ...]
    topology: Topology
    transfers: Routes | ListedTransfers

    def incoming(self, destination: int) -> tuple[Transfer, ...]:
        """Returns the transfers to a destination: first those from sources, then those that destinations pass on."""
        return self.transfers.select(destination=destination)

    def outgoing(self, source: int) -> tuple[Transfer, ...]:
        """Returns the transfers of a source's bytes, with those that a destination passes on."""
        return self.transfers.select(source)

    def passed_on(self, via: int) -> tuple[Transfer, ...]:
        """Returns the transfers that a destination passes on. It receives their boxes from the source itself."""
        return self.transfers.select(via=via)

    def direct(self, source: int, destination: int) -> tuple[Transfer, ...]:
        """Returns the transfers that a source itself sends to a destination."""
        return tuple(transfer for transfer in self.transfers.select(source, destination) if transfer.via is None)

    def destinations_of(self, source: int) -> list[int]:
        """Returns the destinations to which a source itself sends, in order."""
        return sorted({transfer.destination for transfer in self.outgoing(source) if transfer.via is None})

    def bytes_of(self, transfer: Transfer) -> int:
        """Returns the number of bytes that travel: values are cast to the destination's dtype before they are sent."""
        storage = self.destinations[transfer.destination].storages[transfer.destination_placement.storage]
        return transfer.box.elements * ITEM_BYTES[storage.dtype]

    def part_for_source(self, source: int) -> WeightPlan:
        """Returns a source's part of the plan: its transfers, those that it forwards, and the storages of other
        manifests that they touch."""
        forwarded = (
            transfer
            for destination in self.topology.forwards_to(source)
            for transfer in self.incoming(destination)
            if self.topology.forwarder(transfer.source, destination) == source
        )
        return self._part((*self.outgoing(source), *forwarded), source=source)

    def part_for_destination(self, destination: int) -> WeightPlan:
        """Returns a destination's part: transfers to and by it. Raises WeightPlanError if `plan_problems` finds any."""
        if problems := plan_problems(self, [destination]):
            raise WeightPlanError(problems)
        return self._part((*self.incoming(destination), *self.passed_on(destination)), destination=destination)

    def _part(
        self, transfers: Sequence[Transfer], source: int | None = None, destination: int | None = None
    ) -> WeightPlan:
        read = {(transfer.source, transfer.source_placement.storage) for transfer in transfers}
        written = {(transfer.destination, transfer.destination_placement.storage) for transfer in transfers}
        return WeightPlan(
            _touched(self.sources, read, source),
            _touched(self.destinations, written, destination),
            self.topology,
            ListedTransfers(transfers),
        )


def make_plan(
    sources: Sequence[Manifest], destinations: Sequence[Manifest], topology: Topology | None = None
) -> WeightPlan:
    """Plans to write every destination element with a box exactly once, from a source that holds it.

    A source on the destination's device is preferred, then the sources on its node. Everything else crosses the network
    once for each node that needs it, and the sources that hold a box share it evenly, by bytes. Without a topology each
    holder is on a node of its own.

    Holders that differ only in their names should share one `placements` object: they are then compared at once. Raises
    WeightPlanError, naming each tensor that no source holds and each storage that is not covered exactly once.
    """
    if topology is None:
        apart = (
            tuple(Place(f"{role} {index}") for index in range(len(manifests)))
            for role, manifests in (("source", sources), ("destination", destinations))
        )
        topology = Topology(next(apart), next(apart))
    places = len(topology.sources), len(topology.destinations)
    if places != (len(sources), len(destinations)):
        needed = f"{len(sources)} and {len(destinations)}, one for each manifest"
        raise WeightPlanError(
            Problem("topology", f"{places[0]} places of sources, {places[1]} of destinations", needed)
        )
    classes = classes_of(sources), classes_of(destinations)
    if problems := [problem for of_class in classes[1] for problem in storage_problems(of_class.manifest)]:
        raise WeightPlanError(problems)
    plan = WeightPlan(tuple(sources), tuple(destinations), topology, routes_between(*classes, topology))
    # One destination of each class, up to CHECKED_PLACEMENTS. Each rank checks its part when it takes it.
    before = accumulate((len(of_class.manifest.placements) for of_class in classes[1]), initial=0)
    checked = [c.members[0] for c, count in zip(classes[1], before, strict=False) if count < CHECKED_PLACEMENTS]
    if problems := plan_problems(plan, checked):
        raise WeightPlanError(problems)
    return plan


def require_own(planned: Manifest, own: Manifest) -> None:
    """Raises WeightSyncError unless a plan's manifest of this rank is its own.

    No digest shows that the plan's order of manifests is not the ranks' order: both ends then agree about the wrong
    bytes.
    """
    if planned != own:
        given = f"the manifest of {planned.holder}" + (", with other boxes" if planned.holder == own.holder else "")
        raise WeightSyncError(Problem(f"{own.holder}: its place in the plan", given, f"the manifest of {own.holder}"))


def _touched(manifests: Sequence[Manifest], used: set[tuple[int, str]], whole: int | None) -> tuple[Manifest, ...]:
    """Returns the manifests with only their storages in `used`, without placements; manifest `whole` stays whole."""
    storages: dict[int, dict[str, Storage]] = defaultdict(dict)
    for index, name in sorted(used):
        storages[index][name] = manifests[index].storages[name]
    return tuple(
        manifest if index == whole else Manifest(manifest.holder, storages[index], ())
        for index, manifest in enumerate(manifests)
    )


def plan_problems(plan: WeightPlan, destinations: Iterable[int] | None = None) -> list[Problem]:
    """Checks a plan against its own manifests, independently of how it was made: all destinations, or only some.

    Both ends of a transfer must be the same box, where the manifests say that it lies. The transfers into each
    placement must tile it. A destination that passes a box on must be on the same node, and must receive the box in the
    same dtype from the source itself: otherwise it could pass the box on before it has arrived.
    """
    sources: dict[int, Located] = {}
    problems: list[Problem] = []
    for index in range(len(plan.destinations)) if destinations is None else destinations:
        manifest = plan.destinations[index]
        located = Located(manifest)
        pieces: dict[Placement, list[Box]] = defaultdict(list)
        for transfer in plan.incoming(index):
            origin, target = transfer.source_placement, transfer.destination_placement
            if transfer.source not in sources:
                sources[transfer.source] = Located(plan.sources[transfer.source])
            into, out_of = located.whole_of(target), sources[transfer.source].whole_of(origin)
            holder = plan.sources[transfer.source].holder
            where = f"{origin.box.tensor}: {holder} to {manifest.holder}"
            region = as_slice(origin.box)
            if origin.box != target.box:
                given = f"{region} to {as_slice(target.box)}"
                problems.append(Problem(where, given, "the same box at both ends"))
            elif into is None or out_of is None:
                given = f"{region} is not there in {manifest.holder if into is None else holder}"
                problems.append(Problem(where, given, "a part of one of its placements"))
            else:
                pieces[into].append(target.box)
        problems += _relay_problems(plan, index)
        for placement in manifest.placements:
            box = placement.box
            if error := tiling_error(box, pieces[placement]):
                where = f"{box.tensor} in {manifest.holder}, {placement.storage}"
                problems.append(Problem(where, error, "every element written exactly once"))
    return problems


def _relay_problems(plan: WeightPlan, destination: int) -> list[Problem]:
    """Returns problems of boxes relayed to a destination: by itself, from another node, or not received there first."""
    problems = []
    straight: dict[tuple[int, int], set[tuple[Box, int]]] = {}
    places = plan.topology.destinations
    for transfer in plan.incoming(destination):
        via = transfer.via
        if via is None:
            continue
        ends = transfer.source, via
        if ends not in straight:
            straight[ends] = {(leg.box, plan.bytes_of(leg)) for leg in plan.direct(*ends)}
        names = plan.destinations[destination].holder, plan.destinations[via].holder
        where = f"{transfer.box.tensor}: passed on to {names[0]} by {names[1]}"
        if places[via].node != places[destination].node or via == destination:
            given = f"on {places[via].node}, {places[destination].node}"
            problems.append(Problem(where, given, "another destination on the same node"))
        elif (transfer.box, plan.bytes_of(transfer)) not in straight[ends]:
            given = f"{names[1]} does not receive {as_slice(transfer.box)} before"
            problems.append(Problem(where, given, f"the same box from {plan.sources[transfer.source].holder} itself"))
    return problems

"""Which bytes go from where to where: intersections of boxes, the load shared among replicas, coverage checked."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from megagrpo.errors import Problem, WeightPlanError
from megagrpo.weights.boxes import ITEM_BYTES, Box, Manifest, Placement, Storage
from megagrpo.weights.coverage import Located, describe, few, first_overlap, storage_problems, subtract, tiling_error
from megagrpo.weights.topology import Topology

PIECES_PER_SOURCE = 16
"""A box that several sources hold is cut so that a source's fair share is at least this many pieces."""
SMALLEST_CUT_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Transfer:
    """The same box, in a storage of a source and in a storage of a destination.

    `via` is a destination on the same node that receives these bytes from the source and passes them on, so that they
    cross the network once for all who need them there. None: they come straight from the source.
    """

    source: int
    source_placement: Placement
    destination: int
    destination_placement: Placement
    via: int | None = None

    @property
    def box(self) -> Box:
        return self.source_placement.box


class Routes(Protocol):
    """Every transfer of a plan, found by either of its ends, in the order in which both ends take them."""

    def incoming(self, destination: int) -> tuple[Transfer, ...]: ...

    def outgoing(self, source: int) -> tuple[Transfer, ...]: ...


class Listed:
    """Routes as a list of transfers."""

    def __init__(self, transfers: Iterable[Transfer]) -> None:
        self.transfers = tuple(transfers)
        incoming: dict[int, list[Transfer]] = defaultdict(list)
        outgoing: dict[int, list[Transfer]] = defaultdict(list)
        for transfer in self.transfers:
            incoming[transfer.destination].append(transfer)
            outgoing[transfer.source].append(transfer)
        self._incoming = {index: tuple(of_one) for index, of_one in incoming.items()}
        self._outgoing = {index: tuple(of_one) for index, of_one in outgoing.items()}

    def incoming(self, destination: int) -> tuple[Transfer, ...]:
        return self._incoming.get(destination, ())

    def outgoing(self, source: int) -> tuple[Transfer, ...]:
        return self._outgoing.get(source, ())


@dataclass(frozen=True, eq=False)
class WeightPlan:
    """Transfers between holders; `source` and `destination` of a transfer are indices into the manifests.

    Both ends see the transfers between them in the same order. It pickles; one rank needs only its own part of it.
    """

    sources: tuple[Manifest, ...]
    destinations: tuple[Manifest, ...]
    routes: Routes

    def incoming(self, destination: int) -> tuple[Transfer, ...]:
        """All that a destination receives, straight from a source or passed on by another destination."""
        return self.routes.incoming(destination)

    def outgoing(self, source: int) -> tuple[Transfer, ...]:
        """All that comes from a source, also what others pass on for it."""
        return self.routes.outgoing(source)

    def between(self, source: int, destination: int) -> tuple[Transfer, ...]:
        """What a source sends straight to a destination."""
        return tuple(
            transfer for transfer in self.incoming(destination) if transfer.source == source and transfer.via is None
        )

    def relays(self, via: int, destination: int) -> tuple[Transfer, ...]:
        """What destination `via` passes on to another one. It receives each of these boxes itself, from `source`."""
        return tuple(transfer for transfer in self.incoming(destination) if transfer.via == via)

    def destinations_of(self, source: int) -> list[int]:
        """Whom a source sends to itself, in order."""
        return sorted({transfer.destination for transfer in self.outgoing(source) if transfer.via is None})

    def sources_of(self, destination: int) -> list[int]:
        """Who sends straight to a destination, in order."""
        return sorted({transfer.source for transfer in self.incoming(destination) if transfer.via is None})

    def relays_of(self, via: int) -> list[int]:
        """Whom a destination passes bytes on to, in order."""
        return sorted(
            index
            for index in range(len(self.destinations))
            if any(transfer.via == via for transfer in self.incoming(index))
        )

    def vias_of(self, destination: int) -> list[int]:
        """Which destinations pass bytes on to this one, in order."""
        return sorted({transfer.via for transfer in self.incoming(destination) if transfer.via is not None})

    def bytes_of(self, transfer: Transfer) -> int:
        """Bytes that travel: values are cast to the destination's dtype before they leave."""
        storage = self.destinations[transfer.destination].storages[transfer.destination_placement.storage]
        return transfer.box.elements * ITEM_BYTES[storage.dtype]

    def sent_bytes(self) -> list[int]:
        """By source: what it sends itself."""
        return [
            sum(self.bytes_of(transfer) for transfer in self.outgoing(source) if transfer.via is None)
            for source in range(len(self.sources))
        ]

    def received_bytes(self) -> list[int]:
        """By destination, from sources and from others that pass them on."""
        return [
            sum(self.bytes_of(transfer) for transfer in self.incoming(destination))
            for destination in range(len(self.destinations))
        ]

    def part_for_source(self, source: int) -> WeightPlan:
        """What one source needs of the plan, small enough to send it: its transfers, and of others what these touch."""
        return self._part(self.outgoing(source), source=source)

    def part_for_destination(self, destination: int) -> WeightPlan:
        """Likewise: what a destination receives, and what it passes on."""
        passed_on = [transfer for other in self.relays_of(destination) for transfer in self.relays(destination, other)]
        return self._part((*self.incoming(destination), *passed_on), destination=destination)

    def _part(
        self, transfers: Sequence[Transfer], source: int | None = None, destination: int | None = None
    ) -> WeightPlan:
        come, go = (
            {(transfer.source, transfer.source_placement.storage) for transfer in transfers},
            {(transfer.destination, transfer.destination_placement.storage) for transfer in transfers},
        )
        return WeightPlan(
            _touched(self.sources, come, source), _touched(self.destinations, go, destination), Listed(transfers)
        )


def _touched(manifests: Sequence[Manifest], used: set[tuple[int, str]], whole: int | None) -> tuple[Manifest, ...]:
    """The manifests with only these (index, storage) of each, but the whole of one; no placements of the others."""
    storages: dict[int, dict[str, Storage]] = defaultdict(dict)
    for index, name in used:
        storages[index][name] = manifests[index].storages[name]
    return tuple(
        manifest if index == whole else Manifest(manifest.holder, storages[index], ())
        for index, manifest in enumerate(manifests)
    )


def make_plan(
    sources: Sequence[Manifest], destinations: Sequence[Manifest], topology: Topology | None = None
) -> WeightPlan:
    """Writes every destination element with a box exactly once, from a source that holds it.

    A source on the destination's device is preferred, then one on its node; otherwise the sources that hold a box
    share it evenly, by bytes, and it crosses the network once for each node that needs it. Without a topology
    everyone is on a node of their own.

    Raises: WeightPlanError naming each tensor that no source holds, and each storage that is not covered exactly once.
    """
    held = _Held(sources)
    wanted: list[_Wanted] = []
    problems = []
    missing: dict[str, list[str]] = defaultdict(list)
    for index, manifest in enumerate(destinations):
        problems += storage_problems(manifest)
        for placement in manifest.placements:
            item_bytes = ITEM_BYTES[manifest.storages[placement.storage].dtype]
            left = [placement.box]
            for box, holders in held.meeting(placement.box):
                common = placement.box.intersect(box)
                if common is not None:
                    wanted.append(_Wanted(index, placement.part(common), holders, common.elements * item_bytes))
                    left = [piece for part in left for piece in subtract(part, common)]
            for part in left:
                missing[part.tensor].append(f"{describe((part.start, part.shape))} for {manifest.holder}")
    for name, parts in missing.items():
        known = ", ".join(held.holders_of(name)) or "no source at all"
        problems.append(Problem(name, f"no source for {few(parts)}", "a source for every element", f"held by: {known}"))
    if problems:
        raise WeightPlanError(problems)
    topology = topology or Topology.apart(len(sources), len(destinations))
    chosen = sorted(_share(wanted, len(sources), topology), key=lambda choice: (choice[0], choice[1].destination))
    transfers = tuple(
        Transfer(source, held.placement(source, want.placement.box), want.destination, want.placement)
        for source, want in chosen
    )
    plan = WeightPlan(tuple(sources), tuple(destinations), Listed(transfers))
    if problems := plan_problems(plan):
        raise WeightPlanError(problems)
    return plan


def plan_problems(plan: WeightPlan) -> list[Problem]:
    """Checks a plan against its own manifests, trusting nothing of how it was made.

    Both ends of a transfer must be the same box, where the manifests say that it lies; and the transfers into each
    placement must tile it.
    """
    problems = []
    sources = [Located(manifest) for manifest in plan.sources]
    destinations = [Located(manifest) for manifest in plan.destinations]
    pieces: dict[int, dict[Placement, list[Box]]] = defaultdict(lambda: defaultdict(list))
    for transfer in (transfer for index in range(len(plan.destinations)) for transfer in plan.incoming(index)):
        come, go = transfer.source_placement, transfer.destination_placement
        source, destination = plan.sources[transfer.source], plan.destinations[transfer.destination]
        where = f"{come.box.tensor}: {source.holder} to {destination.holder}"
        if come.box != go.box:
            given = f"{describe((come.box.start, come.box.shape))} to {describe((go.box.start, go.box.shape))}"
            problems.append(Problem(where, given, "the same box at both ends"))
            continue
        into = destinations[transfer.destination].around(go)
        if into is None or sources[transfer.source].around(come) is None:
            end = destination.holder if into is None else source.holder
            given = f"{describe((come.box.start, come.box.shape))} is not there in {end}"
            problems.append(Problem(where, given, "a part of one of its placements"))
            continue
        pieces[transfer.destination][into].append(go.box)
    for index, manifest in enumerate(plan.destinations):
        for placement in manifest.placements:
            box = placement.box
            parts = [(part.start, part.shape) for part in pieces[index][placement]]
            if error := tiling_error((box.start, box.shape), parts):
                where = f"{box.tensor} in {manifest.holder}, {placement.storage}"
                problems.append(Problem(where, error, "every element written exactly once"))
    return problems


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A part of a destination's placement, and every source that holds all of it."""

    destination: int
    placement: Placement
    holders: tuple[int, ...]
    bytes: int


class _Held:
    """What the sources hold, by tensor: disjoint boxes, each with all of its holders."""

    def __init__(self, sources: Sequence[Manifest]) -> None:
        self._names = [manifest.holder for manifest in sources]
        self._located = [Located(manifest) for manifest in sources]
        holders: dict[str, dict[Box, list[int]]] = defaultdict(dict)
        for index, manifest in enumerate(sources):
            for placement in manifest.placements:
                of_box = holders[placement.box.tensor].setdefault(placement.box, [])
                if not of_box or of_box[-1] != index:
                    of_box.append(index)
        self._boxes = {tensor: _disjoint(boxes) for tensor, boxes in holders.items()}

    def meeting(self, box: Box) -> Iterator[tuple[Box, tuple[int, ...]]]:
        """Boxes of the same tensor that may have elements in common with `box`."""
        for other, holders in self._boxes.get(box.tensor, ()):
            if box.start and other.start[0] >= box.start[0] + box.shape[0]:
                return
            yield other, holders

    def placement(self, source: int, box: Box) -> Placement:
        around = self._located[source].anywhere(box)
        if around is None:
            raise WeightPlanError(Problem(box.tensor, f"{box} is not in {self._names[source]}"))
        return around.part(box)

    def holders_of(self, tensor: str) -> list[str]:
        held = self._boxes.get(tensor, [])
        return [self._names[index] for index in sorted({index for _, holders in held for index in holders})]


def _disjoint(held: dict[Box, list[int]]) -> list[tuple[Box, tuple[int, ...]]]:
    """The same elements with the same holders, cut so that no two boxes overlap. In order of their first row."""
    boxes = [(box, tuple(holders)) for box, holders in held.items()]
    if first_overlap([(box.start, box.shape) for box in held]) is not None:
        cells: list[tuple[Box, tuple[int, ...]]] = []
        for box, holders in boxes:
            left, cut = [box], []
            for cell, others in cells:
                common = cell.intersect(box)
                if common is None:
                    cut.append((cell, others))
                    continue
                cut.append((common, tuple(sorted({*others, *holders}))))
                cut += [(part, others) for part in subtract(cell, common)]
                left = [piece for part in left for piece in subtract(part, common)]
            cells = cut + [(part, holders) for part in left]
        boxes = cells
    return sorted(boxes, key=lambda item: item[0].start)


def _share(wanted: list[_Wanted], sources: int, topology: Topology) -> Iterator[tuple[int, _Wanted]]:
    """Chooses one source for each piece: the fewest holders first, large before small, to the least loaded."""
    load = [0] * sources
    remote = []
    for want in wanted:
        links = {topology.link(holder, want.destination): holder for holder in reversed(want.holders)}
        if near := [links[link] for link in ("device", "node") if link in links]:
            yield near[0], want
        else:
            remote.append(want)
    largest = max(SMALLEST_CUT_BYTES, sum(want.bytes for want in remote) // (sources * PIECES_PER_SOURCE or 1))
    pieces = [piece for want in remote for piece in _cut(want, largest)]
    for want in sorted(pieces, key=lambda want: (len(want.holders), -want.bytes)):
        source = min(want.holders, key=lambda holder: (load[holder], holder))
        load[source] += want.bytes
        yield source, want


def _cut(want: _Wanted, largest: int) -> Iterator[_Wanted]:
    """Runs of rows of at most `largest` bytes, where there is more than one holder to share them."""
    box = want.placement.box
    count = min(-(-want.bytes // largest), box.shape[0]) if box.shape else 1
    if len(want.holders) == 1 or count <= 1:
        yield want
        return
    edges = [box.shape[0] * index // count for index in range(count + 1)]
    for low, high in pairwise(edges):
        part = Box(box.tensor, (box.start[0] + low, *box.start[1:]), (high - low, *box.shape[1:]))
        yield _Wanted(
            want.destination, want.placement.part(part), want.holders, want.bytes // box.elements * part.elements
        )

"""Division of a plan among the ranks: which source sends which bytes to which destination.

A model has a hundred thousand tensors and a cluster thousands of ranks, but ranks that differ only in a replica hold
the same boxes, and tensors that differ only in their layer or their expert are cut in the same way. Boxes are therefore
intersected once for each kind of tensor, between classes of ranks. Bytes with the same holders and the same takers are
one bundle; a few thousand bundles are then cut among the sources that hold them, so that the load is even. The result
is a few numbers for each cut; a rank's own transfers are written out when it asks for them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np

from megagrpo.errors import Problem, WeightPlanError, few
from megagrpo.weights.boxes import ITEM_BYTES, Box, HolderClass, Link, Place, Placement, Topology, Transfer
from megagrpo.weights.coverage import Located, as_slice, first_overlap, subtract

Holders = tuple[int, ...]
"""Indices of sources, or of destinations, that have the same bytes."""

GAP = 0.01
"""The fraction by which the largest load may exceed the least possible one."""
SWEEPS = 1000
"""The most sweeps over all sets of holders; those of real layouts need fewer than ten."""


# --- bundles: bytes with the same holders and the same takers ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Block:
    """The same region of several checkpoint tensors. Each `together` of them, in order, alternate in a storage of the
    destination: one source sends them all."""

    tensors: tuple[str, ...]
    start: tuple[int, ...]
    shape: tuple[int, ...]
    together: int = 1


@dataclass(frozen=True)
class Bundle:
    """Boxes one after another, as a line of bytes that both ends cut at the same places.

    If a destination has several placements for the same box, this bundle fills the `copy`-th of them.
    """

    holders: tuple[int, ...]
    wanted_by: tuple[int, ...]
    dtype: str
    copy: int
    blocks: tuple[Block, ...]

    @cached_property
    def _edges(self) -> list[int]:
        """Returns the first byte of each block, and the end of the last one."""
        item_bytes = ITEM_BYTES[self.dtype]
        sizes = (len(block.tensors) * prod(block.shape) * item_bytes for block in self.blocks)
        return [0, *accumulate(sizes)]

    @property
    def bytes(self) -> int:
        return self._edges[-1]

    def cut(self, at: int) -> int:
        """Returns the nearest byte to `at` where the line can be cut: between two rows of a box, or between boxes.
        Boxes that one source sends together are not cut."""
        if at <= 0 or at >= self.bytes:
            return min(max(at, 0), self.bytes)
        index, tensor_bytes, row_bytes, _ = self._block_at(at)
        if (together := self.blocks[index].together * tensor_bytes) > tensor_bytes:
            begin, end = self._edges[index : index + 2]
            return min(begin + round((at - begin) / together) * together, end)
        tensor, within = divmod(at - self._edges[index], tensor_bytes)
        return self._edges[index] + tensor * tensor_bytes + round(within / row_bytes) * row_bytes

    def boxes(self, begin: int, end: int) -> Iterator[Box]:
        """Yields the boxes between bytes `begin` and `end`, which `cut` has returned."""
        while begin < end:
            index, tensor_bytes, row_bytes, axis = self._block_at(begin)
            block, until = self.blocks[index], min(end, self._edges[index + 1])
            while begin < until:
                tensor, within = divmod(begin - self._edges[index], tensor_bytes)
                taken = min(tensor_bytes - within, until - begin)
                start, shape = block.start, block.shape
                if taken < tensor_bytes:
                    low, rows = within // row_bytes, taken // row_bytes
                    start = (*start[:axis], start[axis] + low, *start[axis + 1 :])
                    shape = (*shape[:axis], rows, *shape[axis + 1 :])
                yield Box(block.tensors[tensor], start, shape)
                begin += taken

    def _block_at(self, at: int) -> tuple[int, int, int, int]:
        """Returns, of the block at this byte: its index, the bytes of one box and of one row, and the rows' axis."""
        index = bisect_right(self._edges, at) - 1
        shape, item_bytes = self.blocks[index].shape, ITEM_BYTES[self.dtype]
        axis = next((axis for axis, size in enumerate(shape) if size > 1), 0)
        return index, prod(shape) * item_bytes, prod(shape[axis + 1 :]) * item_bytes, axis


_Held = tuple[tuple[int, ...], tuple[int, ...], int]  # start, shape, class
_Wanted = tuple[tuple[int, ...], tuple[int, ...], int, str]  # and dtype
_Classes = tuple[int, ...]
_Key = tuple[_Classes, _Classes, str, int]
"""Holders, takers, dtype and copy of a bundle's elements."""


def bundles_of(sources: Sequence[HolderClass], destinations: Sequence[HolderClass]) -> list[Bundle]:
    """Returns bundles of all elements that destinations want. An element that is wanted in two dtypes, or twice by one
    destination, is in two bundles. Raises WeightPlanError, naming each tensor with elements that no source holds."""
    held: dict[str, list[_Held]] = defaultdict(list)
    for index, of_class in enumerate(sources):
        for placement in of_class.manifest.placements:
            held[placement.box.tensor].append((placement.box.start, placement.box.shape, index))
    wanted: dict[str, list[_Wanted]] = defaultdict(list)
    together: dict[str, int] = {}
    for index, of_class in enumerate(destinations):
        storages = of_class.manifest.storages
        for placement in of_class.manifest.placements:
            box = placement.box
            storage = storages[placement.storage]
            wanted[box.tensor].append((box.start, box.shape, index, storage.dtype))
            together[box.tensor] = storage.shape[-storage.folded] if storage.folded else 1
    kinds: dict[tuple[tuple[_Held, ...], tuple[_Wanted, ...], int], list[str]] = defaultdict(list)
    for tensor, wants in wanted.items():
        kinds[tuple(held.get(tensor, ())), tuple(wants), together[tensor]].append(tensor)

    blocks: dict[_Key, list[Block]] = defaultdict(list)
    problems = []
    for (holds, wishes, count), tensors in kinds.items():
        cells, missing = _cells(holds, wishes)
        if missing:
            problems += [_missing_source(tensor, missing, holds, sources, destinations) for tensor in tensors]
        for box, key in cells:
            blocks[key].append(Block(tuple(tensors), box.start, box.shape, count))
    if problems:
        raise WeightPlanError(problems)
    members: dict[tuple[int, _Classes], tuple[int, ...]] = {}

    def ranks_of(side: int, classes: _Classes) -> tuple[int, ...]:
        of_side = (sources, destinations)[side]
        if (side, classes) not in members:
            members[side, classes] = tuple(sorted(member for index in classes for member in of_side[index].members))
        return members[side, classes]

    return [
        Bundle(ranks_of(0, holders), ranks_of(1, wanted_by), dtype, copy, tuple(of_bundle))
        for (holders, wanted_by, dtype, copy), of_bundle in blocks.items()
    ]


def _cells(
    holds: Sequence[_Held], wants: Sequence[_Wanted]
) -> tuple[list[tuple[Box, _Key]], list[tuple[Box, _Classes]]]:
    """Returns boxes of one kind of tensor, by the holders and takers of their elements; and regions that no source
    holds, with the classes that want them."""
    sources = disjoint((start, shape, index) for start, shape, index in holds)
    cells: list[tuple[Box, _Key]] = []
    missing: list[tuple[Box, _Classes]] = []
    for dtype in dict.fromkeys(dtype for *_, dtype in wants):
        of_dtype = [(start, shape, index) for start, shape, index, its in wants if its == dtype]
        # Each placement counts as a holder, so that a class that wants an element twice is counted twice.
        placements = disjoint((start, shape, ordinal) for ordinal, (start, shape, _) in enumerate(of_dtype))
        for box, ordinals in placements:
            times = Counter(of_dtype[ordinal][2] for ordinal in ordinals)
            left = [box]
            for other, holders in sources:
                if box.start and other.start[0] >= box.start[0] + box.shape[0]:
                    break
                common = box.intersect(other)
                if common is None:
                    continue
                left = [piece for part in left for piece in subtract(part, common)]
                for copy in range(max(times.values())):
                    classes = tuple(sorted(index for index, count in times.items() if count > copy))
                    cells.append((common, (holders, classes, dtype, copy)))
            missing += [(part, tuple(times)) for part in left]
    return cells, missing


def _missing_source(
    tensor: str,
    missing: Sequence[tuple[Box, _Classes]],
    holds: Sequence[_Held],
    sources: Sequence[HolderClass],
    destinations: Sequence[HolderClass],
) -> Problem:
    parts = [
        f"{as_slice(box)} for {destinations[index].manifest.holder}" for box, classes in missing for index in classes
    ]
    holders = few([sources[index].manifest.holder for index in sorted({index for *_, index in holds})])
    given = f"no source for {few(parts)}"
    return Problem(tensor, given, "a source for every element", f"held by: {holders or 'no source at all'}")


def disjoint(held: Iterable[tuple[tuple[int, ...], tuple[int, ...], int]]) -> list[tuple[Box, tuple[int, ...]]]:
    """Cuts regions (start, shape, holder) so that no two overlap; returns each with all its holders, by first row."""
    holders: dict[Box, set[int]] = defaultdict(set)
    for start, shape, holder in held:
        holders[Box("", start, shape)].add(holder)
    boxes = list(holders.items())
    if first_overlap(list(holders)) is not None:
        cells: list[tuple[Box, set[int]]] = []
        for box, of_box in boxes:
            left, cut = [box], []
            for cell, others in cells:
                common = cell.intersect(box)
                if common is None:
                    cut.append((cell, others))
                    continue
                cut.append((common, others | of_box))
                cut += [(part, others) for part in subtract(cell, common)]
                left = [piece for part in left for piece in subtract(part, common)]
            cells = cut + [(part, of_box) for part in left]
        boxes = cells
    return sorted(((box, tuple(sorted(of_box))) for box, of_box in boxes), key=lambda item: item[0].start)


# --- routes: all transfers of a plan ----------------------------------------------------------------------------------


def routes_between(sources: Sequence[HolderClass], destinations: Sequence[HolderClass], topology: Topology) -> Routes:
    """Chooses a source for every element that a destination wants, and the destination where it lands on a node.

    A destination receives from a source on its own device first, then from the sources on its node. The rest crosses
    the network once for all destinations of a node that want the same: each of them receives a part and passes it on
    to the others. Sources share evenly what they all hold, over the network and within nodes separately;
    destinations share evenly what they all want. Raises WeightPlanError, as `bundles_of`.
    """
    bundles = bundles_of(sources, destinations)
    return Routes(bundles, _segments(bundles, topology), sources, destinations)


@dataclass(frozen=True)
class Segments:
    """Parts of bundles: bytes begin .. end of `bundle` go from `source` to the destination `landing`, which passes them
    on to the other members of `group`. int64 arrays of equal length; group g is members[first[g]:first[g + 1]].
    """

    bundle: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    source: np.ndarray
    landing: np.ndarray
    group: np.ndarray
    members: np.ndarray
    first: np.ndarray


class Routes:
    """All transfers of a plan, found by their ends, as segments of bundles. They are written out for one end at a time,
    and not kept. Between two ends their order is always the same."""

    def __init__(
        self,
        bundles: Sequence[Bundle],
        segments: Segments,
        sources: Sequence[HolderClass],
        destinations: Sequence[HolderClass],
    ) -> None:
        self.bundles, self.segments = tuple(bundles), segments
        self._sources, self._destinations = _Placements(sources), _Placements(destinations)

    def select(
        self, source: int | None = None, destination: int | None = None, via: int | None = None
    ) -> tuple[Transfer, ...]:
        """Returns the transfers from a source, to a destination, passed on by another one; None: any."""
        segments = self.segments
        chosen = np.ones(len(segments.bundle), bool) if source is None else segments.source == source
        chosen &= True if destination is None else self._reaches(destination)
        chosen &= True if via is None else segments.landing == via
        rows = np.flatnonzero(chosen)
        if destination is not None:  # first the transfers from sources
            rows = rows[np.argsort(segments.landing[rows] != destination, kind="stable")]
        transfers = (transfer for row in rows for transfer in self._transfers(int(row), destination))
        return tuple(transfer for transfer in transfers if via in (None, transfer.via))

    def _reaches(self, destination: int) -> np.ndarray:
        segments = self.segments
        groups = np.searchsorted(segments.first, np.flatnonzero(segments.members == destination), side="right") - 1
        return np.isin(segments.group, groups)

    def _transfers(self, row: int, destination: int | None) -> Iterator[Transfer]:
        """Yields the transfers of one segment, to one destination or to all of its group."""
        segments = self.segments
        bundle = self.bundles[segments.bundle[row]]
        source, landing = int(segments.source[row]), int(segments.landing[row])
        first, end = segments.first[segments.group[row] :][:2]
        members = segments.members[first:end].tolist() if destination is None else [destination]
        boxes = list(bundle.boxes(int(segments.begin[row]), int(segments.end[row])))
        sources = [self._sources.around(source, box)[0].part(box) for box in boxes]
        for member in members:
            for box, placement in zip(boxes, sources, strict=True):
                taken = self._destinations.around(member, box, bundle.dtype)[bundle.copy].part(box)
                yield Transfer(source, placement, member, taken, None if member == landing else landing)


class _Placements:
    """The placements of each holder, by box. Each class of holders has one index, which is made when it is first needed
    and is not pickled."""

    def __init__(self, classes: Sequence[HolderClass]) -> None:
        self._manifests = tuple(of_class.manifest for of_class in classes)
        self._class_of = {member: index for index, of_class in enumerate(classes) for member in of_class.members}
        self._located: dict[int, Located] = {}

    def around(self, holder: int, box: Box, dtype: str | None = None) -> list[Placement]:
        """Returns the placements that contain all of a box, in storages of `dtype`; None: of any."""
        index = self._class_of[holder]
        if index not in self._located:
            self._located[index] = Located(self._manifests[index])
        return self._located[index].around(box, dtype)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_located": {}}


# --- which source sends, and which destination passes on --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Delivery:
    """A whole bundle from these sources, each of which sends a part of it, to these destinations on one node."""

    bundle: int
    senders: Holders
    receivers: Holders
    link: Link


def _segments(bundles: Sequence[Bundle], topology: Topology) -> Segments:
    deliveries = _deliveries(bundles, topology)
    rows: list[tuple[int, int, int, int, int, int]] = []
    groups: dict[Holders, int] = {}
    for link in ("device", "node", "network"):
        of_link = [delivery for delivery in deliveries if delivery.link == link]
        # In the order of nodes, so that a source has few peers.
        of_link.sort(key=lambda delivery: (delivery.senders, delivery.receivers, delivery.bundle))
        sending = _lines((delivery.senders, bundles[delivery.bundle].bytes) for delivery in of_link)
        landing = _lines((delivery.receivers, bundles[delivery.bundle].bytes) for delivery in of_link)
        for delivery in of_link:
            bundle = bundles[delivery.bundle]
            group = groups.setdefault(delivery.receivers, len(groups))
            senders = sending[delivery.senders].take(bundle.bytes)
            receivers = landing[delivery.receivers].take(bundle.bytes)
            for begin, end, source, receiver in _cut(bundle, senders, receivers):
                rows.append((delivery.bundle, begin, end, source, receiver, group))
    bundle_of, begins, ends, source_of, landing_of, group_of = np.array(rows, np.int64).reshape(-1, 6).T
    members = np.array([member for receivers in groups for member in receivers], np.int64)
    first = np.array([0, *accumulate(map(len, groups))], np.int64)
    return Segments(bundle_of, begins, ends, source_of, landing_of, group_of, members, first)


def _cut(
    bundle: Bundle, senders: Sequence[tuple[int, int]], receivers: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, int, int, int]]:
    """Yields parts of the bundle with one sender and one receiver each: first byte, end, sender, receiver."""
    begin = sender = receiver = 0
    while begin < bundle.bytes:
        (until, source), (other, landing) = senders[sender], receivers[receiver]
        end = bundle.cut(min(until, other))
        if begin < end:
            yield begin, end, source, landing
            begin = end
        sender += until <= other
        receiver += other <= until


def _deliveries(bundles: Sequence[Bundle], topology: Topology) -> list[_Delivery]:
    deliveries = []
    holders_on: dict[Holders, dict[str, Holders]] = {}
    wanted_on: dict[Holders, dict[str, Holders]] = {}
    for index, bundle in enumerate(bundles):
        if bundle.holders not in holders_on:
            holders_on[bundle.holders] = _by_node(bundle.holders, topology.sources)
        if bundle.wanted_by not in wanted_on:
            wanted_on[bundle.wanted_by] = _by_node(bundle.wanted_by, topology.destinations)
        for node, receivers in wanted_on[bundle.wanted_by].items():
            near = holders_on[bundle.holders].get(node)
            if near is None:
                deliveries.append(_Delivery(index, bundle.holders, receivers, "network"))
                continue
            for receiver in receivers:
                place = topology.destinations[receiver]
                local = next((source for source in near if topology.sources[source].link_to(place) == "device"), None)
                senders = near if local is None else (local,)
                deliveries.append(_Delivery(index, senders, (receiver,), "node" if local is None else "device"))
    return deliveries


def _by_node(indices: Holders, places: Sequence[Place]) -> dict[str, Holders]:
    on: dict[str, list[int]] = defaultdict(list)
    for index in indices:
        on[places[index].node].append(index)
    return {node: tuple(of_node) for node, of_node in on.items()}


class _Line:
    """All bytes that one set of holders shares, as a line in which each holder has one part."""

    def __init__(self, holders: Holders, shares: Iterable[int]) -> None:
        self._edges = list(accumulate(shares))
        self._holders = holders
        self._at = self._index = 0

    def take(self, size: int) -> list[tuple[int, int]]:
        """Returns the holders of the next `size` bytes, each with the offset at which its part ends."""
        begin, first = self._at, self._index
        self._at += size
        self._index = bisect_left(self._edges, self._at, first)  # the holder of the last byte
        ends = [*(edge - begin for edge in self._edges[first : self._index]), size]
        return list(zip(ends, self._holders[first:], strict=False))


def _lines(demands: Iterable[tuple[Holders, int]]) -> dict[Holders, _Line]:
    total: dict[Holders, int] = defaultdict(int)
    for holders, size in demands:
        total[holders] += size
    return {holders: _Line(holders, shares.tolist()) for holders, shares in even_shares(total).items()}


# --- even loads -------------------------------------------------------------------------------------------------------


def even_shares(demands: Mapping[Holders, int]) -> dict[Holders, np.ndarray]:
    """Returns the bytes that each holder of a set carries: int64 [holders of the set], which sum to the set's demand.
    The busiest holder carries as little as possible.

    Set after set, holders are filled to a common level on top of what they carry for other sets. This descends on the
    sum of squared loads, at whose minimum the largest load is smallest. It ends when that load is within GAP of
    `least_load`, a lower bound that does not depend on how the shares were found.
    """
    order = sorted(
        (holders for holders, demand in demands.items() if demand), key=lambda holders: (len(holders), holders)
    )
    members = [np.array(holders) for holders in order]
    shares = [np.zeros(len(holders)) for holders in order]
    loads = np.zeros(max((holder for holders in order for holder in holders), default=-1) + 1)
    for sweep in range(SWEEPS):
        before = loads.copy()
        for index, holders in enumerate(order):
            of_set = members[index]
            loads[of_set] -= shares[index]
            shares[index] = _fill(loads[of_set], demands[holders])
            loads[of_set] += shares[index]
        moved, largest = np.abs(loads - before).max(initial=0.0), loads.max(initial=0.0)
        if sweep and moved <= GAP * largest and largest <= (1 + GAP) * least_load(demands, loads):
            break
    whole = {holders: _whole_bytes(share, demands[holders]) for holders, share in zip(order, shares, strict=True)}
    return whole | {holders: np.zeros(len(holders), np.int64) for holders in demands if holders not in whole}


def least_load(demands: Mapping[Holders, int], loads: np.ndarray) -> float:
    """Returns a lower bound on the largest load, for any sharing.

    The holders of a group must carry among themselves the bytes that only they have. The groups tried are the k busiest
    holders, for every k; at the optimum the bound is exact for one of them.
    """
    place = np.empty(len(loads), np.int64)
    place[np.argsort(-loads, kind="stable")] = np.arange(len(loads))
    within = np.zeros(len(loads))
    for holders, demand in demands.items():
        if demand:
            within[place[list(holders)].max()] += demand
    return float((np.cumsum(within) / np.arange(1, len(loads) + 1)).max(initial=0.0))


def _fill(levels: np.ndarray, amount: float) -> np.ndarray:
    """Returns the amounts to add to these levels, `amount` in all: every level that is raised ends at the same one."""
    order = np.sort(levels)
    # With the k lowest filled, the common level is (amount + their sum) / k: right for the first k for which it is not
    # above the next level.
    reached = (amount + np.cumsum(order)) / np.arange(1, len(order) + 1)
    right = np.flatnonzero(reached[:-1] <= order[1:])
    return np.maximum(reached[right[0] if len(right) else -1] - levels, 0.0)


def _whole_bytes(share: np.ndarray, demand: int) -> np.ndarray:
    """Returns the shares rounded to whole bytes, int64, which still add up to the demand."""
    edges = np.round(np.cumsum(share) * (demand / share.sum())).astype(np.int64)
    edges[-1] = demand
    return np.diff(edges, prepend=0)

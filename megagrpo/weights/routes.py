"""The transfers of a plan: as a list, or as a few numbers from which one rank's part is written out when it asks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Protocol

import numpy as np

from megagrpo.weights.boxes import ITEM_BYTES, Box, Manifest, Placement
from megagrpo.weights.bundles import Bundle, HolderClass
from megagrpo.weights.coverage import Located

STRAIGHT = -1
"""In place of who passes bytes on: nobody, they come from the source itself."""


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


@dataclass(frozen=True)
class Flows:
    """Bytes by who sends, who receives and who passes on, or STRAIGHT. int64 arrays of equal length; pairs repeat."""

    source: np.ndarray
    destination: np.ndarray
    via: np.ndarray
    bytes: np.ndarray


class Routes(Protocol):
    """Every transfer of a plan, found by its ends."""

    def find(
        self, source: int | None = None, destination: int | None = None, via: int | None = None
    ) -> tuple[Transfer, ...]:
        """Those with all of the ends that are given, at least one. Between two ends the order is always the same.

        `via` is who passes them on, or STRAIGHT.
        """
        ...

    def flows(self) -> Flows: ...


class Listed:
    """Routes as a list of transfers."""

    def __init__(self, destinations: Sequence[Manifest], transfers: Iterable[Transfer]) -> None:
        self._dtypes = [{name: its.dtype for name, its in manifest.storages.items()} for manifest in destinations]
        self._transfers = tuple(transfers)

    @cached_property
    def _by_end(self) -> dict[tuple[str, int | None], list[Transfer]]:
        found: dict[tuple[str, int | None], list[Transfer]] = defaultdict(list)
        for transfer in self._transfers:
            found["source", transfer.source].append(transfer)
            found["destination", transfer.destination].append(transfer)
            found["via", STRAIGHT if transfer.via is None else transfer.via].append(transfer)
        return found

    def find(
        self, source: int | None = None, destination: int | None = None, via: int | None = None
    ) -> tuple[Transfer, ...]:
        ends = [("source", source), ("destination", destination), ("via", via)]
        of_ends = [self._by_end.get((end, index), []) for end, index in ends if index is not None]
        return tuple(
            transfer
            for transfer in min(of_ends, key=len)
            if source in (None, transfer.source)
            and destination in (None, transfer.destination)
            and via in (None, STRAIGHT if transfer.via is None else transfer.via)
        )

    def flows(self) -> Flows:
        rows = [
            (
                transfer.source,
                transfer.destination,
                STRAIGHT if transfer.via is None else transfer.via,
                transfer.box.elements
                * ITEM_BYTES[self._dtypes[transfer.destination][transfer.destination_placement.storage]],
            )
            for transfer in self._transfers
        ]
        return Flows(*np.array(rows, np.int64).reshape(-1, 4).T)


@dataclass(frozen=True)
class Segments:
    """Runs of bundles: bytes begin .. end of `bundle` go from `source` to `landing`, who passes them on to the others
    of `group`. int64 arrays of equal length; group g is members[first[g]:first[g + 1]].
    """

    bundle: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    source: np.ndarray
    landing: np.ndarray
    group: np.ndarray
    members: np.ndarray
    first: np.ndarray

    @classmethod
    def of(cls, rows: Sequence[tuple[int, ...]], groups: Iterable[tuple[int, ...]]) -> Segments:
        """From rows of (bundle, begin, end, source, landing, group)."""
        each = list(groups)
        members = np.array([member for one in each for member in one], np.int64)
        first = np.array([0, *accumulate(len(one) for one in each)], np.int64)
        bundle, begin, end, source, landing, group = np.array(rows, np.int64).reshape(-1, 6).T
        return cls(bundle, begin, end, source, landing, group, members, first)

    def group_members(self, group: int) -> np.ndarray:
        return self.members[self.first[group] : self.first[group + 1]]

    def groups_with(self, member: int) -> np.ndarray:
        return np.searchsorted(self.first, np.flatnonzero(self.members == member), side="right") - 1


class Stamped:
    """Routes as segments of bundles; transfers are written out for the ends that are asked for, and not kept."""

    def __init__(
        self,
        bundles: Sequence[Bundle],
        segments: Segments,
        sources: Sequence[HolderClass],
        destinations: Sequence[HolderClass],
    ) -> None:
        self._bundles, self._segments = tuple(bundles), segments
        self._sources, self._destinations = _Placements(sources), _Placements(destinations)

    def find(
        self, source: int | None = None, destination: int | None = None, via: int | None = None
    ) -> tuple[Transfer, ...]:
        segments = self._segments
        chosen = np.ones(len(segments.bundle), bool)
        if source is not None:
            chosen &= segments.source == source
        if destination is not None:
            chosen &= np.isin(segments.group, segments.groups_with(destination))
        if via == STRAIGHT and destination is not None:
            chosen &= segments.landing == destination
        elif via is not None and via != STRAIGHT:
            chosen &= segments.landing == via
        rows = np.flatnonzero(chosen)
        if destination is not None:  # what comes straight before what others pass on
            rows = rows[np.argsort(segments.landing[rows] != destination, kind="stable")]
        return tuple(transfer for row in rows for transfer in self._transfers(int(row), destination, via))

    def _transfers(self, row: int, destination: int | None, via: int | None) -> Iterator[Transfer]:
        """The transfers of one segment to one destination or to all, straight or passed on by `via` or both."""
        segments = self._segments
        bundle = self._bundles[segments.bundle[row]]
        source, landing = int(segments.source[row]), int(segments.landing[row])
        if destination is not None:
            members = [destination]
        else:
            members = [landing] if via == STRAIGHT else segments.group_members(segments.group[row]).tolist()
        boxes = list(bundle.boxes(int(segments.begin[row]), int(segments.end[row])))
        come = [self._sources.around(source, box)[0].part(box) for box in boxes]
        for member in members:
            if via == member == landing:
                continue
            for box, placement in zip(boxes, come, strict=True):
                into = self._destinations.around(member, box, bundle.dtype)[bundle.copy].part(box)
                yield Transfer(source, placement, member, into, None if member == landing else landing)

    def flows(self) -> Flows:
        segments = self._segments
        sizes = np.diff(segments.first)[segments.group]
        ends = np.cumsum(sizes)
        within_group = np.arange(sizes.sum()) - np.repeat(ends - sizes, sizes)
        destination = segments.members[np.repeat(segments.first[segments.group], sizes) + within_group]
        landing = np.repeat(segments.landing, sizes)
        return Flows(
            np.repeat(segments.source, sizes),
            destination,
            np.where(landing == destination, STRAIGHT, landing),
            np.repeat(segments.end - segments.begin, sizes),
        )


class _Placements:
    """Where a holder has a box. One index for each class of holders, made when it is first needed, and not pickled."""

    def __init__(self, classes: Sequence[HolderClass]) -> None:
        self._manifests = tuple(of_class.manifest for of_class in classes)
        self._class_of = {member: index for index, of_class in enumerate(classes) for member in of_class.members}
        self._located: dict[int, Located] = {}

    def around(self, holder: int, box: Box, dtype: str | None = None) -> list[Placement]:
        """The placements that have all of a box: all of them, or those in storages of one dtype."""
        index = self._class_of[holder]
        if index not in self._located:
            self._located[index] = Located(self._manifests[index])
        storages, found = self._manifests[index].storages, self._located[index].around(box)
        return [its for its in found if dtype in (None, storages[its.storage].dtype)]

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_located": {}}

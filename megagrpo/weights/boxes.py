"""The common coordinates: every weight, wherever it lies, is boxes in the tensors of the Hugging Face checkpoint."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Literal

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
"""Bytes of one element, by the dtype of its storage."""


@dataclass(frozen=True, slots=True)
class Box:
    """An axis-aligned block of one checkpoint tensor: elements start[i] .. start[i] + shape[i] on axis i."""

    tensor: str
    start: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.start) != len(self.shape) or min(self.start, default=0) < 0 or min(self.shape, default=1) < 1:
            raise ValueError(f"not a box: {self.tensor} start {self.start} shape {self.shape}")

    @property
    def elements(self) -> int:
        return prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """Returns the common part of two boxes, or None."""
        if self.tensor != other.tensor:
            return None
        start = tuple(map(max, self.start, other.start))
        end = (min(a + n, b + m) for a, n, b, m in zip(self.start, self.shape, other.start, other.shape, strict=True))
        shape = tuple(e - s for s, e in zip(start, end, strict=True))
        return Box(self.tensor, start, shape) if min(shape, default=1) > 0 else None

    def pieces(self, elements: int) -> Iterator[Box]:
        """Yields the box in parts of at most this many elements: whole rows, or parts of a row that is too long."""
        if self.elements <= max(1, elements):
            yield self
            return
        axis = next(index for index, size in enumerate(self.shape) if size > 1)
        step = max(1, elements // prod(self.shape[axis + 1 :]))
        for low in range(0, self.shape[axis], step):
            start = (*self.start[:axis], self.start[axis] + low, *self.start[axis + 1 :])
            shape = (*self.shape[:axis], min(step, self.shape[axis] - low), *self.shape[axis + 1 :])
            yield from Box(self.tensor, start, shape).pieces(elements)


@dataclass(frozen=True, slots=True)
class Storage:
    """One local tensor of a rank, an engine or a file."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # torch's name without "torch.": float32, bfloat16, …
    folded: int = 0
    """In a file or a loaded model, this axis, counted from the last one as 1, is one with the axis before it: rows or
    columns of several tensors alternate. 0: no axis."""

    @property
    def outer_shape(self) -> tuple[int, ...]:
        """Returns the shape in a file or a loaded model."""
        if not self.folded:
            return self.shape
        *before, size = self.shape[: -self.folded]
        alternating, *behind = self.shape[-self.folded :]
        return (*before, size * alternating, *behind)

    @property
    def bytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


def in_groups(storages: Iterable[Storage], group_bytes: int) -> list[list[Storage]]:
    """Returns the storages in their order, in groups of at most `group_bytes`, but at least one storage each."""
    groups: list[list[Storage]] = []
    left = 0
    for storage in storages:
        if not groups or storage.bytes > left:
            groups.append([])
            left = group_bytes
        groups[-1].append(storage)
        left -= storage.bytes
    return groups


@dataclass(frozen=True, slots=True)
class Placement:
    """The place of a box: in `storage`, from `at`, with local axis i running along box axis `axes[i]`.

    `axes[i]` is None for a local axis of length 1 that the box does not have (the expert index of a 3-D parameter).
    A transposed expert has axes (1, 0).
    """

    storage: str
    at: tuple[int, ...]
    axes: tuple[int | None, ...]
    box: Box

    @classmethod
    def whole(cls, box: Box, storage: str = "") -> Placement:
        """Returns the placement of a whole checkpoint tensor in a storage of its own, by default of the same name."""
        return cls(storage or box.tensor, box.start, tuple(range(len(box.shape))), box)

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(1 if axis is None else self.box.shape[axis] for axis in self.axes)

    def part(self, box: Box) -> Placement:
        """Returns this placement narrowed to `box`, which must lie inside it."""
        at = tuple(
            start if axis is None else start + box.start[axis] - self.box.start[axis]
            for start, axis in zip(self.at, self.axes, strict=True)
        )
        return Placement(self.storage, at, self.axes, box)

    def within(self, region: Box) -> Placement | None:
        """Returns this placement narrowed to a region of its storage; None if they do not overlap."""
        common = Box(region.tensor, self.at, self.local_shape).intersect(region)
        if common is None:
            return None
        local = [self.axes.index(axis) for axis in range(len(self.box.shape))]
        start = (low + common.start[i] - self.at[i] for low, i in zip(self.box.start, local, strict=True))
        return self.part(Box(self.box.tensor, tuple(start), tuple(common.shape[i] for i in local)))


@dataclass(frozen=True, slots=True)
class Fill:
    """Local elements that no box describes, such as vocabulary padding, and the value they hold."""

    storage: str
    at: tuple[int, ...]
    shape: tuple[int, ...]
    value: float = 0.0


@dataclass(frozen=True)
class Manifest:
    """The weights of one holder (a training rank, an engine rank, a directory of files), and their places."""

    holder: str  # "train rank 3", "engine 0 rank 1", "model-00001-of-00002.safetensors"
    storages: Mapping[str, Storage]
    placements: tuple[Placement, ...]
    fills: tuple[Fill, ...] = ()

    def renamed(self, name_of: Callable[[str], str]) -> Manifest:
        """Returns the same manifest with other names of storages."""
        storages = {name_of(name): replace(its, name=name_of(name)) for name, its in self.storages.items()}
        placements = tuple(replace(its, storage=name_of(its.storage)) for its in self.placements)
        return Manifest(
            self.holder, storages, placements, tuple(replace(its, storage=name_of(its.storage)) for its in self.fills)
        )

    def by_storage(self) -> dict[str, list[Placement]]:
        """Returns the placements in each storage, in their order. A storage without any is not among them."""
        placements: dict[str, list[Placement]] = defaultdict(list)
        for placement in self.placements:
            placements[placement.storage].append(placement)
        return dict(placements)


@dataclass(frozen=True)
class HolderClass:
    """Holders with the same storages, placements and fills: their indices, and the first one's manifest."""

    manifest: Manifest
    members: tuple[int, ...]


def classes_of(manifests: Sequence[Manifest]) -> list[HolderClass]:
    """Returns classes of manifests that differ only in their holders' names. Manifests that share objects are compared
    by identity, which is fast, and the others by value."""
    by_identity: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for index, manifest in enumerate(manifests):
        by_identity[id(manifest.storages), id(manifest.placements), id(manifest.fills)].append(index)
    by_value: dict[object, list[int]] = defaultdict(list)
    for members in by_identity.values():
        first = manifests[members[0]]
        by_value[tuple(first.storages.values()), first.placements, first.fills] += members
    return [HolderClass(manifests[min(members)], tuple(sorted(members))) for members in by_value.values()]


@dataclass(frozen=True, slots=True)
class Transfer:
    """A box in a storage of a source and in a storage of a destination; both ends are indices into manifests.

    `via` is a destination on the same node that receives these bytes from the source and passes them on, so that they
    cross the network once for all destinations there. None: the source sends them to the destination itself.
    """

    source: int
    source_placement: Placement
    destination: int
    destination_placement: Placement
    via: int | None = None

    @property
    def box(self) -> Box:
        return self.source_placement.box


Link = Literal["device", "node", "network"]
"""The path of bytes between two places: a device's own memory, a node's inner links, or the network."""


@dataclass(frozen=True, slots=True)
class Place:
    """A node, by a name that is unique in the cluster, and one of its devices. Without a device, none is shared.

    A device is its index on the node, or its UUID where the node's CUDA_VISIBLE_DEVICES has UUIDs.
    """

    node: str
    device: int | str | None = None

    def link_to(self, other: Place) -> Link:
        if self.node != other.node:
            return "network"
        return "device" if self.device is not None and self.device == other.device else "node"


@dataclass(frozen=True)
class Topology:
    """The places of a plan's sources and destinations, in their order.

    With `two_hops`, bytes for a destination on another node go to the source beside the destination, which forwards
    them. That source is on the destination's device, or, where places have no devices, on its node.
    """

    sources: tuple[Place, ...]
    destinations: tuple[Place, ...]
    two_hops: bool = False

    @cached_property
    def local_sources(self) -> tuple[int | None, ...]:
        """Returns the source beside each destination, or None. Without devices, the sources of a node take turns."""
        on: dict[Place, list[int]] = defaultdict(list)
        for source, place in enumerate(self.sources):
            on[place].append(source)
        turns: dict[Place, int] = defaultdict(int)
        nearby: list[int | None] = []
        for place in self.destinations:
            candidates = on.get(place, [])
            nearby.append(candidates[turns[place] % len(candidates)] if candidates else None)
            turns[place] += 1
        return tuple(nearby)

    @property
    def nodes(self) -> set[str]:
        return {place.node for place in (*self.sources, *self.destinations)}

    @property
    def shared_devices(self) -> set[Place]:
        """Returns the devices that several sources or destinations share."""
        counts = Counter(place for place in (*self.sources, *self.destinations) if place.device is not None)
        return {place for place, count in counts.items() if count > 1}

    def forwarder(self, source: int, destination: int) -> int | None:
        """Returns the source that forwards from `source` to a destination; None if `source` sends to it directly."""
        if not self.two_hops or self.sources[source].node == self.destinations[destination].node:
            return None
        return self.local_sources[destination]

    def forwards_to(self, source: int) -> list[int]:
        """Returns the destinations to which a source forwards."""
        return [to for to, its in enumerate(self.local_sources) if its == source] if self.two_hops else []

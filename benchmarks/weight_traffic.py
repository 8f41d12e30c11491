"""The cost of a weight plan before it runs: bytes by rank, device and link, buckets, and seconds beside a gather.

The seconds are predictions: every link runs at the speed given for it, all kinds of link work at the same time, and a
sync lasts as long as the busiest of them. Packing, digests, set-up and congestion inside the network are not in them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from megagrpo.weights.boxes import ITEM_BYTES, Box, Link, Place, Topology, classes_of
from megagrpo.weights.plan import WeightPlan
from megagrpo.weights.planning import Routes

STRAIGHT = -1
"""In place of the destination that passes bytes on: they come from the source itself."""


def topology_of(sources: Iterable[int], destinations: Iterable[int], devices_per_node: int) -> Topology:
    """From device numbers that count through the cluster: number // devices_per_node is the node. Between nodes buckets
    take two hops if there is a source on each destination's device."""
    at, other = (
        tuple(Place(f"node {number // devices_per_node}", number % devices_per_node) for number in numbers)
        for numbers in (sources, destinations)
    )
    return Topology(at, other, two_hops=set(other) <= set(at))


@dataclass(frozen=True)
class Flows:
    """Bytes by source, destination, and the destination that passes them on, or STRAIGHT. int64 arrays of equal length;
    the same ends may occur several times."""

    source: np.ndarray
    destination: np.ndarray
    via: np.ndarray
    bytes: np.ndarray


def flows_of(plan: WeightPlan) -> Flows:
    """The flows of a whole plan, without writing its transfers out."""
    routes = plan.transfers
    if not isinstance(routes, Routes):
        raise TypeError("flows are those of a whole plan, not of a rank's part")
    segments = routes.segments
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


@dataclass(frozen=True)
class LinkSpeeds:
    """Bytes per second of each device, in each direction. The defaults: H100, NVLink, one 400 Gb/s NIC per device."""

    device: float = 1.5e12  # a copy within HBM3: half its bandwidth to read, half to write
    node: float = 450e9
    network: float = 50e9

    def of(self, link: Link) -> float:
        return {"device": self.device, "node": self.node, "network": self.network}[link]


@dataclass(frozen=True)
class LinkBytes:
    """Bytes over one kind of link: int64 [sources] twice, [destinations] twice, and [devices] out and in.

    `forwarded` are the second hops of what came over the network to the source beside its destination. A device's are
    its training rank's and its engine rank's together, where both are on it. `least` is the bytes of the busiest device
    if all devices of each node with engine ranks took in equal parts, and all with training ranks sent equal parts over
    the network.
    """

    sent: np.ndarray
    forwarded: np.ndarray
    passed_on: np.ndarray
    received: np.ndarray
    device_out: np.ndarray
    device_in: np.ndarray
    least: float

    @property
    def total(self) -> int:
        return int(self.received.sum() + self.forwarded.sum())

    @property
    def busiest(self) -> int:
        """The most bytes out of or into any device."""
        return int(max(self.device_out.max(initial=0), self.device_in.max(initial=0)))


@dataclass(frozen=True)
class Traffic:
    """The cost of a plan.

    `buckets` are all of the plan's, `most_buckets` those of the rank that fills the most. `node_network_bytes` are by
    node, out and in. `least_seconds`: of the links' least bytes. A plan keeps what crosses the network at the fewest.
    """

    links: Mapping[Link, LinkBytes]
    node_network_bytes: Mapping[str, tuple[int, int]]
    buckets: int
    most_buckets: int
    seconds: float
    least_seconds: float


@dataclass(frozen=True)
class GatherEverything:
    """A sync without a plan: every training rank gathers every tensor, and every engine rank is sent every tensor.

    Counted in its favour: what is on a node is never sent to it again, all NICs of a node take equal parts of a gather,
    and an engine rank on a training rank's device takes the tensors from there. An engine rank elsewhere gets them by a
    broadcast, which leaves through one NIC and enters each node once.
    """

    network_bytes: int
    seconds: float


def traffic_of(plan: WeightPlan, speeds: LinkSpeeds, bucket_bytes: int) -> Traffic:
    flows, topology = flows_of(plan), plan.topology
    nodes, devices = _Numbers(), _Numbers()
    source_node, source_device = _numbered(topology.sources, "source", nodes, devices)
    other_node, other_device = _numbered(topology.destinations, "destination", nodes, devices)
    straight = flows.via == STRAIGHT
    sender_device = np.where(straight, source_device[flows.source], other_device[flows.via])
    sender_node = np.where(straight, source_node[flows.source], other_node[flows.via])
    receiver_device, receiver_node = other_device[flows.destination], other_node[flows.destination]
    same_node, same_device = sender_node == receiver_node, sender_device == receiver_device
    kinds: dict[Link, np.ndarray] = {"device": same_device, "node": same_node & ~same_device, "network": ~same_node}
    # Those that take two hops: the first to a source, the second from there.
    sources_of = [-1 if source is None else source for source in topology.local_sources]
    local = np.array(sources_of, np.int64)[flows.destination]
    two_hops = ~same_node & straight if topology.two_hops else np.zeros_like(same_node)
    landing_device = np.where(two_hops, source_device[local], receiver_device)
    second: dict[Link, np.ndarray] = {
        "device": two_hops & (landing_device == receiver_device),
        "node": two_hops & (landing_device != receiver_device),
        "network": np.zeros_like(two_hops),
    }

    def sums(chosen: np.ndarray, of: np.ndarray, count: int) -> np.ndarray:
        totals = np.zeros(count, np.int64)
        np.add.at(totals, of[chosen], flows.bytes[chosen])
        return totals

    node_out, node_in = (sums(~same_node, of, len(nodes)) for of in (sender_node, receiver_node))
    of_node = np.unique(np.stack([other_node, other_device]), axis=1)[0]
    takers = np.maximum(np.bincount(of_node, minlength=len(nodes)), 1)
    out_of_sources = float(node_out.sum()) / max(1, len(np.unique(source_device)))
    least: dict[Link, float] = {"network": max(float((node_in / takers).max(initial=0.0)), out_of_sources)}
    for near in ("device", "node"):
        into = sums(kinds[near], receiver_node, len(nodes)) + sums(second[near], receiver_node, len(nodes))
        least[near] = float((into / takers).max(initial=0.0))
    links = {
        link: LinkBytes(
            sent=sums(chosen & straight, flows.source, len(plan.sources)),
            forwarded=sums(second[link], local, len(plan.sources)),
            passed_on=sums(chosen & ~straight, flows.via, len(plan.destinations)),
            received=sums(chosen, flows.destination, len(plan.destinations)),
            device_out=sums(chosen, sender_device, len(devices)) + sums(second[link], landing_device, len(devices)),
            device_in=sums(chosen, landing_device, len(devices)) + sums(second[link], receiver_device, len(devices)),
            least=least[link],
        )
        for link, chosen in kinds.items()
    }
    buckets = _buckets(flows, bucket_bytes, len(plan.sources))
    return Traffic(
        links=links,
        node_network_bytes={name: (int(node_out[node]), int(node_in[node])) for name, node in nodes.items()},
        buckets=int(buckets.sum()),
        most_buckets=int(buckets.max(initial=0)),
        seconds=max(of_link.busiest / speeds.of(link) for link, of_link in links.items()),
        least_seconds=max(of_link.least / speeds.of(link) for link, of_link in links.items()),
    )


def gather_everything(plan: WeightPlan, speeds: LinkSpeeds) -> GatherEverything:
    """Returns what it would cost between the same ranks, in the dtype in which the destinations hold each tensor."""
    item_bytes = {
        placement.box.tensor: ITEM_BYTES[of_class.manifest.storages[placement.storage].dtype]
        for of_class in classes_of(plan.destinations)
        for placement in of_class.manifest.placements
    }
    ends: dict[str, tuple[int, ...]] = {}
    held: dict[int, dict[Box, int]] = {}
    for of_class in classes_of(plan.sources):
        boxes = {placement.box for placement in of_class.manifest.placements if placement.box.tensor in item_bytes}
        for box in boxes:
            end = tuple(start + size for start, size in zip(box.start, box.shape, strict=True))
            ends[box.tensor] = tuple(map(max, ends.get(box.tensor, end), end))
        sizes = {box: box.elements * item_bytes[box.tensor] for box in boxes}
        held |= dict.fromkeys(of_class.members, sizes)
    model_bytes = sum(prod(end) * item_bytes[tensor] for tensor, end in ends.items())

    nodes, devices = _Numbers(), _Numbers()
    source_node, source_device = _numbered(plan.topology.sources, "source", nodes, devices)
    other_node, other_device = _numbered(plan.topology.destinations, "destination", nodes, devices)
    gathered, missing_on_busiest = 0, 0.0
    for node in np.unique(source_node):
        ranks = np.flatnonzero(source_node == node)
        there: dict[Box, int] = {}
        for sizes in {id(held[rank]): held[rank] for rank in ranks.tolist()}.values():
            there |= sizes
        missing = model_bytes - sum(there.values())
        gathered += missing
        missing_on_busiest = max(missing_on_busiest, missing / len(np.unique(source_device[ranks])))
    least_held = min(sum(sizes.values()) for sizes in held.values())
    elsewhere = np.unique(other_node[~np.isin(other_device, source_device)])
    seconds = max(missing_on_busiest / speeds.network, (model_bytes - least_held) / speeds.node)
    seconds += model_bytes / speeds.device
    if len(elsewhere):
        seconds += model_bytes / speeds.network
    return GatherEverything(gathered + model_bytes * len(elsewhere), seconds)


class _Numbers(dict[Any, int]):
    """Things numbered in the order in which they are first asked for."""

    def __missing__(self, key: Any) -> int:
        self[key] = len(self)
        return self[key]


def _numbered(places: Sequence[Place], role: str, nodes: _Numbers, devices: _Numbers) -> tuple[np.ndarray, np.ndarray]:
    """The nodes and the devices of places, as numbers. Without a device, a holder has one of its own."""
    on = [(place.node, (role, index) if place.device is None else place.device) for index, place in enumerate(places)]
    return np.array([nodes[node] for node, _ in on], np.int64), np.array([devices[device] for device in on], np.int64)


def _buckets(flows: Flows, bucket_bytes: int, sources: int) -> np.ndarray:
    """By source, how many buckets it fills, if each is for one destination and as full as can be; then, by their order,
    likewise those that destinations pass on.
    """
    sender = np.where(flows.via == STRAIGHT, flows.source, sources + flows.via)
    receivers = int(flows.destination.max(initial=0)) + 1
    pairs, pair = np.unique(sender * receivers + flows.destination, return_inverse=True)
    of_pair = np.zeros(len(pairs), np.int64)
    np.add.at(of_pair, pair, flows.bytes)
    buckets = np.zeros(sources + receivers, np.int64)
    np.add.at(buckets, pairs // receivers, -(-of_pair // bucket_bytes))
    return buckets

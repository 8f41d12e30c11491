"""Where the holders of weights are: which of them share a device, a node, or only the network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Link = Literal["device", "node", "network"]
"""What bytes cross between two places: nothing but a device's own memory, a node's inner links, or the network."""


@dataclass(frozen=True, slots=True)
class Place:
    """A node, by any name that is unique in the cluster, and one of its devices; None where there is none to share."""

    node: str
    device: int | None = None

    def link_to(self, other: Place) -> Link:
        if self.node != other.node:
            return "network"
        return "device" if self.device is not None and self.device == other.device else "node"


@dataclass(frozen=True)
class Topology:
    """The places of a plan's sources and destinations, in their order."""

    sources: tuple[Place, ...]
    destinations: tuple[Place, ...]

    @classmethod
    def apart(cls, sources: int, destinations: int) -> Topology:
        """Everyone on a node of their own: nothing is near, and nobody passes anything on."""
        return cls(
            tuple(Place(f"source {index}") for index in range(sources)),
            tuple(Place(f"destination {index}") for index in range(destinations)),
        )

    @classmethod
    def of_nodes(cls, sources: Sequence[int], destinations: Sequence[int], devices_per_node: int) -> Topology:
        """From device numbers that count through the cluster: number // devices_per_node is the node."""
        return cls(
            *(
                tuple(Place(f"node {number // devices_per_node}", number % devices_per_node) for number in numbers)
                for numbers in (sources, destinations)
            )
        )

    def link(self, source: int, destination: int) -> Link:
        return self.sources[source].link_to(self.destinations[destination])

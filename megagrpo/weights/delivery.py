"""Who sends what to whom: every bundle to every node that wants it, the load spread over those that hold it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from megagrpo.weights.balance import Holders, even_shares
from megagrpo.weights.bundles import Bundle
from megagrpo.weights.routes import Segments
from megagrpo.weights.topology import Link, Place, Topology


@dataclass(frozen=True, slots=True)
class _Delivery:
    """A whole bundle from these sources, each a part of it, to these destinations on one node."""

    bundle: int
    senders: Holders
    receivers: Holders
    link: Link


def deliver(bundles: Sequence[Bundle], topology: Topology) -> Segments:
    """Chooses sources, and where a bundle lands on a node that it reaches over the network.

    A destination takes what a source on its own device has from there, and what one on its node has from those on
    the node. The rest comes over the network, once for all destinations of a node that want the same: each of them is
    where a part lands, and passes it on to the others. Sources share what they all hold evenly, over the network and
    within nodes by itself; destinations share evenly what they all want.
    """
    deliveries = _deliveries(bundles, topology)
    rows: list[tuple[int, int, int, int, int, int]] = []
    groups: dict[Holders, int] = {}
    for link in ("device", "node", "network"):
        of_link = [delivery for delivery in deliveries if delivery.link == link]
        # Node by node, so that a source has few to talk to.
        of_link.sort(key=lambda delivery: (delivery.senders, delivery.receivers, delivery.bundle))
        sending = _lines((delivery.senders, bundles[delivery.bundle].bytes) for delivery in of_link)
        landing = _lines((delivery.receivers, bundles[delivery.bundle].bytes) for delivery in of_link)
        for delivery in of_link:
            bundle = bundles[delivery.bundle]
            group = groups.setdefault(delivery.receivers, len(groups))
            senders = sending[delivery.senders].take(bundle.bytes)
            receivers = landing[delivery.receivers].take(bundle.bytes)
            for begin, end, source, receiver in _both(bundle, senders, receivers):
                rows.append((delivery.bundle, begin, end, source, receiver, group))
    return Segments.of(rows, groups)


def _both(
    bundle: Bundle, senders: Sequence[tuple[int, int]], receivers: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, int, int, int]]:
    """Runs of the bundle, begin and end, each with one sender and one receiver of it."""
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
    found = []
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
                found.append(_Delivery(index, bundle.holders, receivers, "network"))
                continue
            for receiver in receivers:
                own = next((source for source in near if topology.link(source, receiver) == "device"), None)
                senders = near if own is None else (own,)
                found.append(_Delivery(index, senders, (receiver,), "node" if own is None else "device"))
    return found


def _by_node(indices: Holders, places: Sequence[Place]) -> dict[str, Holders]:
    on: dict[str, list[int]] = defaultdict(list)
    for index in indices:
        on[places[index].node].append(index)
    return {node: tuple(of_node) for node, of_node in on.items()}


class _Line:
    """All that one set of holders shares, as a line of bytes of which each holder has a run."""

    def __init__(self, holders: Holders, shares: Iterable[int]) -> None:
        self._edges = list(accumulate(shares))
        self._holders = holders
        self._at = self._index = 0

    def take(self, size: int) -> list[tuple[int, int]]:
        """The next `size` bytes: who has them, each up to an offset."""
        begin, pieces = self._at, []
        self._at += size
        while self._edges[self._index] < self._at:
            pieces.append((self._edges[self._index] - begin, self._holders[self._index]))
            self._index += 1
        return [*pieces, (size, self._holders[self._index])]


def _lines(demands: Iterable[tuple[Holders, int]]) -> dict[Holders, _Line]:
    total: dict[Holders, int] = defaultdict(int)
    for holders, size in demands:
        total[holders] += size
    return {holders: _Line(holders, shares.tolist()) for holders, shares in even_shares(total).items()}

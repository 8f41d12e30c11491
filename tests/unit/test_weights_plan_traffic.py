"""The predicted cost of a plan, against its transfers counted one by one and against sums done by hand."""

from __future__ import annotations

import pickle
from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings

from benchmarks.weight_traffic import LinkSpeeds, gather_everything, topology_of, traffic_of
from megagrpo.layout.parallel import ParallelLayout, rank_grid
from megagrpo.recipe.schema import EngineLayoutConfig
from megagrpo.weights.boxes import Box, Manifest, Place, Placement, Storage, Topology
from megagrpo.weights.families.architecture import Experts
from megagrpo.weights.plan import WeightPlan, make_plan
from megagrpo.weights.sides import sglang
from megagrpo.weights.sides.megatron_rank import LOCAL_SPEC
from tests.unit.test_weights_plan_topology import Cluster, clusters
from tests.weight_streams import all_transfers
from tests.weights_oracle import moe_architecture

SPEEDS = LinkSpeeds(device=1000.0, node=100.0, network=10.0)


@settings(max_examples=15)
@given(cluster=clusters())
def test_bytes_by_link_are_those_of_the_transfers(cluster: Cluster) -> None:
    plan = cluster.plan
    traffic = traffic_of(plan, SPEEDS, 1 << 30)
    sent, received, passed_on = Counter(), Counter(), Counter()
    out, into = Counter(), Counter()
    nodes = defaultdict(lambda: [0, 0])
    pairs = set()
    for transfer in all_transfers(plan):
        to, size = plan.topology.destinations[transfer.destination], plan.bytes_of(transfer)
        if transfer.via is None:
            come = plan.topology.sources[transfer.source]
            sent[come.link_to(to), transfer.source] += size
            pairs.add(("source", transfer.source, transfer.destination))
        else:
            come = plan.topology.destinations[transfer.via]
            passed_on[come.link_to(to), transfer.via] += size
            pairs.add(("destination", transfer.via, transfer.destination))
        link = come.link_to(to)
        received[link, transfer.destination] += size
        out[link, come] += size
        into[link, to] += size
        if link == "network":
            nodes[come.node][0] += size
            nodes[to.node][1] += size
    for link, found in traffic.links.items():
        assert found.sent.tolist() == [sent[link, index] for index in range(len(plan.sources))]
        assert found.received.tolist() == [received[link, index] for index in range(len(plan.destinations))]
        assert found.passed_on.tolist() == [passed_on[link, index] for index in range(len(plan.destinations))]
        most = [size for (of, _), size in (out | into).items() if of == link]
        assert found.busiest == max(most, default=0)
        assert found.total == sum(size for (of, _), size in into.items() if of == link)
    assert {node: size for node, size in traffic.node_network_bytes.items() if any(size)} == {
        node: tuple(size) for node, size in nodes.items()
    }
    assert traffic.buckets == len(pairs)
    links = traffic.links
    assert traffic.seconds == max(
        links["device"].busiest / 1000, links["node"].busiest / 100, links["network"].busiest / 10
    )
    assert links["network"].total == 0 or 0 < traffic.least_seconds <= traffic.seconds


def test_sums_by_hand() -> None:
    """A matrix of 800 bytes on two ranks of one node; two engine ranks of another node want all of it."""

    def holder(name: str) -> Manifest:
        box = Box("w", (0, 0), (20, 10))
        return Manifest(name, {"w": Storage("w", (20, 10), "float32")}, (Placement("w", (0, 0), (0, 1), box),))

    topology = Topology(
        (Place("a", 0), Place("a", 1)),
        (Place("b", 0), Place("b", 1)),
    )
    plan = make_plan([holder("x"), holder("y")], [holder("u"), holder("v")], topology)
    traffic = traffic_of(plan, SPEEDS, bucket_bytes=150)
    network, node = traffic.links["network"], traffic.links["node"]
    assert network.sent.tolist() == network.received.tolist() == [400, 400]  # each half leaves once and arrives once
    assert node.passed_on.tolist() == node.received.tolist() == [400, 400]  # and is passed on
    assert traffic.node_network_bytes == {"a": (800, 0), "b": (0, 800)}
    assert traffic.seconds == traffic.least_seconds == 40.0
    assert traffic.buckets == 4 * 3
    assert traffic.most_buckets == 3
    gathered = gather_everything(plan, SPEEDS)
    assert gathered.network_bytes == 800  # nothing to gather; one broadcast
    assert gathered.seconds == pytest.approx(800 / 10 + 800 / 1000)


def plan_of(ranks: int, layers: int, experts: int = 8) -> WeightPlan:
    arch = moe_architecture(layers=layers, heads=8, vocab=256, hidden=64, experts=Experts(experts, 2, 32, True))
    layout, engine = (
        ParallelLayout(tensor=2, pipeline=2, data=ranks // 4, expert=8),
        EngineLayoutConfig(tensor=4, expert=4),
    )
    sources = [LOCAL_SPEC.manifest(arch, layout, where, "bfloat16") for where in rank_grid(layout)]
    destinations = [
        sglang.manifest(arch, engine, rank, "bfloat16", "cuda", index)
        for index in range(ranks // 4)
        for rank in range(4)
    ]
    return make_plan(sources, destinations, topology_of(range(ranks), range(ranks, 2 * ranks), 8))


def test_a_plan_grows_with_the_nodes_and_not_with_layers_or_experts() -> None:
    """Kinds of tensors and classes of ranks: a deeper model is the same plan with more names in it."""

    def size(plan: WeightPlan) -> tuple[int, int]:
        return len(plan.transfers.bundles), len(plan.transfers.segments.bundle)

    small = size(plan_of(32, 2))
    deep, wide = size(plan_of(32, 16)), size(plan_of(32, 2, experts=64))
    assert deep[0] == wide[0] == small[0]
    assert max(deep[1], wide[1]) < 1.5 * small[1]
    many = size(plan_of(128, 2))
    assert many[0] == small[0]
    assert many[1] < 6 * small[1]


def test_a_rank_takes_a_part_that_is_its_share() -> None:
    plan = plan_of(64, 16)
    whole = len(pickle.dumps(plan))
    for part in (plan.part_for_source(3), plan.part_for_destination(5)):
        assert len(pickle.dumps(part)) < whole / 8
    assert plan.part_for_source(3).sources[3] == plan.sources[3]

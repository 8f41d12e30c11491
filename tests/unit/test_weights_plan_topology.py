"""Plans over nodes and devices: against whole tensors, maximum flows, and transfers counted one by one."""

from __future__ import annotations

import pickle
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.weight_traffic import LinkSpeeds, gather_everything, topology_of, traffic_of
from megagrpo.errors import WeightPlanError
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.weights.boxes import ITEM_BYTES, Box, Manifest, Place, Placement, Storage, Topology, Transfer
from megagrpo.weights.coverage import Located
from megagrpo.weights.families import tensors_of
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.plan import ListedTransfers, WeightPlan, make_plan, plan_problems
from megagrpo.weights.planning import Holders, even_shares, least_load
from megagrpo.weights.transport.buckets import Bucket, destination_peer, incoming, label_of, outgoing
from megagrpo.weights.views import torch_dtype
from tests.unit.test_weights_plan import architectures, inside, layouts
from tests.weight_streams import Case, all_transfers, carry_out
from tests.weights_oracle import Tensors, moe_architecture, random_checkpoint

# --- random clusters --------------------------------------------------------------------------------------------------


@st.composite
def clusters(draw: st.DrawFn) -> Case:
    """Training ranks and engines somewhere in a cluster."""
    arch, layout = draw(architectures()), draw(layouts())
    each = draw(st.sampled_from([1, 2, 4]))
    expert, engines = draw(st.sampled_from([1, each])) if arch.experts else 1, draw(st.integers(1, 3))
    first = draw(st.integers(0, layout.ranks))  # 0: colocated, in the middle: some are, at the end: none
    on_node = draw(st.sampled_from([1, 2, 4]))
    return in_cluster(Case(arch, layout, each, engines, expert), first, on_node)


def in_cluster(case: Case, first: int, on_node: int) -> Case:
    """Training ranks on GPUs 0, 1, ..., and ranks of engines on GPUs `first`, `first` + 1, ..., `on_node` each node."""
    engine_ranks = range(first, first + case.engines * case.tensor)
    return replace(case, device="cuda", topology=topology_of(range(case.layout.ranks), engine_ranks, on_node))


# --- what arrives -----------------------------------------------------------------------------------------------------


def right(case: Case, arrived: Sequence[Tensors], checkpoint: Tensors) -> bool:
    expected = [case.served(checkpoint, rank) for rank in range(case.tensor)]
    return all(
        torch.equal(tensors[name], tensor)
        for index, tensors in enumerate(arrived)
        for name, tensor in expected[index % case.tensor].items()
    )


@settings(max_examples=25)
@given(case=clusters())
def test_engine_ranks_receive_what_they_need_each_byte_once(case: Case) -> None:
    plan, checkpoint = case.plan(), random_checkpoint(case.arch)
    assert not plan_problems(plan)
    assert right(case, carry_out(plan, case.held(checkpoint)), checkpoint)
    for index, manifest in enumerate(plan.destinations):
        received = sum(transfer.box.elements for transfer in plan.incoming(index))
        assert received == sum(placement.box.elements for placement in manifest.placements)


@settings(max_examples=15)
@given(case=clusters(), data=st.data())
def test_both_ends_and_the_totals_see_the_same_transfers(case: Case, data: st.DataObject) -> None:
    plan = case.plan()
    everything = all_transfers(plan)
    sources, destinations = range(len(plan.sources)), range(len(plan.destinations))
    assert sorted(map(repr, everything)) == sorted(repr(t) for source in sources for t in plan.outgoing(source))
    source = data.draw(st.sampled_from(sources))
    part = plan.part_for_source(source)
    assert part.destinations_of(source) == plan.destinations_of(source)
    assert plan.destinations_of(source) == sorted({t.destination for t in plan.outgoing(source) if t.via is None})
    via, destination = data.draw(st.sampled_from(destinations)), data.draw(st.sampled_from(destinations))
    of_via, of_destination = plan.part_for_destination(via), plan.part_for_destination(destination)
    assert of_destination.incoming(destination) == plan.incoming(destination)
    between = tuple(t for t in plan.outgoing(source) if t.destination == destination and t.via is None)
    for its in (plan, part, of_destination):
        assert its.direct(source, destination) == between
        assert [its.bytes_of(transfer) for transfer in between] == [4 * transfer.box.elements for transfer in between]
    relays = tuple(t for t in plan.incoming(destination) if t.via == via)
    for its in (plan, of_via):
        assert tuple(t for t in its.passed_on(via) if t.destination == destination) == relays
    assert tuple(t for t in of_destination.incoming(destination) if t.via == via) == relays
    assert pickle.loads(pickle.dumps(plan)).incoming(destination) == plan.incoming(destination)


def test_a_box_in_two_storages_and_in_two_dtypes_is_written_in_each() -> None:
    """A tied head with a storage of its own, and engine ranks that keep the same tensor in different dtypes."""
    box = Box("w", (0, 0), (7, 5))

    def holder(name: str, **dtypes: str) -> Manifest:
        storages = {storage: Storage(storage, (7, 5), dtype) for storage, dtype in dtypes.items()}
        return Manifest(name, storages, tuple(Placement(storage, (0, 0), (0, 1), box) for storage in storages))

    sources = [holder(f"train rank {index}", w="float32") for index in range(2)]
    both = [holder(f"engine 0 rank {index}", embedding="bfloat16", head="bfloat16") for index in range(2)]
    destinations = [*both, holder("engine 1 rank 0", w="float32"), holder("engine 1 rank 1", w="bfloat16", x="float32")]
    plan = make_plan(sources, destinations, topology_of([0, 1], [4, 5, 6, 7], 4))
    assert not plan_problems(plan)
    whole = torch.arange(35, dtype=torch.float32).reshape(7, 5) + 1 / 3
    for manifest, tensors in zip(destinations, carry_out(plan, [{"w": whole}] * 2), strict=True):
        for name, storage in manifest.storages.items():
            assert torch.equal(tensors[name], whole.to(torch_dtype(storage.dtype)))
    received = [sum(map(plan.bytes_of, plan.incoming(index))) for index in range(4)]
    assert received == [140, 140, 140, 70 + 140]


def test_places_of_others_are_refused() -> None:
    plan = apart()[0].plan()
    with pytest.raises(WeightPlanError, match="3 places of sources"):
        make_plan(plan.sources, plan.destinations, topology_of(range(3), range(4), 4))


# --- even loads -------------------------------------------------------------------------------------------------------

SETS = st.frozensets(st.integers(0, 9), min_size=1, max_size=6).map(lambda found: tuple(sorted(found)))
DEMANDS = st.dictionaries(SETS, st.integers(0, 100_000), min_size=1, max_size=12)


def loads_of(shares: Mapping[Holders, np.ndarray]) -> np.ndarray:
    loads = np.zeros(64, np.int64)
    for holders, share in shares.items():
        loads[list(holders)] += share
    return loads


def optimum(demands: Mapping[Holders, int]) -> float:
    """The smallest largest load for which the flow from the sets through their holders carries every demand."""
    low, high = 0.0, float(sum(demands.values()))
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        graph = nx.DiGraph()
        graph.add_nodes_from(["from", "to"])
        for holders, demand in demands.items():
            graph.add_edge("from", holders, capacity=demand)
            for holder in holders:
                graph.add_edge(holders, holder)
                graph.add_edge(holder, "to", capacity=middle)
        enough = nx.maximum_flow_value(graph, "from", "to") >= sum(demands.values()) * (1 - 1e-9)
        low, high = (low, middle) if enough else (middle, high)
    return high


@settings(max_examples=40)
@given(demands=DEMANDS)
def test_the_largest_load_is_the_smallest_possible(demands: dict[Holders, int]) -> None:
    shares = even_shares(demands)
    assert all((share >= 0).all() and share.sum() == demands[holders] for holders, share in shares.items())
    assert shares.keys() == demands.keys()
    best = optimum(demands)
    assert loads_of(shares).max() <= 1.02 * best + len(demands)
    assert least_load(demands, loads_of(shares)[:10].astype(float)) <= 1.001 * best  # a bound, never above


def test_a_chain_of_neighbours_is_levelled_to_its_ends() -> None:
    """The hardest kind: what the first holder has too much of must move through all others."""
    demands = {(index, index + 1): 2000 for index in range(30)} | {(0,): 2000}
    loads = loads_of(even_shares(demands))[:31]
    assert loads.max() <= 1.02 * 2000


# --- what crosses the network, and from which source ------------------------------------------------------------------


def painted(manifests: Sequence[Manifest], arch: Architecture) -> list[dict[str, np.ndarray]]:
    """By manifest and checkpoint tensor, which of the tensor's elements it has."""
    found = []
    for manifest in manifests:
        has = {tensor.name: np.zeros(tensor.shape, bool) for tensor in tensors_of(arch)}
        for placement in manifest.placements:
            has[placement.box.tensor][inside(placement.box)] = True
        found.append(has)
    return found


@settings(max_examples=25)
@given(case=clusters())
def test_each_byte_crosses_the_network_once_for_each_node_that_needs_it(case: Case) -> None:
    plan, arch = case.plan(), case.arch
    held, wanted = painted(plan.sources, arch), painted(plan.destinations, arch)
    places = plan.topology
    crossed = defaultdict(lambda: {tensor.name: np.zeros(tensor.shape, int) for tensor in tensors_of(arch)})
    for transfer in all_transfers(plan):
        node, device = places.destinations[transfer.destination].node, places.destinations[transfer.destination].device
        source = places.sources[transfer.source]
        if transfer.via is not None:
            assert places.destinations[transfer.via].node == node
        elif source.node != node:
            crossed[node][transfer.box.tensor][inside(transfer.box)] += 1
        elif source.device != device:  # not if a source on the destination's own device has it
            own = [i for i, place in enumerate(places.sources) if place == Place(node, device)]
            assert not any(held[i][transfer.box.tensor][inside(transfer.box)].any() for i in own)
    for node in {place.node for place in places.destinations}:
        for tensor in tensors_of(arch):
            near = [has[tensor.name] for has, place in zip(held, places.sources, strict=True) if place.node == node]
            need = [has[tensor.name] for has, to in zip(wanted, places.destinations, strict=True) if to.node == node]
            expected = np.logical_or.reduce(need) & ~np.logical_or.reduce([*near, np.zeros(tensor.shape, bool)])
            assert (crossed[node][tensor.name] == expected).all(), (node, tensor.name)


def least_egress(case: Case) -> float:
    """The smallest possible largest egress, by maximum flow: element by element, from painted tensors."""
    plan, arch = case.plan(), case.arch
    held, wanted = painted(plan.sources, arch), painted(plan.destinations, arch)
    sources, destinations = plan.topology.sources, plan.topology.destinations
    demands: dict[Holders, int] = defaultdict(int)
    for node in {place.node for place in destinations}:
        for tensor in tensors_of(arch):
            holders = np.zeros(tensor.shape, np.int64)  # as bits
            for index, has in enumerate(held):
                holders |= has[tensor.name].astype(np.int64) << index
            near = sum(1 << index for index, place in enumerate(sources) if place.node == node)
            need = [has[tensor.name] for has, place in zip(wanted, destinations, strict=True) if place.node == node]
            over_network = np.logical_or.reduce(need) & (holders & near == 0)
            for mask, count in zip(*np.unique(holders[over_network], return_counts=True), strict=True):
                ranks = tuple(index for index in range(len(sources)) if mask >> index & 1)
                demands[ranks] += 4 * int(count)
    return optimum(demands)


def egress(plan: WeightPlan) -> list[int]:
    """Bytes that each source sends over the network."""
    sent = [0] * len(plan.sources)
    for transfer in all_transfers(plan):
        to = plan.topology.destinations[transfer.destination]
        if transfer.via is None and plan.topology.sources[transfer.source].link_to(to) == "network":
            sent[transfer.source] += plan.bytes_of(transfer)
    return sent


@settings(max_examples=25)
@given(case=clusters())
def test_no_source_sends_a_tenth_more_than_the_optimum(case: Case) -> None:
    """Up to one row of the widest tensor: rows are not cut."""
    widest = 4 * max(tensor.shape[-1] for tensor in tensors_of(case.arch))
    assert max(egress(case.plan())) <= 1.1 * least_egress(case) + widest


# --- controls: plans that are not right are seen ----------------------------------------------------------------------


@cache
def apart() -> tuple[Case, Tensors]:
    """Four training ranks on one node, an engine of four on another: all comes over the network, norms once."""
    arch = moe_architecture(heads=8, vocab=130)
    return in_cluster(Case(arch, ParallelLayout(tensor=2, data=2), 4), 4, 4), random_checkpoint(arch)


def changed(plan: WeightPlan, old: Sequence[Transfer], new: Sequence[Transfer]) -> WeightPlan:
    kept = [transfer for transfer in all_transfers(plan) if transfer not in old]
    return replace(plan, transfers=ListedTransfers([*kept, *new]))


def not_passed_on(plan: WeightPlan) -> list[Transfer]:
    passed_on = {transfer.box for transfer in all_transfers(plan) if transfer.via is not None}
    return [transfer for transfer in all_transfers(plan) if transfer.box not in passed_on]


def problems_of(plan: WeightPlan) -> str:
    return "\n".join(map(str, plan_problems(plan)))


def test_swapped_transfers_are_refused_and_arrive_wrong() -> None:
    case, checkpoint = apart()
    whole, held = case.plan(), case.held(checkpoint)
    by_shape = defaultdict(list)
    for transfer in not_passed_on(whole):
        by_shape[transfer.box.shape].append(transfer)
    pairs = [(of_shape[0], of_shape[-1]) for of_shape in by_shape.values() if of_shape[0].box != of_shape[-1].box]
    assert len(pairs) > 3
    for one, other in pairs:
        ends = [(one, other), (other, one)]
        swapped = [replace(a, source=b.source, source_placement=b.source_placement) for a, b in ends]
        assert "the same box at both ends" in problems_of(changed(whole, [one, other], swapped))
        lies = [
            replace(transfer, source_placement=replace(b.source_placement, box=a.box))
            for transfer, (a, b) in zip(swapped, ends, strict=True)
        ]
        plan = changed(whole, [one, other], lies)
        assert "is not there in" in problems_of(plan)
        assert not right(case, carry_out(plan, held), checkpoint)


def test_what_is_passed_on_before_it_arrives_is_refused_and_arrives_wrong() -> None:
    case, checkpoint = apart()
    plan, held = case.plan(), case.held(checkpoint)
    relay = next(transfer for transfer in all_transfers(plan) if transfer.via is not None)
    assert not right(case, carry_out(plan, held, relays_first=True), checkpoint)
    [straight] = [its for its in plan.direct(relay.source, relay.via) if its.box == relay.box]
    late = changed(plan, [straight], [replace(straight, via=relay.destination)])  # each waits for the other
    assert "does not receive" in problems_of(late)
    others = set(range(4)) - {relay.destination, relay.via}
    chain = changed(plan, [relay], [replace(relay, via=next(iter(others)))])  # by one to whom it is passed on itself
    assert "does not receive" in problems_of(chain)
    elsewhere = replace(plan.topology, destinations=tuple(Place(f"node {index}") for index in range(4)))
    assert "another destination on the same node" in problems_of(replace(plan, topology=elsewhere))
    with pytest.raises(WeightPlanError, match="does not receive"):
        late.part_for_destination(relay.destination)


def test_taking_everything_from_the_first_holder_sends_too_much() -> None:
    case, _ = apart()
    plan, taken = case.plan(), []
    for transfer in all_transfers(plan):
        index, held = next((i, held) for i, held in enumerate(map(Located, plan.sources)) if held.around(transfer.box))
        come = held.around(transfer.box)[0].part(transfer.box)
        taken.append(replace(transfer, source=index, source_placement=come))
    greedy = replace(plan, transfers=ListedTransfers(taken))
    assert not plan_problems(greedy)
    assert max(egress(greedy)) > 1.5 * least_egress(case)


# --- costs ------------------------------------------------------------------------------------------------------------

SPEEDS = LinkSpeeds(device=1000.0, node=100.0, network=10.0)


@settings(max_examples=15)
@given(case=clusters())
def test_predicted_bytes_by_link_are_those_of_the_transfers(case: Case) -> None:
    plan = case.plan()
    traffic = traffic_of(plan, SPEEDS, 1 << 30)
    links = traffic.links
    counted: Counter[tuple[object, ...]] = Counter()
    nodes: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    pairs = set()
    for transfer in all_transfers(plan):
        to, size = plan.topology.destinations[transfer.destination], plan.bytes_of(transfer)
        if transfer.via is None:
            come, sender = plan.topology.sources[transfer.source], ("sent", transfer.source)
        else:
            come, sender = plan.topology.destinations[transfer.via], ("passed_on", transfer.via)
        pairs.add((sender, transfer.destination))
        link = come.link_to(to)
        landing = to
        if (
            transfer.via is None
            and (forwarder := plan.topology.forwarder(transfer.source, transfer.destination)) is not None
        ):
            landing = plan.topology.sources[forwarder]
            second = landing.link_to(to)
            for key in (("forwarded", forwarder), ("out of", landing), ("into", to)):
                counted[second, *key] += size
        for key in (sender, ("received", transfer.destination), ("out of", come), ("into", landing)):
            counted[link, *key] += size
        if link == "network":
            nodes[come.node][0] += size
            nodes[to.node][1] += size
    for link, found in links.items():
        ends = {
            "sent": plan.sources,
            "forwarded": plan.sources,
            "received": plan.destinations,
            "passed_on": plan.destinations,
        }
        for what, of in ends.items():
            assert getattr(found, what).tolist() == [counted[link, what, index] for index in range(len(of))]
        places = [size for (of, what, _), size in counted.items() if of == link and what in ("out of", "into")]
        assert found.busiest == max(places, default=0)
        assert found.total == found.received.sum() + found.forwarded.sum()
    assert {node: list(size) for node, size in traffic.node_network_bytes.items() if any(size)} == nodes
    assert traffic.buckets == len(pairs)
    assert traffic.seconds == max(links[link].busiest / getattr(SPEEDS, link) for link in links)
    assert links["network"].total == 0 or 0 < traffic.least_seconds <= traffic.seconds


def test_costs_computed_by_hand() -> None:
    """A matrix of 800 bytes on two ranks of one node; two engine ranks of another node want all of it."""
    box = Box("w", (0, 0), (20, 10))
    storages, placements = {"w": Storage("w", (20, 10), "float32")}, (Placement("w", (0, 0), (0, 1), box),)
    x, y, u, v = (Manifest(name, storages, placements) for name in "xyuv")
    sources, destinations = ((Place(node, 0), Place(node, 1)) for node in "ab")
    plan = make_plan([x, y], [u, v], Topology(sources, destinations))
    traffic = traffic_of(plan, SPEEDS, bucket_bytes=150)
    network, node = traffic.links["network"], traffic.links["node"]
    assert network.sent.tolist() == network.received.tolist() == [400, 400]  # each half leaves once and arrives once
    assert node.passed_on.tolist() == node.received.tolist() == [400, 400]  # and is passed on
    assert traffic.node_network_bytes == {"a": (800, 0), "b": (0, 800)}
    assert traffic.seconds == traffic.least_seconds == 40.0
    assert (traffic.buckets, traffic.most_buckets) == (4 * 3, 3)
    gathered = gather_everything(plan, SPEEDS)
    assert gathered.network_bytes == 800  # nothing to gather; one broadcast
    assert gathered.seconds == pytest.approx(800 / 10 + 800 / 1000)


def plan_of(ranks: int, layers: int, experts: int = 8) -> WeightPlan:
    arch = moe_architecture(layers=layers, heads=8, vocab=256, hidden=64, experts=experts, expert_ffn=32)
    layout = ParallelLayout(tensor=2, pipeline=2, data=ranks // 4, expert=8)
    return in_cluster(Case(arch, layout, 4, ranks // 4, 4, "bfloat16"), ranks, 8).plan()


def test_a_plan_grows_with_the_nodes_and_not_with_layers_or_experts() -> None:
    """Kinds of tensors and classes of ranks: a deeper model is the same plan with more names in it."""

    def size(plan: WeightPlan) -> tuple[int, int]:
        return len(plan.transfers.bundles), len(plan.transfers.segments.bundle)

    small, deep, wide = size(plan_of(32, 2)), size(plan_of(32, 16)), size(plan_of(32, 2, experts=64))
    many = size(plan_of(128, 2))
    assert small[0] == deep[0] == wide[0] == many[0]
    assert max(deep[1], wide[1]) < 1.5 * small[1]
    assert many[1] < 6 * small[1]


def test_a_rank_takes_a_part_that_is_its_share() -> None:
    plan = plan_of(64, 16)
    whole = len(pickle.dumps(plan))
    for part in (plan.part_for_source(3), plan.part_for_destination(5)):
        assert len(pickle.dumps(part)) < whole / 8
    assert plan.part_for_source(3).sources[3] == plan.sources[3]


# --- buckets: no process, no bytes ------------------------------------------------------------------------------------


@settings(max_examples=12)
@given(case=clusters(), bucket_bytes=st.sampled_from([139, 4001, 1 << 20]), data=st.data())
def test_both_ends_see_the_same_buckets_and_every_element_travels_once(
    case: Case, bucket_bytes: int, data: st.DataObject
) -> None:
    """Each end from its own part of the plan, with any of the engine ranks taking part."""
    plan = case.plan()
    everyone = range(len(plan.destinations))
    active = frozenset(data.draw(st.sets(st.sampled_from(everyone), min_size=1)))
    sent: dict[int, dict[tuple[int, int], Bucket]] = defaultdict(dict)
    peers = [(source, plan.part_for_source(source)) for source in range(len(plan.sources))]
    peers += [(len(plan.sources) + index, plan.part_for_destination(index)) for index in sorted(active)]
    for peer, part in peers:
        for bucket in outgoing(part, peer, active, bucket_bytes):
            assert bucket.sender == peer
            assert bucket.bytes <= max(bucket_bytes, ITEM_BYTES[case.dtype])
            assert (peer, bucket.number) not in sent[bucket.receiver]
            sent[bucket.receiver][peer, bucket.number] = bucket
    for index in active:
        peer = destination_peer(plan, index)
        part = plan.part_for_destination(index)
        awaited = {(b.sender, b.number): b for b in incoming(part, peer, active, bucket_bytes)}
        assert awaited.keys() == sent[peer].keys()
        written = 0
        for key, bucket in awaited.items():
            ours, theirs = bucket.pieces, sent[peer][key].pieces
            assert [(p.destination, p.begin, p.end) for p in ours] == [(p.destination, p.begin, p.end) for p in theirs]
            assert all(one.end <= other.begin for one, other in pairwise(ours))
            assert label_of(part, bucket) == label_of(plan, sent[peer][key])
            written += sum(piece.destination.box.elements for piece in ours)
        assert written == sum(placement.box.elements for placement in plan.destinations[index].placements)

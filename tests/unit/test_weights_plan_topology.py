"""Plans over nodes and devices, against whole tensors, element by element; and loads, against a maximum flow."""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.weight_traffic import topology_of
from megagrpo.errors import WeightPlanError
from megagrpo.layout.parallel import ParallelLayout, rank_grid
from megagrpo.recipe.schema import EngineLayoutConfig
from megagrpo.weights.boxes import Box, Manifest, Place, Placement, Storage, Transfer
from megagrpo.weights.coverage import Located
from megagrpo.weights.families import tensors_of
from megagrpo.weights.families.architecture import Architecture, Experts
from megagrpo.weights.plan import ListedTransfers, WeightPlan, make_plan, plan_problems
from megagrpo.weights.planning.routes import Holders, even_shares, least_load
from megagrpo.weights.sides import sglang
from megagrpo.weights.sides.megatron_rank import LOCAL_SPEC
from megagrpo.weights.views import box_view, torch_dtype
from tests.weight_streams import all_transfers, empty
from tests.weights_oracle import (
    Tensors,
    architecture,
    engine_tensors,
    moe_architecture,
    random_checkpoint,
    rank_tensors,
)

# --- random clusters --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cluster:
    """Training ranks and engines somewhere in a cluster, and the plan between them."""

    arch: Architecture
    layout: ParallelLayout
    engine: EngineLayoutConfig
    plan: WeightPlan


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    tensor, pipeline = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2]))
    changes = {"heads": 8, "query_groups": draw(st.sampled_from([1, 2, 4])), "head_dim": 6}
    changes |= {"vocab": draw(st.integers(60, 200)), "hidden": 20, "ffn": 36}
    moe = draw(st.booleans())
    data = draw(st.sampled_from([1, 2, 3]))
    layout = ParallelLayout(
        tensor=tensor,
        pipeline=pipeline,
        virtual_pipeline=draw(st.sampled_from([1, 2])) if pipeline > 1 else 1,
        data=data,
        expert=draw(st.sampled_from([1, 2])) if moe and (tensor * data) % 2 == 0 else 1,
    )
    if moe and tensor * data % (layout.expert * 2) == 0:
        layout = replace(layout, expert_tensor=draw(st.sampled_from([1, 2])))
    if moe:
        arch = moe_architecture(**changes, experts=Experts(4, 2, 12, True))
    else:
        arch = architecture(**changes, tied_embeddings=draw(st.booleans()))
    engine_tensor = draw(st.sampled_from([1, 2, 4]))
    engine = EngineLayoutConfig(tensor=engine_tensor, expert=draw(st.sampled_from([1, engine_tensor])) if moe else 1)
    engines = draw(st.integers(1, 3))
    sources = [LOCAL_SPEC.manifest(arch, layout, where, "float32") for where in rank_grid(layout)]
    destinations = [
        sglang.manifest(arch, engine, rank, "float32", "cuda", index)
        for index in range(engines)
        for rank in range(engine.tensor)
    ]
    first = draw(st.integers(0, len(sources)))  # 0: colocated, in the middle: some are, at the end: none
    topology = topology_of(
        range(len(sources)), range(first, first + len(destinations)), draw(st.sampled_from([1, 2, 4]))
    )
    return Cluster(arch, layout, engine, make_plan(sources, destinations, topology))


def where(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(box.start, box.shape, strict=True))


# --- what arrives -----------------------------------------------------------------------------------------------------


def carried_out(plan: WeightPlan, held: Sequence[Tensors], relays_first: bool = False) -> list[Tensors]:
    """What the destinations hold once the sources have sent, and then the destinations have passed on what they got."""
    arrived = [empty(manifest, padded=True) for manifest in plan.destinations]
    for transfer in sorted(all_transfers(plan), key=lambda transfer: (transfer.via is None) == relays_first):
        into = transfer.destination_placement
        target = box_view(arrived[transfer.destination][into.storage], into)
        if transfer.via is None:
            come = transfer.source_placement
            target.copy_(box_view(held[transfer.source][come.storage], come))
        else:
            own = next(
                own.destination_placement
                for own in plan.between(transfer.source, transfer.via)
                if own.box == transfer.box and plan.bytes_of(own) == plan.bytes_of(transfer)
            )
            target.copy_(box_view(arrived[transfer.via][own.storage], own))
    return arrived


def right(cluster: Cluster, arrived: Sequence[Tensors], checkpoint: Tensors) -> bool:
    for index, tensors in enumerate(arrived):
        rank = index % cluster.engine.tensor
        expected = engine_tensors(cluster.arch, cluster.engine.tensor, cluster.engine.expert, rank, "cuda", checkpoint)
        if not all(torch.equal(tensors[name], expected[name]) for name in expected):
            return False
    return True


def held_by_ranks(cluster: Cluster, checkpoint: Tensors) -> list[Tensors]:
    return [rank_tensors(cluster.arch, cluster.layout, rank, checkpoint) for rank in rank_grid(cluster.layout)]


@settings(max_examples=25)
@given(cluster=clusters())
def test_engine_ranks_receive_what_they_need_each_byte_once(cluster: Cluster) -> None:
    plan, checkpoint = cluster.plan, random_checkpoint(cluster.arch)
    assert not plan_problems(plan)
    assert right(cluster, carried_out(plan, held_by_ranks(cluster, checkpoint)), checkpoint)
    for index, manifest in enumerate(plan.destinations):
        written = {name: np.zeros(storage.shape, int) for name, storage in manifest.storages.items()}
        for transfer in plan.incoming(index):
            into = transfer.destination_placement
            ends = zip(into.at, into.local_shape, strict=True)
            written[into.storage][tuple(slice(at, at + size) for at, size in ends)] += 1
        for fill in manifest.fills:
            ends = zip(fill.at, fill.shape, strict=True)
            written[fill.storage][tuple(slice(at, at + size) for at, size in ends)] += 1
        assert all((count == 1).all() for count in written.values())


@settings(max_examples=15)
@given(cluster=clusters(), data=st.data())
def test_both_ends_and_the_totals_see_the_same_transfers(cluster: Cluster, data: st.DataObject) -> None:
    plan = cluster.plan
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
        assert its.between(source, destination) == between
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
    for manifest, tensors in zip(destinations, carried_out(plan, [{"w": whole}] * 2), strict=True):
        for name, storage in manifest.storages.items():
            assert torch.equal(tensors[name], whole.to(torch_dtype(storage.dtype)))
    received = [sum(map(plan.bytes_of, plan.incoming(index))) for index in range(4)]
    assert received == [140, 140, 140, 70 + 140]


def test_places_of_others_are_refused() -> None:
    cluster, _ = apart()
    with pytest.raises(WeightPlanError, match="3 places of sources"):
        make_plan(cluster.plan.sources, cluster.plan.destinations, topology_of(range(3), range(4), 4))


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
    demands = {(index, index + 1): 1000 for index in range(30)} | {(0,): 30_000}
    loads = loads_of(even_shares(demands))[:31]
    assert loads[0] == 30_000  # cannot be less
    demands = {(index, index + 1): 2000 for index in range(30)} | {(0,): 2000}
    loads = loads_of(even_shares(demands))[:31]
    assert loads.max() <= 1.02 * 2000


def test_replicas_share_evenly_also_where_another_rank_is_the_bottleneck() -> None:
    shares = even_shares({(0,): 1000, (1, 2, 3, 4): 400})
    assert shares[1, 2, 3, 4].tolist() == [100, 100, 100, 100]


# --- what crosses the network, and from which source ------------------------------------------------------------------


def painted(manifests: Sequence[Manifest], arch: Architecture) -> list[dict[str, np.ndarray]]:
    """By manifest and checkpoint tensor, which of the tensor's elements it has."""
    found = []
    for manifest in manifests:
        has = {tensor.name: np.zeros(tensor.shape, bool) for tensor in tensors_of(arch)}
        for placement in manifest.placements:
            has[placement.box.tensor][where(placement.box)] = True
        found.append(has)
    return found


@settings(max_examples=25)
@given(cluster=clusters())
def test_each_byte_crosses_the_network_once_for_each_node_that_needs_it(cluster: Cluster) -> None:
    plan, arch = cluster.plan, cluster.arch
    held, wanted = painted(plan.sources, arch), painted(plan.destinations, arch)
    places = plan.topology
    crossed = defaultdict(lambda: {tensor.name: np.zeros(tensor.shape, int) for tensor in tensors_of(arch)})
    for transfer in all_transfers(plan):
        node, device = places.destinations[transfer.destination].node, places.destinations[transfer.destination].device
        source = places.sources[transfer.source]
        if transfer.via is not None:
            assert places.destinations[transfer.via].node == node
        elif source.node != node:
            crossed[node][transfer.box.tensor][where(transfer.box)] += 1
        elif source.device != device:  # not if a source on the destination's own device has it
            own = [i for i, place in enumerate(places.sources) if place == Place(node, device)]
            assert not any(held[i][transfer.box.tensor][where(transfer.box)].any() for i in own)
    for node in {place.node for place in places.destinations}:
        for tensor in tensors_of(arch):
            near = [has[tensor.name] for has, place in zip(held, places.sources, strict=True) if place.node == node]
            need = [has[tensor.name] for has, to in zip(wanted, places.destinations, strict=True) if to.node == node]
            expected = np.logical_or.reduce(need) & ~np.logical_or.reduce([*near, np.zeros(tensor.shape, bool)])
            assert (crossed[node][tensor.name] == expected).all(), (node, tensor.name)


def least_egress(cluster: Cluster) -> float:
    """The smallest possible largest egress, by maximum flow: element by element, from painted tensors."""
    plan, arch = cluster.plan, cluster.arch
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
@given(cluster=clusters())
def test_no_source_sends_a_tenth_more_than_the_optimum(cluster: Cluster) -> None:
    """Up to one row of the widest tensor: rows are not cut."""
    assert max(egress(cluster.plan)) <= 1.1 * least_egress(cluster) + 4 * cluster.arch.ffn


# --- controls: plans that are not right are seen ----------------------------------------------------------------------


@cache
def apart() -> tuple[Cluster, Tensors]:
    """Four training ranks on one node, an engine of four on another: all comes over the network, norms once."""
    arch, layout, engine = (
        moe_architecture(heads=8, vocab=130),
        ParallelLayout(tensor=2, data=2),
        EngineLayoutConfig(tensor=4),
    )
    sources = [LOCAL_SPEC.manifest(arch, layout, rank, "float32") for rank in rank_grid(layout)]
    destinations = [sglang.manifest(arch, engine, rank, "float32", "cuda") for rank in range(4)]
    topology = topology_of(range(4), range(4, 8), 4)
    return Cluster(arch, layout, engine, make_plan(sources, destinations, topology)), random_checkpoint(arch)


def changed(plan: WeightPlan, old: Sequence[Transfer], new: Sequence[Transfer]) -> WeightPlan:
    kept = [transfer for transfer in all_transfers(plan) if transfer not in old]
    return replace(plan, transfers=ListedTransfers([*kept, *new]))


def not_passed_on(plan: WeightPlan) -> list[Transfer]:
    passed_on = {transfer.box for transfer in all_transfers(plan) if transfer.via is not None}
    return [transfer for transfer in all_transfers(plan) if transfer.box not in passed_on]


def problems_of(plan: WeightPlan) -> str:
    return "\n".join(map(str, plan_problems(plan)))


def test_a_dropped_transfer_is_refused_and_leaves_a_hole() -> None:
    cluster, checkpoint = apart()
    held = held_by_ranks(cluster, checkpoint)
    assert right(cluster, carried_out(cluster.plan, held), checkpoint)
    for transfer in all_transfers(cluster.plan)[::17]:
        assert "elements are missing" in problems_of(changed(cluster.plan, [transfer], []))
    for transfer in not_passed_on(cluster.plan)[::29]:
        assert not right(cluster, carried_out(changed(cluster.plan, [transfer], []), held), checkpoint)


def test_swapped_transfers_are_refused_and_arrive_wrong() -> None:
    cluster, checkpoint = apart()
    held = held_by_ranks(cluster, checkpoint)
    by_shape = defaultdict(list)
    for transfer in not_passed_on(cluster.plan):
        by_shape[transfer.box.shape].append(transfer)
    pairs = [(of_shape[0], of_shape[-1]) for of_shape in by_shape.values() if of_shape[0].box != of_shape[-1].box]
    assert len(pairs) > 3
    for one, other in pairs:
        ends = [(one, other), (other, one)]
        swapped = [replace(a, source=b.source, source_placement=b.source_placement) for a, b in ends]
        plan = changed(cluster.plan, [one, other], swapped)
        assert "the same box at both ends" in problems_of(plan)
        assert not right(cluster, carried_out(plan, held), checkpoint)
        lies = [
            replace(transfer, source_placement=replace(b.source_placement, box=a.box))
            for transfer, (a, b) in zip(swapped, ends, strict=True)
        ]
        assert "is not there in" in problems_of(changed(cluster.plan, [one, other], lies))


def test_what_is_passed_on_before_it_arrives_is_refused_and_arrives_wrong() -> None:
    cluster, checkpoint = apart()
    plan, held = cluster.plan, held_by_ranks(cluster, checkpoint)
    relay = next(transfer for transfer in all_transfers(plan) if transfer.via is not None)
    assert not right(cluster, carried_out(plan, held, relays_first=True), checkpoint)
    [straight] = [its for its in plan.between(relay.source, relay.via) if its.box == relay.box]
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
    cluster, _ = apart()
    taken = []
    for transfer in all_transfers(cluster.plan):
        has = [index for index, held in enumerate(cluster.plan.sources) if Located(held).around(transfer.box)]
        come = Located(cluster.plan.sources[has[0]]).around(transfer.box)[0].part(transfer.box)
        taken.append(replace(transfer, source=has[0], source_placement=come))
    greedy = replace(cluster.plan, transfers=ListedTransfers(taken))
    assert not plan_problems(greedy)
    assert max(egress(greedy)) > 1.5 * least_egress(cluster)
    assert max(egress(cluster.plan)) <= 1.1 * least_egress(cluster)

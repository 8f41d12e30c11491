"""Collectives of a training pass and of a weight sync: which links they cross, and how many bytes."""

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.weight_traffic import LinkSpeeds, topology_of, traffic_of
from megagrpo.layout.parallel import ParallelLayout, rank_grid
from megagrpo.plan.assumptions import Assumptions
from megagrpo.plan.case import Case, Gpu, Machines
from megagrpo.plan.communication import Links, RankGroup, exchange, gather, groups_of, sync_bytes
from megagrpo.plan.memory import mapping_processes
from megagrpo.plan.training_time import Products, TrainingRanks, context_exchange
from megagrpo.recipe.schema import EngineLayoutConfig, TrainConfig
from megagrpo.weights.blocks import prepare
from megagrpo.weights.families import architecture_of
from megagrpo.weights.plan import make_plan
from megagrpo.weights.sides import sglang
from megagrpo.weights.sides.megatron_rank import TE_SPEC
from tests.plans import DEEPSEEK, H100, LLAMA_70B, known_model, merged, recipe
from tests.weight_streams import pairs

FAST = Links(node=400e9, network=40e9, node_latency=0.0, network_latency=0.0)
BYTES = Machines(Gpu("a byte a second", 2**40, 1.0, 1.0, 1.0, (9, 0), "none"), 8, 1.0)
EXACT = Assumptions(node_efficiency=1.0, network_efficiency=1.0, collective_seconds=0.0, network_collective_seconds=0.0)
"""With BYTES, seconds are the bytes that leave the busiest GPU over its slowest link."""
CONFIG = {
    "model_type": "qwen3", "num_hidden_layers": 8, "hidden_size": 256, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 32, "vocab_size": 1024, "max_position_embeddings": 4096,
    "intermediate_size": 512,
}  # fmt: skip
DENSE = architecture_of(CONFIG)
EXPERTS = {"model_type": "qwen3_moe", "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 128}
MIXTURE = architecture_of(CONFIG | EXPERTS)
DEEPSEEK_V3 = known_model(DEEPSEEK)
DENSE_LAYER, SPARSE_LAYER = DEEPSEEK_V3.kinds
SMALL_EXPERTS = replace(SPARSE_LAYER, mlp=replace(SPARSE_LAYER.mlp, experts=16, ffn=256))
LATENT = replace(DEEPSEEK_V3, layers=(SMALL_EXPERTS,) * 4, vocab=16384)
"""Attention is most of it."""
EIGHT_GROUPS = EngineLayoutConfig(tensor=16, expert=16, attention_data=8)

powers = st.sampled_from([1, 2, 4, 8])


@given(tensor=powers, context=powers, data=powers, pipeline=st.sampled_from([1, 2]), expert=powers, node=powers)
def test_groups_lie_on_nodes_as_ranks_are_numbered(tensor, context, data, pipeline, expert, node):
    layout = ParallelLayout(tensor, pipeline, 1, context, min(expert, tensor * context * data), 1, data)
    grid = rank_grid(layout)
    groups = groups_of(layout, node)

    def on_node(members):
        """Ranks of the group of rank 0 on each node that it touches."""
        counts = Counter(member.rank // node for member in members)
        assert len(set(counts.values())) == 1
        return RankGroup(len(members), counts[0])

    first = [rank for rank in grid if rank.pipeline == 0]
    dense = [rank for rank in first if rank.tensor == 0]
    assert groups["tensor"] == on_node([rank for rank in first if (rank.context, rank.data) == (0, 0)])
    assert groups["context"] == on_node([rank for rank in dense if rank.data == 0])
    assert groups["data"] == on_node(dense)
    assert groups["experts"] == on_node([rank for rank in first if rank.expert_data == 0])
    assert groups["data of experts"] == on_node([rank for rank in first if rank.expert == 0])


def test_a_ring_enters_each_node_once_and_an_exchange_sends_to_everyone_alike():
    assert gather(RankGroup(8, 8), 8e9, 1, FAST) == pytest.approx(7e9 / 400e9)
    assert gather(RankGroup(16, 8), 16e9, 2, FAST) == pytest.approx(2 * max(15e9 / 400e9, 15e9 / 8 / 40e9))
    assert gather(RankGroup(16, 1), 16e9, 1, FAST) == pytest.approx(15e9 / 40e9)
    assert exchange(RankGroup(4, 4), 4e9, 1, FAST) == pytest.approx(3e9 / 400e9)
    assert exchange(RankGroup(16, 8), 16e9, 1, FAST) == pytest.approx(8e9 / 40e9)
    slow = Links(1.0, 1.0, 1.0, 1.0)
    assert gather(RankGroup(1, 1), 1e9, 5, slow) == exchange(RankGroup(1, 1), 1e9, 5, slow) == 0


def ranks(arch, layout, machines=BYTES, **train):
    of = merged(train={"total_steps": 1, "layout": layout, **train})
    return TrainingRanks(Case(of, arch, machines, EXACT))


def bytes_of(arch, layout, forward=1, backward=1, **train):
    """Bytes of a layer's collectives in a pass of 8,192 tokens in four microbatches of bfloat16."""
    over = Products(forward=forward, backward=backward)
    return ranks(arch, layout, **train).layer_exchanges(arch.layers[-1], over, 8192.0, 4)


def test_tensor_ranks_gather_and_scatter_hidden_states():
    once = bytes_of(DENSE, {"tensor": 4}, 1, 0)["tensor"]
    # All of the pass's hidden states, less the rank's own quarter: gathered and scattered around attention and MLP.
    assert once == pytest.approx(4 * 8192 * 256 * 2 * 3 / 4)
    assert bytes_of(DENSE, {"tensor": 4})["tensor"] == pytest.approx(once * 10 / 4)
    assert bytes_of(DENSE, {"tensor": 4}, 2, 1)["tensor"] == pytest.approx(once * 14 / 4)
    experts = bytes_of(MIXTURE, {"tensor": 4, "expert": 4, "expert_tensor": 1}, 1, 0)
    assert experts["tensor"] == pytest.approx(once / 2)


def test_context_ranks_get_all_keys_and_values_or_swap_heads():
    layout = {"context": 4}
    gathered = bytes_of(DENSE, layout, 1, 0, layer_spec="local")["context"]
    assert gathered == pytest.approx(8192 * 2 * 8 * 32 * 2 * 3 / 4)
    swapped = bytes_of(DENSE, layout, 1, 0, megatron={"cp_comm_type": "a2a"})["context"]
    # Queries, keys, values and outputs of the rank's quarter of all tokens, three quarters of them to others.
    assert swapped == pytest.approx(8192 / 4 * (2 * 16 + 2 * 8) * 32 * 2 * 3 / 4)
    narrow = architecture_of(CONFIG | {"num_key_value_heads": 2})
    found = bytes_of(narrow, {"tensor": 4, "context": 2}, 1, 0)["context"]
    assert found == pytest.approx(8192 * 2 * 1 * 32 * 2 / 2)  # one head of keys and one of values on each rank


@pytest.mark.parametrize(
    ("train", "passes"),
    [
        ({}, 3),  # forward keys and values; backward they come again, and their gradients go back
        ({"layer_spec": "local"}, 2),  # local layers keep what they gathered
        ({"recompute": "selective"}, 4),  # what attention's core exchanges, it exchanges again
        ({"recompute": "full"}, 4),
        ({"layer_spec": "local", "recompute": "selective"}, 3),
    ],
)
def test_context_ranks_exchange_keys_as_often_as_cores_are_computed(train, passes):
    once = bytes_of(DENSE, {"context": 4}, 1, 0)["context"]
    forward = 2 if train.get("recompute") == "full" else 1
    assert bytes_of(DENSE, {"context": 4}, forward, 1, **train)["context"] == pytest.approx(passes * once)


def test_the_context_exchange_is_what_megatron_is_told():
    def kind(**train):
        return context_exchange(TrainConfig(total_steps=1, **train))

    assert kind() == "p2p"
    assert kind(layer_spec="local") == "all_gather"
    assert kind(megatron={"cp_comm_type": ["a2a", "a2a"]}) == "a2a"


def test_tokens_go_to_their_experts_and_back():
    layout = {"tensor": 2, "data": 8, "expert": 16, "expert_tensor": 1}
    found = bytes_of(MIXTURE, layout, 1, 0)
    assert found["experts"] == pytest.approx(2 * 8192 / 2 * 4 * 256 * 2 * 8 / 16)
    assert found["experts' tensor"] == 0
    assert "experts" not in bytes_of(DENSE, {"tensor": 2, "data": 8})


def test_stages_send_each_microbatch_forth_and_its_gradient_back():
    of = ranks(DENSE, {"tensor": 2, "pipeline": 4, "virtual_pipeline": 2})
    sent = of.stage_exchange(Products(forward=2, backward=1), 8192.0, 4)
    assert sent == pytest.approx(2 * 2 * 8192 / 2 * 256 * 2)


@pytest.mark.parametrize(("distributed", "back"), [(True, 2), (False, 4)])
def test_replicas_sum_gradients_and_get_weights_back(distributed, back):
    machines = replace(BYTES, gpu=replace(BYTES.gpu, node_bytes_per_second=1e30))
    of = ranks(DENSE, {"tensor": 2, "data": 16}, machines, distributed_optimizer=distributed)
    found = of.replica_exchanges(1e9, 0.0)
    each = 15 / 16 / 4  # four of the sixteen replicas share a node's network
    assert list(found.values()) == pytest.approx([4e9 * each, back * 1e9 * each])
    assert all("(network)" in name for name in found)


def planned_traffic(arch, layout, engine, engines, *, colocated=True, quantization=None):
    """Bytes by link of the real plan, for nodes of eight devices; training ranks fetch nothing before."""
    shards = cache(lambda where: TE_SPEC.manifest(arch, layout, where, "bfloat16"))
    held = [shards(replace(where, rank=0, data=0, expert_data=0)) for where in rank_grid(layout)]
    parts = [sglang.manifest(arch, engine, r, "bfloat16", "cuda", 0, quantization) for r in range(engine.ranks)]
    served = [replace(part, holder=f"engine {number}") for number in range(engines) for part in parts]
    first = 0 if colocated else layout.ranks
    topology = topology_of(range(layout.ranks), range(first, first + len(served)), 8)
    assert topology.two_hops == colocated
    sources, preparation = prepare(held, served, topology.sources)
    assert preparation is None or preparation.fetches is None
    return traffic_of(make_plan(sources, served, topology), LinkSpeeds(), 1 << 28)


def test_a_sync_of_70b_on_16_nodes_is_near_the_lower_bound_of_its_links():
    """yaml_recipes/grpo_70b.yaml: every node lacks half of the model, one pipeline stage. Each of its GPUs receives an
    eighth of that over its own adapter, for the engine rank on it, and nothing but norms is passed on."""
    arch = known_model(LLAMA_70B)
    layout, engine = ParallelLayout(tensor=8, pipeline=2, data=8), EngineLayoutConfig(tensor=8)
    traffic = planned_traffic(arch, layout, engine, 16)
    busiest = {link: of_link.busiest for link, of_link in traffic.links.items()}
    assert busiest == pytest.approx({"network": 8.82e9, "device": 17.64e9, "node": 1.2e6}, rel=0.01, abs=1e5)
    into_and_out_of_nodes = [size for sizes in traffic.node_network_bytes.values() for size in sizes]
    assert into_and_out_of_nodes == pytest.approx([70.55e9] * 32, rel=0.001)
    assert traffic.seconds == pytest.approx(0.1764, rel=0.001)
    assert all(of_link.busiest <= 1.3 * of_link.least for of_link in traffic.links.values())
    planned = sync_bytes(arch, layout, engine, 16, 8, 2, colocated=True)
    assert planned.network == pytest.approx(busiest["network"], rel=0.001)
    assert planned.device == planned.even_device == pytest.approx(busiest["device"], rel=0.001)


@pytest.mark.parametrize(
    ("layers", "experts"), [(16, 64), pytest.param(61, 256, marks=pytest.mark.soak)], ids=["small", "whole"]
)
@pytest.mark.parametrize(
    ("engine", "quantization"),
    [
        pytest.param(EngineLayoutConfig(tensor=32, expert=32, attention_data=4), None, marks=pytest.mark.soak),
        (EngineLayoutConfig(tensor=16, expert=16, attention_data=2, pipeline=2), "fp8"),
    ],
    ids=["bf16", "fp8"],
)
def test_a_sync_of_deepseek_v3_on_64_nodes_is_near_the_lower_bound(layers, experts, engine, quantization):
    """yaml_recipes/deepseek_v3_671b.yaml with four times as many replicas and engines of four nodes. Small: with fewer
    layers and experts, in the same stages and groups."""
    sparse, dense = replace(SPARSE_LAYER, mlp=replace(SPARSE_LAYER.mlp, experts=experts)), min(3, layers // 8)
    kinds = (DENSE_LAYER,) * dense + (sparse,) * (layers - dense)
    arch = replace(DEEPSEEK_V3, layers=kinds, vocab=129280 * layers // 61)
    last = 1 if layers == 61 else None
    layout = ParallelLayout(tensor=8, pipeline=16, data=4, expert=32, last_stage_layers=last)
    traffic = planned_traffic(arch, layout, engine, 16, quantization=quantization)
    assert traffic.seconds <= (1.1 if last else 1.3) * traffic.least_seconds
    for link, of_link in traffic.links.items():
        beside_others = of_link.busiest / LinkSpeeds().of(link) < 0.1 * traffic.least_seconds
        assert of_link.busiest <= 1.3 * of_link.least or beside_others, link


def test_a_quantised_sync_moves_about_half_of_the_bytes_of_the_other():
    """Against the real plan of blocks, each of which a training rank has whole."""
    arch = architecture_of(CONFIG | {"num_attention_heads": 8, "head_dim": 64})
    layout, engine = ParallelLayout(tensor=4, pipeline=2, data=4), EngineLayoutConfig(tensor=4)
    traffic = planned_traffic(arch, layout, engine, 8, quantization="fp8")
    planned, plain = (
        sync_bytes(arch, layout, engine, 8, 8, 2, colocated=True, quantized=quantized) for quantized in (True, False)
    )
    assert planned.network == pytest.approx(traffic.links["network"].busiest, rel=0.05)
    assert planned.network < 0.6 * plain.network


@pytest.mark.parametrize("colocated", [True, False])
@pytest.mark.parametrize(
    ("arch", "layout", "engine", "engines"),
    [
        (DENSE, ParallelLayout(tensor=2, data=4), EngineLayoutConfig(tensor=1), 8),
        (DENSE, ParallelLayout(tensor=8, pipeline=4, data=2), EngineLayoutConfig(tensor=8), 8),
        (DENSE, ParallelLayout(tensor=4, pipeline=2, data=4), EngineLayoutConfig(tensor=4), 8),
        (MIXTURE, ParallelLayout(tensor=4, data=4, expert=8), EngineLayoutConfig(tensor=8, expert=8), 2),
        (MIXTURE, ParallelLayout(tensor=4, pipeline=2, data=8, expert=32), EngineLayoutConfig(tensor=8, expert=8), 8),
        (LATENT, ParallelLayout(tensor=4, pipeline=2, data=8, expert=16), EIGHT_GROUPS, 4),
    ],
)
def test_bytes_of_a_sync_are_near_those_of_the_real_plan(arch, layout, engine, engines, colocated):
    """On the busiest device, by kind of link, against a plan of boxes for the same ranks."""
    traffic = planned_traffic(arch, layout, engine, engines, colocated=colocated)
    found = sync_bytes(arch, layout, engine, engines, 8, 2, colocated=colocated)
    counted = {link: traffic.links[link].busiest for link in ("network", "node")}
    seconds = max(counted["network"] / 50e9, counted["node"] / 450e9)
    assert max(found.network / 50e9, found.node / 450e9) == pytest.approx(seconds, rel=0.25)
    if colocated:
        assert found.device == pytest.approx(traffic.links["device"].busiest, rel=0.25)
    parts = [sglang.manifest(arch, engine, rank, "bfloat16", "cuda") for rank in range(engine.ranks)]
    elements = (sum(placement.box.elements for placement in manifest.placements) for manifest in parts)
    assert found.held == pytest.approx(2 * max(elements), rel=0.02)


def mapping(layout, engine, gpus):
    """Engine processes that map memory of one GPU beside their own: the most in a real plan, and as planned."""
    engines, arch = gpus // engine, replace(known_model(LLAMA_70B), layers=known_model(LLAMA_70B).layers[:8])
    sizes = EngineLayoutConfig(tensor=engine)
    of_engine = [sglang.manifest(arch, sizes, rank, "bfloat16", "cuda") for rank in range(engine)]
    served = [replace(each, holder=f"engine {index} {each.holder}") for index in range(engines) for each in of_engine]
    held = [TE_SPEC.manifest(arch, layout, where, "bfloat16") for where in rank_grid(layout)]
    topology = replace(topology_of(range(gpus), range(gpus), 8), two_hops=gpus > 8)
    straight, passed_on = pairs(make_plan(held, served, topology).transfers)
    places, mapped = topology.destinations, Counter()
    for sender, to in {*straight, *passed_on}:  # rank and engine rank of a number are on the same GPU
        mapped[places[sender]] += sender != to and places[sender].node == places[to].node
    train = {"tensor": layout.tensor, "pipeline": layout.pipeline, "data": layout.data}
    of = recipe(
        {"train.layout": train, "rollout.engines": engines, "rollout.layout": {"tensor": engine}, "cluster.gpu": "H100"}
    )
    return max(mapped.values()), mapping_processes(Case(of, arch, H100), engines=1)


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 1), (4, 1), (8, 1), (1, 8), (2, 2), (4, 2)])
def test_contexts_on_other_gpus_are_at_least_those_of_processes_that_map_their_memory(tensor, pipeline):
    layout = ParallelLayout(tensor=tensor, pipeline=pipeline, data=8 // tensor // pipeline)
    for engine in (1, 2, 4, 8):
        real, expected = mapping(layout, engine, gpus=8)
        assert real <= expected <= 7
        assert expected == 0 if tensor == engine and pipeline == 1 else True
    real, expected = mapping(replace(layout, data=2 * layout.data), 8, gpus=16)
    assert real <= expected <= 7

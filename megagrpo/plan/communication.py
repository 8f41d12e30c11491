"""Seconds of what ranks exchange in a training pass, and of bringing new weights to the engines.

Ranks are numbered tensor fastest, then context, data, pipeline (layout/parallel.py), and fill node after node: a group
has the same number of ranks on every node that it touches. Rings are NCCL's: they enter and leave each node once for
all of its members, each with its own adapter. Nothing is hidden behind computation but what the assumption `overlap`
says, and ring attention (cp_comm_type p2p), which counts only where it takes longer than attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, gcd, lcm
from typing import Literal

from megagrpo.layout.parallel import ParallelLayout
from megagrpo.plan.assumptions import Assumptions
from megagrpo.plan.case import Case, Machines
from megagrpo.plan.parameters import model_bytes, rank_parameters
from megagrpo.recipe.schema import TrainConfig
from megagrpo.weights.families.architecture import Architecture

Link = Literal["node", "network"]
QUANTISING_BYTES = 17
"""Read and written for each element in bfloat16: its absolute value, the largest, a product in float32, a cast."""

Seconds = dict[str, float]
"""By what they are spent on."""


def added(*parts: Mapping[str, float]) -> Seconds:
    """Seconds of one thing after the other, by what they are spent on."""
    total: Seconds = {}
    for part in parts:
        for name, seconds in part.items():
            total[name] = total.get(name, 0.0) + seconds
    return total


# --- links and groups ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankGroup:
    """The ranks of one collective, of which `on_node` share each node."""

    ranks: int
    on_node: int

    @property
    def link(self) -> Link:
        return "node" if self.on_node == self.ranks else "network"


@dataclass(frozen=True)
class Links:
    """Bytes a second that a GPU really moves each way, and the seconds that every operation takes besides."""

    node: float
    network: float
    node_latency: float
    network_latency: float

    @classmethod
    def of(cls, machines: Machines, assumptions: Assumptions) -> Links:
        return cls(
            machines.gpu.node_bytes_per_second * assumptions.node_efficiency,
            machines.network_bytes_per_second * assumptions.network_efficiency,
            assumptions.collective_seconds,
            assumptions.network_collective_seconds,
        )

    def latency(self, link: Link) -> float:
        return self.node_latency if link == "node" else self.network_latency


def gather(group: RankGroup, whole_bytes: float, operations: float, links: Links) -> float:
    """Seconds of all-gathers that leave `whole_bytes` on every rank, or of reduce-scatters of as much: rings."""
    if group.ranks == 1:
        return 0.0
    moved = whole_bytes * (group.ranks - 1) / group.ranks * operations
    seconds = moved / links.node if group.on_node > 1 else 0.0
    if group.link == "network":
        seconds = max(seconds, moved / group.on_node / links.network)
    return seconds + links.latency(group.link) * operations


def exchange(group: RankGroup, sent_bytes: float, operations: float, links: Links) -> float:
    """Seconds of all-to-alls in which every rank has `sent_bytes` for all of them alike, itself included."""
    if group.ranks == 1:
        return 0.0
    near = sent_bytes * (group.on_node - 1) / group.ranks / links.node
    far = sent_bytes * (group.ranks - group.on_node) / group.ranks / links.network
    return (max(near, far) + links.latency(group.link)) * operations


@dataclass(frozen=True)
class Groups:
    """Every group that one rank is in, but for pipelines."""

    tensor: RankGroup
    context: RankGroup
    expert: RankGroup
    expert_tensor: RankGroup
    replicas: RankGroup
    """Data and context ranks, which sum gradients of dense weights."""
    expert_replicas: RankGroup
    stages_link: Link
    """Between a pipeline stage and the next."""

    @classmethod
    def of(cls, layout: ParallelLayout, gpus_per_node: int) -> Groups:
        def group(ranks: int, stride: int) -> RankGroup:
            if layout.ranks <= gpus_per_node:
                return RankGroup(ranks, ranks)
            return RankGroup(ranks, max(1, gcd(ranks * stride, gpus_per_node) // stride))

        tensor, expert_tensor = layout.tensor, layout.expert_tensor
        return cls(
            tensor=group(tensor, 1),
            context=group(layout.context, tensor),
            expert=group(layout.expert, expert_tensor),
            expert_tensor=group(expert_tensor, 1),
            replicas=group(layout.context * layout.data, tensor),
            expert_replicas=group(layout.expert_data, expert_tensor * layout.expert),
            stages_link="node" if layout.ranks <= gpus_per_node else "network",
        )


# --- training --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exchanged:
    """A pass over `tokens` tokens of one data rank in `microbatches`, in values of `item_bytes`. It goes `forward` and
    `backward` times through the layers: 1 and 0 without gradients, 1 and 1 with them, 2 and 1 if layers are
    recomputed."""

    tokens: float
    microbatches: float
    item_bytes: int
    forward: int
    backward: int


def layer_seconds(
    arch: Architecture, sparse: bool, train: TrainConfig, groups: Groups, passed: Exchanged, links: Links
) -> Seconds:
    """Exchanges inside one layer for all microbatches of a pass, by what is exchanged: tensor, context, experts,
    experts' tensor. `sparse`: the layer has experts."""
    per_context = passed.tokens / groups.context.ranks * passed.item_bytes
    at_once = per_context / passed.microbatches
    seconds = {}
    if groups.tensor.ranks > 1:
        # Attention and MLP each gather their input and scatter their output. Backward they gather the input again and
        # the output's gradient, and scatter the input's (megatron's LinearWithGradAccumulationAndAsyncCommunication).
        parts = 1 if sparse and not (arch.experts and arch.experts.shared_ffn) else 2
        again = again_in_layer(train, sparse, passed) if parts == 2 else 0
        count = (parts * (2 * passed.forward + 3 * passed.backward) + 2 * again) * passed.microbatches
        seconds["tensor"] = gather(groups.tensor, at_once * arch.hidden, count, links)
    if groups.context.ranks > 1:
        seconds["context"] = _context_seconds(arch, train, groups, passed, links)
    if sparse and arch.experts is not None:
        # Tokens go to their experts and come back; backward, their gradients do the same.
        again = passed.backward if "moe" in train.recomputed.modules else 0
        count = 2 * (passed.forward + passed.backward + again) * passed.microbatches
        own = at_once / groups.tensor.ranks * arch.hidden * arch.experts.per_token
        if groups.expert.ranks > 1:
            seconds["experts"] = exchange(groups.expert, own, count, links)
        if groups.expert_tensor.ranks > 1:
            whole = own * groups.expert_tensor.ranks
            seconds["experts' tensor"] = gather(groups.expert_tensor, whole, count, links)
    return seconds


def again_in_layer(train: TrainConfig, sparse: bool, passed: Exchanged) -> int:
    """Times that the MLP, or the shared experts, of a layer are computed again."""
    modules = ("moe", "shared_experts") if sparse else ("mlp",)
    return passed.backward if train.recomputed.modules.intersection(modules) else 0


def _context_seconds(arch: Architecture, train: TrainConfig, groups: Groups, passed: Exchanged, links: Links) -> float:
    """As cp_comm_type says: keys and values of all context ranks, or an all-to-all over heads.

    Backward the keys and values come again, and their gradients go back. The local layers gather once and keep them.
    A core that is computed again exchanges again.
    """
    tensor, latent, backward = groups.tensor.ranks, arch.latent, passed.backward
    # Columns of one rank: queries and outputs, keys and values.
    queries = arch.heads / tensor * (arch.head_dim + (arch.head_dim if latent is None else latent.value_dim))
    keys = 2 * max(1.0, arch.query_groups / tensor) * arch.head_dim if latent is None else queries
    at_once = passed.tokens / passed.microbatches * passed.item_bytes
    forward = 2 if backward and "core_attn" in train.recomputed.modules else passed.forward
    if context_exchange(train) == "a2a":
        columns = at_once / groups.context.ranks * (queries + keys)
        return exchange(groups.context, columns, (forward + backward) * passed.microbatches, links)
    again = backward if train.layer_spec == "local" else 2 * backward
    return gather(groups.context, at_once * keys, (forward + again) * passed.microbatches, links)


def context_exchange(train: TrainConfig) -> str:
    """train.megatron's cp_comm_type; transformer-engine's default is p2p. A list has one for each layer: the first."""
    kind = train.megatron.get("cp_comm_type") or "p2p"
    if train.layer_spec == "local":
        return "all_gather"
    return str(kind[0] if isinstance(kind, list) else kind)


def stage_seconds(arch: Architecture, layout: ParallelLayout, groups: Groups, passed: Exchanged, links: Links) -> float:
    """Hidden states to the next stage and gradients to the one before, once for each chunk and microbatch."""
    directions = min(1, passed.forward) + passed.backward  # recomputing stays in its layer
    count = directions * layout.virtual_pipeline * passed.microbatches
    at_once = passed.tokens / passed.microbatches / layout.context / layout.tensor * arch.hidden * passed.item_bytes
    speed = links.node if groups.stages_link == "node" else links.network
    return (at_once / speed + links.latency(groups.stages_link)) * count


def replica_seconds(
    dense: float, experts: float, train: TrainConfig, groups: Groups, item_bytes: int, links: Links
) -> Seconds:
    """Gradients summed over replicas and new weights back, for one optimizer step, by what is exchanged and the link.
    `dense` and `experts` are the trained elements of one rank. Without the distributed optimizer gradients are
    all-reduced: scattered, and gathered in their own dtype."""
    gradient_bytes = 2 if train.gradient_dtype == "bfloat16" else 4
    back = item_bytes if train.distributed_optimizer else gradient_bytes
    seconds = {}
    of_dense, of_experts = ("data", groups.replicas, dense), ("data of experts", groups.expert_replicas, experts)
    for name, group, elements in (of_dense, of_experts):
        if group.ranks > 1 and elements:
            for what, each in (("gradients", gradient_bytes), ("weights", back)):
                label = f"{name}: {what} communication ({group.link})"
                seconds[label] = gather(group, elements * each, 1, links)
    return seconds


# --- weight sync -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SyncBytes:
    """Bytes of the busiest device, in the engines' dtype: over its share of the network, over its node's links, between
    two processes on the device itself, held by an engine rank, and of the whole model."""

    network: float
    node: float
    device: float
    held: float
    model: float


def sync_seconds(case: Case) -> Seconds:
    """Seconds of a weight sync. Engines get all weights, also with train.lora: adapters are added before."""
    recipe, machines, assumed = case.grpo, case.speeds, case.assumptions
    rollout, links = recipe.rollout, Links.of(machines, assumed)
    external, colocated = rollout.engine == "external", recipe.cluster.placement == "colocated"
    engine = (1, 1) if rollout.engine == "transformers" else (rollout.layout.ranks, rollout.layout.expert)
    sizes = case.layout, engine, rollout.engines, machines.gpus_per_node, case.item_bytes
    quantized = rollout.quantization is not None
    found = sync_bytes(case.architecture, *sizes, colocated=colocated and not external, quantized=quantized)
    seconds = {"pauses and set-up": assumed.sync_seconds, "digests": found.held / assumed.digest_bytes_per_second}
    if recipe.weights.transfer_to(external=external) == "disk":
        seconds["writing to disk"] = found.model / assumed.disk_bytes_per_second
        seconds["reading from disk"] = found.model * rollout.engines / assumed.disk_bytes_per_second
        return seconds
    # An engine rank reads and writes what it holds, and a training rank what it packs. All three go on at once.
    packed = found.model * rollout.engines / case.layout.ranks
    copied = max(found.held, packed) if not colocated else found.held + packed
    moving = {
        "over the network": found.network / links.network,
        "within nodes": found.node / links.node,
        "copies": 2 * copied / machines.gpu.memory_bytes_per_second,
    }
    if quantized:
        held = rank_parameters(case.architecture, case.layout, 0, case.fused_layers).total
        seconds["quantising"] = held * QUANTISING_BYTES / machines.gpu.memory_bytes_per_second
    slowest, spent = max(moving.items(), key=lambda entry: entry[1])
    return seconds | {slowest: spent / assumed.sync_efficiency}


@lru_cache(maxsize=4096)
def sync_bytes(
    arch: Architecture,
    layout: ParallelLayout,
    engine: tuple[int, int],
    engines: int,
    gpus_per_node: int,
    item_bytes: int,
    *,
    colocated: bool,
    quantized: bool = False,
) -> SyncBytes:
    """The fewest bytes that a plan of boxes can move to fill all ranks of all engines once; `engine` is the tensor and
    expert size of one.

    Arithmetic over whole kinds of ranks; weights/plan.py makes the real plan, which takes seconds for hundreds of
    ranks. A node needs each byte that its engine ranks hold once from the network if no training rank on it holds it;
    all training ranks with replicas share the sending evenly; within the node everything travels over its links. Where
    engines share the devices of training ranks, what crosses the network goes from the training rank to the engine rank
    on its device.
    """
    tensor, _ = engine
    dense, experts = model_bytes(arch, item_bytes, quantized=quantized)
    engine_ranks = engines * tensor
    near = min(gpus_per_node, engine_ranks)
    needed = min(1.0, near / tensor)  # of the model, by a node
    there = _held_on(min(gpus_per_node, layout.ranks), layout) if colocated else (0.0, 0.0)
    into_node = dense * max(0.0, needed - there[0]) + experts * max(0.0, needed - there[1])
    if layout.ranks + (0 if colocated else engine_ranks) <= gpus_per_node:
        into_node = 0.0
    into_device = into_node / near
    out_of_device = into_node * ceil(engine_ranks / gpus_per_node) / layout.ranks
    own, kept = (dense + experts) / tensor, 0.0
    if colocated:
        devices = range(min(near, lcm(tensor, layout.tensor, layout.expert * layout.expert_tensor)))
        shares = (_kept(device, layout, *engine) for device in devices)
        kept = min(dense * of_dense + experts * of_experts for of_dense, of_experts in shares)
    network, node = max(into_device, out_of_device), max(0.0, own - kept - into_device)
    return SyncBytes(network, node, kept + into_device * colocated, own, dense + experts)


def _held_on(devices: int, layout: ParallelLayout) -> tuple[float, float]:
    """Share of the dense weights and of the experts that lies on that many consecutive training ranks."""
    stages = max(1.0, devices / (layout.ranks / layout.pipeline)) / layout.pipeline
    dense = min(1.0, devices / layout.tensor) * stages
    experts = min(1.0, devices / (layout.expert * layout.expert_tensor)) * stages
    return min(1.0, dense), min(1.0, experts)


def _kept(device: int, layout: ParallelLayout, tensor: int, expert: int) -> tuple[float, float]:
    """Share of the dense weights, and of the experts, that training rank and engine rank `device` have in common.

    Both deal out whole experts in order, and each expert is cut by what is left.
    """
    dense = _common(device, tensor, device, layout.tensor)
    shards = tensor // expert
    whole = _common(device // shards, expert, device // layout.expert_tensor, layout.expert)
    experts = whole * _common(device, shards, device, layout.expert_tensor)
    return dense / layout.pipeline, experts / layout.pipeline


def _common(one: int, ones: int, other: int, others: int) -> float:
    """Overlap of part `one` of `ones` equal parts of something with part `other` of `others`; indices wrap around."""
    one, other = one % ones, other % others
    return max(0.0, min((one + 1) / ones, (other + 1) / others) - max(one / ones, other / others))

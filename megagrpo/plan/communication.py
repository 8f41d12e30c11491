"""Seconds of the exchanges between ranks in a training pass, and of a weight sync to the engines.

Ranks are numbered tensor fastest, then context, data, pipeline (layout/parallel.py), and fill node after node: a group
has the same number of ranks on every node that it touches. Rings are NCCL's: they enter and leave each node once for
all of its members, each with its own adapter. Only the assumption `overlap` and ring attention (cp_comm_type p2p) hide
exchanges behind computation. Ring attention counts only the seconds that exceed attention's.
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
from megagrpo.recipe.schema import EngineLayoutConfig, TrainConfig
from megagrpo.weights.boxes import Link as AnyLink
from megagrpo.weights.families.architecture import Architecture

Link = Literal["node", "network"]
QUANTISING_BYTES = 17
"""Read and written for each element in bfloat16: its absolute value, the largest, a product in float32, a cast."""

Seconds = dict[str, float]
"""Seconds by the item that takes them."""


def added(*parts: Mapping[str, float]) -> Seconds:
    """Returns the seconds of consecutive parts, summed by item."""
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
    """Bytes a second that a GPU really moves each way, and the extra seconds of every operation."""

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

    def sent(self, link: Link, sent_bytes: float) -> float:
        """Returns the seconds in which a GPU sends bytes to another one."""
        return sent_bytes / (self.node if link == "node" else self.network) + self.latency(link)


def gather(group: RankGroup, whole_bytes: float, operations: float, links: Links) -> float:
    """Returns the seconds of ring all-gathers of `whole_bytes` to every rank, or of reduce-scatters of as much."""
    if group.ranks == 1:
        return 0.0
    moved = whole_bytes * (group.ranks - 1) / group.ranks * operations
    seconds = moved / links.node if group.on_node > 1 else 0.0
    if group.link == "network":
        seconds = max(seconds, moved / group.on_node / links.network)
    return seconds + links.latency(group.link) * operations


def exchange(group: RankGroup, sent_bytes: float, operations: float, links: Links) -> float:
    """Returns the seconds of all-to-alls: every rank sends equal parts of `sent_bytes` to all, itself included."""
    if group.ranks == 1:
        return 0.0
    near = sent_bytes * (group.on_node - 1) / group.ranks / links.node
    far = sent_bytes * (group.ranks - group.on_node) / group.ranks / links.network
    return (max(near, far) + links.latency(group.link)) * operations


@dataclass(frozen=True)
class Groups:
    """The groups of one rank, except for pipelines."""

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
    """Returns the seconds of exchanges inside one layer for all microbatches of a pass, by item: tensor, context,
    experts, experts' tensor. `sparse`: the layer has experts."""
    per_context = passed.tokens / groups.context.ranks * passed.item_bytes
    at_once = per_context / passed.microbatches
    seconds = {}
    if groups.tensor.ranks > 1:
        # Attention and MLP each gather their input and scatter their output. Backward they gather the input again and
        # the output's gradient, and scatter the input's (megatron's LinearWithGradAccumulationAndAsyncCommunication).
        parts = 1 if sparse and not (arch.experts and arch.experts.shared_ffn) else 2
        mlp = ("moe", "shared_experts") if sparse else ("mlp",)  # recomputed, it exchanges again
        again = passed.backward if parts == 2 and train.recomputed.modules.intersection(mlp) else 0
        count = (parts * (2 * passed.forward + 3 * passed.backward) + 2 * again) * passed.microbatches
        seconds["tensor"] = gather(groups.tensor, at_once * arch.hidden, count, links)
    if groups.context.ranks > 1:
        seconds["context"] = _context_seconds(arch, train, groups, passed, links)
    if sparse and arch.experts is not None:
        # Tokens go to their experts and come back; backward, their gradients do the same.
        again = passed.backward if "moe" in train.recomputed.modules else 0
        count = 2 * (passed.forward + passed.backward + again) * passed.microbatches
        sent = at_once / groups.tensor.ranks * arch.hidden * arch.experts.per_token
        if groups.expert.ranks > 1:
            seconds["experts"] = exchange(groups.expert, sent, count, links)
        if groups.expert_tensor.ranks > 1:
            whole = sent * groups.expert_tensor.ranks
            seconds["experts' tensor"] = gather(groups.expert_tensor, whole, count, links)
    return seconds


def _context_seconds(arch: Architecture, train: TrainConfig, groups: Groups, passed: Exchanged, links: Links) -> float:
    """Returns the seconds of cp_comm_type's exchange: keys and values of all context ranks, or all-to-all over heads.

    The backward pass gathers keys and values again and returns their gradients. Local layers gather once and keep them.
    A recomputed core exchanges again.
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
    """Returns the first layer's cp_comm_type of train.megatron, p2p by default; local layers use all_gather."""
    kind = train.megatron.get("cp_comm_type") or "p2p"
    if train.layer_spec == "local":
        return "all_gather"
    return str(kind[0] if isinstance(kind, list) else kind)


def stage_seconds(arch: Architecture, layout: ParallelLayout, groups: Groups, passed: Exchanged, links: Links) -> float:
    """Returns the seconds to send hidden states on and gradients back, for all chunks and microbatches."""
    directions = min(1, passed.forward) + passed.backward  # recomputing stays in its layer
    count = directions * layout.virtual_pipeline * passed.microbatches
    at_once = passed.tokens / passed.microbatches / layout.context / layout.tensor * arch.hidden * passed.item_bytes
    return links.sent(groups.stages_link, at_once) * count


def replica_seconds(
    dense: float, experts: float, train: TrainConfig, groups: Groups, item_bytes: int, links: Links
) -> Seconds:
    """Returns the seconds to sum gradients over replicas and to return new weights in one optimizer step, by item and
    link. `dense` and `experts` are the trained elements of one rank. Without the distributed optimizer gradients are
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
class LinkUse:
    """The bytes that a sync moves over one kind of link, into or out of the busiest device, and their seconds. The
    least values assume equal parts for all devices, and the link's speed by its data sheet."""

    link: AnyLink
    bytes: float
    seconds: float
    least_bytes: float
    least_seconds: float

    @property
    def ratio(self) -> float | None:
        return self.seconds / self.least_seconds if self.least_seconds else None


@dataclass(frozen=True)
class SyncBytes:
    """Bytes of the busiest device, in the engines' dtype: over its share of the network, over its node's links, between
    two processes on the device itself, held by an engine rank, and of the whole model. `even_node` and `even_device`:
    as `node` and `device`, if all devices had equal parts."""

    network: float
    node: float
    device: float
    held: float
    model: float
    even_node: float
    even_device: float


def sync_seconds(case: Case) -> Seconds:
    """Returns the seconds of a weight sync, by item. Engines get all weights, with adapters (train.lora) added."""
    rollout, assumed, moved = case.grpo.rollout, case.assumptions, _sync_bytes_of(case)
    seconds = {"pauses and set-up": assumed.sync_seconds, "digests": moved.held / assumed.digest_bytes_per_second}
    links = sync_links(case)
    if not links:
        seconds["writing to disk"] = moved.model / assumed.disk_bytes_per_second
        seconds["reading from disk"] = moved.model * rollout.engines / assumed.disk_bytes_per_second
        return seconds
    if rollout.quantization is not None:
        held = rank_parameters(case.architecture, case.layout, 0, case.fused_layers).total
        seconds["quantising"] = held * QUANTISING_BYTES / case.speeds.gpu.memory_bytes_per_second
    names = {"network": "over the network", "node": "within nodes", "device": "copies"}
    slowest = max(links, key=lambda use: use.seconds)
    return seconds | {names[slowest.link]: slowest.seconds}


def sync_links(case: Case) -> tuple[LinkUse, ...]:
    """Returns the use of each kind of link, all at once in a sync; empty if weights are transferred by disk."""
    recipe, machines, assumed = case.grpo, case.speeds, case.assumptions
    if recipe.transfer == "disk":
        return ()
    sizes, colocated = _sync_bytes_of(case), recipe.cluster.placement == "colocated"
    # An engine rank reads and writes what it holds, and a training rank what it packs.
    packed = sizes.held * recipe.rollout.engines * recipe.rollout.layout.ranks / case.layout.ranks
    copied = max(sizes.held, packed) if not colocated else sizes.held + packed
    real, memory = Links.of(machines, assumed), machines.gpu.memory_bytes_per_second / 2

    def use(link: AnyLink, moved: float, seconds: float, least: float, speed: float) -> LinkUse:
        return LinkUse(link, moved, seconds / assumed.sync_efficiency, least, least / speed)

    return (
        use("network", sizes.network, sizes.network / real.network, sizes.network, machines.network_bytes_per_second),
        use("node", sizes.node, sizes.node / real.node, sizes.even_node, machines.gpu.node_bytes_per_second),
        use("device", sizes.device, copied / memory, sizes.even_device, memory),
    )


def _sync_bytes_of(case: Case) -> SyncBytes:
    rollout = case.grpo.rollout
    colocated = case.grpo.cluster.placement == "colocated" and rollout.kind.started_by_us
    sizes = case.layout, rollout.layout, rollout.engines, case.speeds.gpus_per_node, case.item_bytes
    return sync_bytes(case.architecture, *sizes, colocated=colocated, quantized=rollout.quantization is not None)


@lru_cache(maxsize=4096)
def sync_bytes(
    arch: Architecture,
    layout: ParallelLayout,
    engine: EngineLayoutConfig,
    engines: int,
    gpus_per_node: int,
    item_bytes: int,
    *,
    colocated: bool,
    quantized: bool = False,
) -> SyncBytes:
    """Returns the fewest bytes that a plan of boxes can move to fill all ranks of all engines once.

    It computes over whole kinds of ranks; weights/plan.py makes the real plan, in seconds for hundreds of ranks. A node
    needs each byte of its engine ranks once from the network if no training rank on it holds it. All training ranks
    with replicas share the sending evenly; within the node everything travels over its links. Where engines share the
    devices of training ranks, bytes from the network go from the training rank to the engine rank on its device.
    """
    weights = model_bytes(arch, item_bytes, quantized=quantized)
    group, experts = engine.ranks // engine.attention_data, layout.expert * layout.expert_tensor
    # Bytes, the parts into which an engine cuts them, and those into which a training stage does.
    cuts = [(weights.whole, engine.pipeline, 1), (weights.attention, group, layout.tensor)]
    cuts += [(weights.mlp, engine.ranks, layout.tensor), (weights.experts, engine.ranks, experts)]
    engine_ranks = engines * engine.ranks
    near, devices = min(gpus_per_node, engine_ranks), min(gpus_per_node, layout.ranks)
    into_nodes = [0.0]
    if layout.ranks + (0 if colocated else engine_ranks) > gpus_per_node:
        here = _stages_on(devices, layout.ranks, layout.pipeline) if colocated else 0.0
        wanted = _stages_on(near, engine.ranks, engine.pipeline)
        # In a stage, each node of an engine has its part, and so has each node of training ranks.
        by_node = [
            (size, max(1, parts // engine.pipeline // near), max(1, its // devices)) for size, parts, its in cuts
        ]
        into_nodes = [
            sum(size * wanted * (1 / parts - here * _common(node, parts, node, its)) for size, parts, its in by_node)
            for node in range(min(ceil(engine_ranks / near), lcm(*(part for of in by_node for part in of[1:]))))
        ]
    into_device = max(into_nodes) / near
    out_of_device = sum(into_nodes) / len(into_nodes) * ceil(engine_ranks / gpus_per_node) / layout.ranks
    held, kept = sum(size / parts for size, parts, _ in cuts), [0.0]
    if colocated:
        kept = [
            (
                sum(size * _common(device, parts, device, others) for size, parts, others in cuts[:3])
                + weights.experts * _common_experts(device, layout, engine)
            )
            / layout.pipeline
            for device in range(min(near, lcm(engine.ranks, layout.tensor, experts)))
        ]
    network, mean = max(into_device, out_of_device), sum(kept) / len(kept)
    node, even_node = (max(0.0, held - its - into_device) for its in (min(kept), mean))
    device, even_device = (its + into_device * colocated for its in (max(kept), mean))
    return SyncBytes(network, node, device, held, weights.total, even_node, even_device)


def _stages_on(devices: int, ranks: int, stages: int) -> float:
    """Returns the share of `stages` stages, over `ranks` ranks, that lies on `devices` consecutive devices."""
    return min(1.0, max(1.0, devices / (ranks / stages)) / stages)


def _common_experts(device: int, layout: ParallelLayout, engine: EngineLayoutConfig) -> float:
    """Returns the share of a stage's experts that training rank and engine rank `device` have in common.

    Both deal out whole experts in order, and cut each expert over the remaining ranks.
    """
    shards = engine.ranks // engine.expert
    whole = _common(device // shards, engine.expert, device // layout.expert_tensor, layout.expert)
    return whole * _common(device, shards, device, layout.expert_tensor)


def _common(one: int, ones: int, other: int, others: int) -> float:
    """Returns the overlap of part `one` of `ones` equal parts and part `other` of `others`; indices wrap around."""
    one, other = one % ones, other % others
    return max(0.0, min((one + 1) / ones, (other + 1) / others) - max(one / ones, other / others))

"""What ranks say to each other in a training pass: bytes and seconds of every kind of collective, and over which link.

Ranks are numbered tensor fastest, then context, data, pipeline (layout/parallel.py), and fill node after node. So a
group whose ranks are `stride` apart lies in one node as far as `stride x ranks` does, and beyond it has the same number
of ranks on every node that it touches. Rings are as NCCL makes them: they enter and leave each node once for all of
its members, each of which brings its own adapter. Nothing is hidden behind computation, unless the assumption
`overlap` says so; ring attention (cp_comm_type p2p) hides itself, and counts only where it takes longer.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Literal

from megagrpo.layout.parallel import ParallelLayout
from megagrpo.plan.assumptions import Assumptions
from megagrpo.plan.machines import Machines
from megagrpo.recipe.schema import TrainConfig
from megagrpo.weights.families.architecture import Architecture

Link = Literal["node", "network"]
GRADIENT_BYTES = 4
"""Gradients are summed in float32 (megatron/trained_model.py)."""


@dataclass(frozen=True)
class Group:
    """The ranks of one collective, of which `on_node` share each node."""

    ranks: int
    on_node: int

    @property
    def link(self) -> Link:
        return "node" if self.on_node == self.ranks else "network"


@dataclass(frozen=True)
class Collective:
    """All operations of one kind in a pass. `bytes` leave the busiest GPU, over its slowest link."""

    name: str
    link: Link
    bytes: float
    seconds: float

    def times(self, count: float) -> Collective:
        return Collective(self.name, self.link, self.bytes * count, self.seconds * count)


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

    def latency(self, group: Group) -> float:
        return self.node_latency if group.link == "node" else self.network_latency


def group_of(ranks: int, stride: int, layout: ParallelLayout, gpus_per_node: int) -> Group:
    """`ranks` ranks of the layout, `stride` apart."""
    if layout.ranks <= gpus_per_node:
        return Group(ranks, ranks)
    return Group(ranks, max(1, gcd(ranks * stride, gpus_per_node) // stride))


def gather(name: str, group: Group, whole_bytes: float, operations: float, links: Links) -> Collective:
    """All-gathers that leave `whole_bytes` on every rank, or reduce-scatters of as much: a ring over the group."""
    moved = whole_bytes * (group.ranks - 1) / group.ranks * operations
    seconds = moved / links.node if group.on_node > 1 else 0.0
    out = moved
    if group.link == "network":
        out = moved / group.on_node
        seconds = max(seconds, out / links.network)
    latency = links.latency(group) * operations if group.ranks > 1 else 0.0
    return Collective(name, group.link, out, seconds + latency)


def exchange(name: str, group: Group, sent_bytes: float, operations: float, links: Links) -> Collective:
    """All-to-alls in which every rank has `sent_bytes` for all of them alike, itself included."""
    near = sent_bytes * (group.on_node - 1) / group.ranks * operations
    far = sent_bytes * (group.ranks - group.on_node) / group.ranks * operations
    seconds = max(near / links.node, far / links.network)
    latency = links.latency(group) * operations if group.ranks > 1 else 0.0
    return Collective(name, group.link, far if group.link == "network" else near, seconds + latency)


@dataclass(frozen=True)
class Groups:
    """Every group that one rank is in, but for pipelines."""

    tensor: Group
    context: Group
    expert: Group
    expert_tensor: Group
    replicas: Group
    """Data and context ranks, which sum gradients of dense weights."""
    expert_replicas: Group
    stages_link: Link
    """Between a pipeline stage and the next."""

    @classmethod
    def of(cls, layout: ParallelLayout, gpus_per_node: int) -> Groups:
        def group(ranks: int, stride: int) -> Group:
            return group_of(ranks, stride, layout, gpus_per_node)

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


@dataclass(frozen=True)
class Directions:
    """How often a pass goes through the layers forward and backward: 1 and 0, 1 and 1, 2 and 1 if recomputed."""

    forward: int
    backward: int


@dataclass(frozen=True)
class Exchanged:
    """A pass over `tokens` tokens of one data rank in `microbatches`, in values of `item_bytes`."""

    tokens: float
    microbatches: float
    item_bytes: int
    directions: Directions


def layer_collectives(
    arch: Architecture, layer: int, train: TrainConfig, groups: Groups, passed: Exchanged, links: Links
) -> list[Collective]:
    """Those inside one layer, for all microbatches of a pass."""
    layout = train.layout.parallel()
    found = []
    per_context = passed.tokens / layout.context * passed.item_bytes
    at_once = per_context / passed.microbatches
    ways = passed.directions
    has_experts = arch.experts is not None and layer >= arch.experts.dense_layers
    if layout.tensor > 1:
        # Attention and MLP each gather their input and scatter their output. Backward they gather the input again and
        # the output's gradient, and scatter the input's (megatron's LinearWithGradAccumulationAndAsyncCommunication).
        parts = 1 if has_experts and not (arch.experts and arch.experts.shared_ffn) else 2
        count = parts * (2 * ways.forward + 3 * ways.backward) * passed.microbatches
        found.append(gather("tensor", groups.tensor, at_once * arch.hidden, count, links))
    if layout.context > 1:
        found.append(_context(arch, train, groups.context, passed, links))
    if has_experts and arch.experts is not None:
        # Tokens go to their experts and come back; backward, their gradients do the same.
        count = 2 * (ways.forward + ways.backward) * passed.microbatches
        own = at_once / layout.tensor * arch.hidden * arch.experts.per_token
        if layout.expert > 1:
            found.append(exchange("experts", groups.expert, own, count, links))
        if layout.expert_tensor > 1:
            whole = own * layout.expert_tensor
            found.append(gather("experts' tensor", groups.expert_tensor, whole, count, links))
    return found


def _context(arch: Architecture, train: TrainConfig, group: Group, passed: Exchanged, links: Links) -> Collective:
    """Of one layer, as cp_comm_type says: keys and values of all context ranks, or an all-to-all over heads.

    Backward the keys and values come again, and their gradients go back. The local layers gather once and keep them.
    A core that is computed again exchanges again.
    """
    layout, latent, backward = train.layout.parallel(), arch.latent, passed.directions.backward
    # Columns of one rank: queries and outputs, keys and values.
    queries = arch.heads / layout.tensor * (arch.head_dim + (arch.head_dim if latent is None else latent.value_dim))
    keys = 2 * max(1.0, arch.query_groups / layout.tensor) * arch.head_dim if latent is None else queries
    at_once = passed.tokens / passed.microbatches * passed.item_bytes
    forward = 2 if backward and train.recompute != "none" else passed.directions.forward
    if context_exchange(train) == "a2a":
        columns = at_once / layout.context * (queries + keys)
        return exchange("context", group, columns, (forward + backward) * passed.microbatches, links)
    again = backward if train.layer_spec == "local" else 2 * backward
    return gather("context", group, at_once * keys, (forward + again) * passed.microbatches, links)


def context_exchange(train: TrainConfig) -> str:
    """train.megatron's cp_comm_type; transformer-engine's default is p2p. A list has one for each layer: the first."""
    kind = train.megatron.get("cp_comm_type") or "p2p"
    if train.layer_spec == "local":
        return "all_gather"
    return str(kind[0] if isinstance(kind, list) else kind)


def stage_sends(
    arch: Architecture, layout: ParallelLayout, groups: Groups, passed: Exchanged, links: Links
) -> Collective:
    """Hidden states to the next stage and gradients to the one before, once for each chunk and microbatch."""
    if layout.pipeline == 1:
        return Collective("pipeline", groups.stages_link, 0.0, 0.0)
    directions = min(1, passed.directions.forward) + passed.directions.backward  # recomputing stays in its layer
    count = directions * layout.virtual_pipeline * passed.microbatches
    at_once = passed.tokens / passed.microbatches / layout.context / layout.tensor * arch.hidden * passed.item_bytes
    speed = links.node if groups.stages_link == "node" else links.network
    latency = links.node_latency if groups.stages_link == "node" else links.network_latency
    return Collective("pipeline", groups.stages_link, at_once * count, (at_once / speed + latency) * count)


def replica_collectives(
    dense: float, experts: float, train: TrainConfig, groups: Groups, item_bytes: int, links: Links
) -> list[Collective]:
    """Gradients summed over replicas and new weights back, for one optimizer step.

    `dense` and `experts` are the trained elements of one rank. Without the distributed optimizer gradients are
    all-reduced, which moves as much as scattering and gathering them.
    """
    back = item_bytes if train.distributed_optimizer else GRADIENT_BYTES
    found = []
    of_dense, of_experts = ("data", groups.replicas, dense), ("data of experts", groups.expert_replicas, experts)
    for name, group, elements in (of_dense, of_experts):
        if group.ranks > 1 and elements:
            found.append(gather(f"{name}: gradients", group, elements * GRADIENT_BYTES, 1, links))
            found.append(gather(f"{name}: weights", group, elements * back, 1, links))
    return found

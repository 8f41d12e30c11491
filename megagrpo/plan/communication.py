"""Links and groups of ranks, the seconds of their collectives, and those of a weight sync to the engines.

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

from megagrpo.layout.parallel import ParallelLayout
from megagrpo.plan.assumptions import Assumptions
from megagrpo.plan.case import Case, Machines, axes_of
from megagrpo.plan.parameters import model_bytes, rank_parameters
from megagrpo.recipe.schema import EngineLayoutConfig
from megagrpo.weights.boxes import Link
from megagrpo.weights.families.architecture import Architecture

QUANTISING_BYTES = 17
"""Read and written for each element in bfloat16: its absolute value, the largest, a product in float32, a cast."""

AXES = {"tensor": "tensor", "context": "context", "experts": "expert", "experts' tensor": "expert_tensor",
        "data": "data", "data of experts": "expert_data"}  # fmt: skip
"""Axes of the exchanges inside a stage, by their item of a step."""

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


def groups_of(layout: ParallelLayout, gpus_per_node: int) -> dict[str, RankGroup]:
    """Returns the groups of one rank, by the item of a step that they exchange. Data and context ranks together sum
    gradients of dense weights; a pipeline's group is a stage's rank and the next one's."""
    axes = axes_of(layout) | {"data": (layout.context * layout.data, layout.tensor)}
    groups = {"pipeline": RankGroup(2, 2 if layout.ranks <= gpus_per_node else 1)}
    for name, axis in AXES.items():
        ranks, stride = axes[axis]
        on_node = max(1, gcd(ranks * stride, gpus_per_node) // stride)
        groups[name] = RankGroup(ranks, ranks if layout.ranks <= gpus_per_node else on_node)
    return groups


# --- weight sync -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LinkUse:
    """The bytes that a sync moves over one kind of link, into or out of the busiest device, and their seconds. The
    least values assume equal parts for all devices, and the link's speed by its data sheet."""

    link: Link
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


def sync_time(case: Case) -> tuple[Seconds, tuple[LinkUse, ...]]:
    """Returns the seconds of a weight sync, by item, and the use of each kind of link, all at once; of none if weights
    are transferred by disk. Engines get all weights, with adapters (train.lora) added."""
    recipe, rollout, machines, assumed = case.grpo, case.grpo.rollout, case.speeds, case.assumptions
    beside, quantized = recipe.cluster.placement == "colocated", rollout.quantization is not None
    sizes = case.layout, rollout.layout, rollout.engines, machines.gpus_per_node, case.item_bytes
    colocated = beside and rollout.kind.started_by_us
    moved = sync_bytes(case.architecture, *sizes, colocated=colocated, quantized=quantized)
    seconds = {"pauses and set-up": assumed.sync_seconds, "digests": moved.held / assumed.digest_bytes_per_second}
    if recipe.transfer == "disk":
        seconds["writing to disk"] = moved.model / assumed.disk_bytes_per_second
        seconds["reading from disk"] = moved.model * rollout.engines / assumed.disk_bytes_per_second
        return seconds, ()
    if quantized:
        held = rank_parameters(case.architecture, case.layout, 0, case.fused_layers).total
        seconds["quantising"] = held * QUANTISING_BYTES / machines.gpu.memory_bytes_per_second
    # An engine rank reads and writes what it holds, and a training rank what it packs.
    packed = moved.held * rollout.engines * rollout.layout.ranks / case.layout.ranks
    copied = moved.held + packed if beside else max(moved.held, packed)
    real, memory = Links.of(machines, assumed), machines.gpu.memory_bytes_per_second / 2

    def use(link: Link, sent: float, spent: float, least: float, speed: float) -> LinkUse:
        return LinkUse(link, sent, spent / assumed.sync_efficiency, least, least / speed)

    uses = (
        use("network", moved.network, moved.network / real.network, moved.network, machines.network_bytes_per_second),
        use("node", moved.node, moved.node / real.node, moved.even_node, machines.gpu.node_bytes_per_second),
        use("device", moved.device, copied / memory, moved.even_device, memory),
    )
    names = {"network": "over the network", "node": "within nodes", "device": "copies"}
    slowest = max(uses, key=lambda link: link.seconds)
    return seconds | {names[slowest.link]: slowest.seconds}, uses


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
            (size, max(1, parts // engine.pipeline // near), max(1, others // devices)) for size, parts, others in cuts
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

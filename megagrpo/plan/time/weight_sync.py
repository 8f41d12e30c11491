"""Seconds of bringing new weights to the engines: the fewest bytes that a plan of boxes can move, over their links.

Arithmetic over whole kinds of ranks, in milliseconds; weights/plan.py makes the real plan and
benchmarks/weight_traffic.py counts it, which takes seconds for hundreds of ranks. A node needs each byte that its
engine ranks hold once from the network if no training rank on it holds it; all training ranks with replicas share the
sending evenly; within the node everything travels over the node's links.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, lcm

from megagrpo.layout.parallel import ParallelLayout
from megagrpo.plan.assumptions import Assumptions
from megagrpo.plan.machines import Machines
from megagrpo.plan.parameters import expert_parameters, total_parameters
from megagrpo.plan.time.communication import Links
from megagrpo.plan.time.seconds import Seconds
from megagrpo.recipe.schema import EngineLayoutConfig, Recipe
from megagrpo.weights.families.architecture import Architecture


@dataclass(frozen=True)
class SyncBytes:
    """Of the busiest device, in the engines' dtype. `held` is what an engine rank holds, `model` the whole model."""

    network: float
    node: float
    held: float
    model: float


def sync_bytes(
    arch: Architecture,
    layout: ParallelLayout,
    engine: EngineLayoutConfig,
    engines: int,
    gpus_per_node: int,
    item_bytes: int,
    *,
    colocated: bool,
) -> SyncBytes:
    """What crosses each kind of link to fill all ranks of all engines once."""
    experts = expert_parameters(arch) * item_bytes
    dense = total_parameters(arch) * item_bytes - experts
    engine_ranks = engines * engine.tensor
    near = min(gpus_per_node, engine_ranks)
    needed = min(1.0, near / engine.tensor)  # of the model, by a node
    there = _held_on(min(gpus_per_node, layout.ranks), layout) if colocated else (0.0, 0.0)
    into_node = dense * max(0.0, needed - there[0]) + experts * max(0.0, needed - there[1])
    if layout.ranks + (0 if colocated else engine_ranks) <= gpus_per_node:
        into_node = 0.0
    into_device = into_node / near
    out_of_device = into_node * ceil(engine_ranks / gpus_per_node) / layout.ranks
    own = (dense + experts) / engine.tensor
    kept = 0.0
    if colocated:
        devices = range(min(near, lcm(engine.tensor, layout.tensor, layout.expert * layout.expert_tensor)))
        kept = min(dense * _kept_dense(d, layout, engine) + experts * _kept_experts(d, layout, engine) for d in devices)
    return SyncBytes(max(into_device, out_of_device), max(0.0, own - kept - into_device), own, dense + experts)


def _held_on(devices: int, layout: ParallelLayout) -> tuple[float, float]:
    """Share of the dense weights and of the experts that lies on that many consecutive training ranks."""
    stages = max(1.0, devices / (layout.ranks / layout.pipeline)) / layout.pipeline
    dense = min(1.0, devices / layout.tensor) * stages
    experts = min(1.0, devices / (layout.expert * layout.expert_tensor)) * stages
    return min(1.0, dense), min(1.0, experts)


def _kept_dense(device: int, layout: ParallelLayout, engine: EngineLayoutConfig) -> float:
    """Share of the dense weights that training rank and engine rank `device` have in common."""
    return _common(device, engine.tensor, device, layout.tensor) / layout.pipeline


def _kept_experts(device: int, layout: ParallelLayout, engine: EngineLayoutConfig) -> float:
    """The same of the experts: whole ones are dealt out in order by both, and each is cut by what is left."""
    shards = engine.tensor // engine.expert
    whole = _common(device // shards, engine.expert, device // layout.expert_tensor, layout.expert)
    return whole * _common(device, shards, device, layout.expert_tensor) / layout.pipeline


def _common(one: int, ones: int, other: int, others: int) -> float:
    """Overlap of part `one` of `ones` equal parts of something with part `other` of `others`; indices wrap around."""
    one, other = one % ones, other % others
    return max(0.0, min((one + 1) / ones, (other + 1) / others) - max(one / ones, other / others))


def sync_seconds(
    recipe: Recipe, arch: Architecture, machines: Machines, assumptions: Assumptions, item_bytes: int
) -> Seconds:
    """By what they are spent on. Engines get all weights, also with train.lora: adapters are added before."""
    rollout = recipe.rollout
    external = rollout.engine == "external"
    engine = EngineLayoutConfig() if rollout.engine == "transformers" else rollout.layout
    found = sync_bytes(
        arch,
        recipe.train.layout.parallel(),
        engine,
        rollout.engines,
        machines.gpus_per_node,
        item_bytes,
        colocated=recipe.cluster.placement == "colocated" and not external,
    )
    links, assumed = Links.of(machines, assumptions), assumptions
    seconds = {
        "pauses and set-up": assumed.sync_seconds,
        "digests": found.held / assumed.digest_bytes_per_second,
    }
    transport = recipe.weights.transfer
    if external if transport == "auto" else transport == "disk":
        seconds["writing to disk"] = found.model / assumed.disk_bytes_per_second
        seconds["reading from disk"] = found.model * rollout.engines / assumed.disk_bytes_per_second
    else:
        network = found.network / (links.network * assumed.sync_efficiency)
        node = found.node / (links.node * assumed.sync_efficiency)
        # A copy within a device reads and writes its memory. All three go on at the same time.
        copies = 2 * found.held / (machines.gpu.memory_bytes_per_second * assumed.sync_efficiency)
        slowest = max(("over the network", network), ("within nodes", node), ("copies", copies), key=lambda one: one[1])
        seconds[slowest[0]] = slowest[1]
    return seconds

"""What lies on each device: the coordinates of its rank, its layers, its engines; and rows of devices side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from megagrpo.layout.parallel import ParallelLayout, RankCoordinates, rank_grid
from megagrpo.recipe.defaults import plan_devices
from megagrpo.recipe.schema import AnyRecipe
from megagrpo.weights.families.architecture import Architecture

ROWS_MAX = 32


@dataclass(frozen=True)
class MappedDevice:
    """One device. `gpu` counts within its node. `rank` is None where only engines are."""

    device: int
    node: int
    gpu: int
    rank: RankCoordinates | None
    engines: tuple[int, ...]
    engine_rank: int | None  # tensor rank of the engines that lie here; None: no engine does

    @property
    def stage(self) -> int:
        """Pipeline stage; -1 where only engines are."""
        return -1 if self.rank is None else self.rank.pipeline


@dataclass(frozen=True)
class Axis:
    """One way of splitting: groups of `size` ranks, `stride` apart, as `example`; each reaches over `nodes` nodes."""

    name: str
    size: int
    stride: int
    example: tuple[int, ...]
    nodes: int


def device_map(recipe: AnyRecipe, device: str) -> tuple[MappedDevice, ...]:
    """Every device of the device plan, in order."""
    plan, per_node = plan_devices(recipe, device), recipe.cluster.gpus_per_node
    ranks = dict(zip(plan.bundle_of_rank, rank_grid(recipe.train.layout.parallel()), strict=True))
    engines: dict[int, list[int]] = {}
    engine_rank: dict[int, int] = {}
    for engine, bundles in enumerate(plan.bundles_of_engine):
        for position, bundle in enumerate(bundles):
            engines.setdefault(bundle, []).append(engine)
            engine_rank[bundle] = position
    return tuple(
        MappedDevice(at, at // per_node, at % per_node, ranks.get(at), tuple(engines.get(at, ())), engine_rank.get(at))
        for at in range(plan.bundles)
    )


def rows(devices: Sequence[MappedDevice]) -> list[tuple[MappedDevice, ...]]:
    """Devices that lie side by side: each by itself while they are few, else by stage and node, else by stage."""
    if len(devices) <= ROWS_MAX // 2:
        return [(mapped,) for mapped in devices]
    by_node = [tuple(group) for _, group in groupby(devices, lambda mapped: (mapped.stage, mapped.node))]
    if len(by_node) <= ROWS_MAX // 2:
        return by_node
    by_stage = [tuple(group) for _, group in groupby(devices, lambda mapped: mapped.stage)]
    together = -(-len(by_stage) // ROWS_MAX)
    return [
        tuple(mapped for group in by_stage[first : first + together] for mapped in group)
        for first in range(0, len(by_stage), together)
    ]


def axes(recipe: AnyRecipe, architecture: Architecture) -> list[Axis]:
    """Every axis of more than one rank, as its first group lies; those of experts only where there are experts."""
    layout, per_node = recipe.train.layout.parallel(), recipe.cluster.gpus_per_node
    per_stage = layout.ranks // layout.pipeline
    strides = {
        "tensor": (layout.tensor, 1),
        "context": (layout.context, layout.tensor),
        "data": (layout.data, layout.tensor * layout.context),
        "pipeline": (layout.pipeline, per_stage),
    }
    if architecture.experts is not None:
        inner = layout.expert_tensor * layout.expert
        strides |= {
            "expert_tensor": (layout.expert_tensor, 1),
            "expert": (layout.expert, layout.expert_tensor),
            "expert_data": (layout.expert_data, inner),
        }
    found = []
    for name, (size, stride) in strides.items():
        if size > 1:
            example = tuple(range(0, size * stride, stride))
            found.append(Axis(name, size, stride, example, _most_nodes(layout, size, stride, per_node)))
    return found


def _most_nodes(layout: ParallelLayout, size: int, stride: int, per_node: int) -> int:
    """Nodes that the widest group touches: groups that begin at other places of a node may reach over one more."""
    block = size * stride
    starts = (first + offset for first in range(0, layout.ranks, block) for offset in range(stride))
    seen: set[int] = set()  # groups that begin at the same place of a node are alike
    most = 1
    for start in starts:
        if start % per_node not in seen:
            seen.add(start % per_node)
            most = max(most, len({(start + member * stride) // per_node for member in range(size)}))
    return most


def ranks_text(ranks: Sequence[int]) -> str:
    """`0-7`, or `0, 8, 16, ... 120`."""
    if ranks[1] - ranks[0] == 1:
        return f"{ranks[0]}-{ranks[-1]}"
    shown = [str(rank) for rank in ranks]
    return ", ".join(shown) if len(shown) <= 4 else f"{', '.join(shown[:3])}, ... {shown[-1]}"

"""A map of the devices: each one's rank coordinates and engines, rows of devices, and the groups of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from megagrpo.layout.parallel import RankCoordinates, rank_grid
from megagrpo.plan.case import Case
from megagrpo.recipe.schema import SftRecipe

ROWS_MAX = 32


@dataclass(frozen=True)
class MappedDevice:
    """One device. `gpu` counts within its node. `rank` is None on a device of engines alone."""

    device: int
    node: int
    gpu: int
    rank: RankCoordinates | None
    engines: tuple[int, ...]
    engine_rank: int | None  # rank in these engines; None without engines
    reward_model: str | None = None  # its name in reward.models; None on other devices

    @property
    def stage(self) -> int:
        """Returns the pipeline stage of its rank; -1 without a rank."""
        return -1 if self.rank is None else self.rank.pipeline


@dataclass(frozen=True)
class Axis:
    """A dimension of the layout. Its groups have `size` ranks, `stride` apart; `example` is the group of rank 0, and
    `nodes` counts the nodes of the widest group."""

    name: str
    size: int
    stride: int
    example: tuple[int, ...]
    nodes: int


def device_map(case: Case) -> tuple[MappedDevice, ...]:
    """Returns every device of the device plan, in order."""
    plan, per_node = case.device_plan, case.recipe.cluster.gpus_per_node
    ranks = dict(zip(plan.bundle_of_rank, rank_grid(case.layout), strict=True))
    engines: dict[int, list[int]] = {}
    engine_rank: dict[int, int] = {}
    for engine, bundles in enumerate(plan.bundles_of_engine):
        for position, bundle in enumerate(bundles):
            engines.setdefault(bundle, []).append(engine)
            engine_rank[bundle] = position
    names = () if isinstance(case.recipe, SftRecipe) else tuple(case.recipe.reward.models)
    models = {at: name for name, own in zip(names, plan.bundles_of_model, strict=True) for at in own}
    found = []
    for at in range(plan.bundles):
        of_engines = tuple(engines.get(at, ())), engine_rank.get(at)
        found.append(MappedDevice(at, *divmod(at, per_node), ranks.get(at), *of_engines, models.get(at)))
    return tuple(found)


def rows(devices: Sequence[MappedDevice]) -> list[tuple[MappedDevice, ...]]:
    """Returns the devices of each table row: one while they are few, else a stage's on a node, else whole stages'."""
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


def axes(case: Case) -> list[Axis]:
    """Returns every axis of more than one rank; expert axes only for models with experts."""
    layout, per_node = case.layout, case.recipe.cluster.gpus_per_node
    strides = {
        "tensor": (layout.tensor, 1),
        "context": (layout.context, layout.tensor),
        "data": (layout.data, layout.tensor * layout.context),
        "pipeline": (layout.pipeline, layout.ranks // layout.pipeline),
    }
    if case.architecture.experts is not None:
        strides |= {
            "expert_tensor": (layout.expert_tensor, 1),
            "expert": (layout.expert, layout.expert_tensor),
            "expert_data": (layout.expert_data, layout.expert_tensor * layout.expert),
        }
    found = []
    for name, (size, stride) in strides.items():
        if size > 1:
            # Groups that begin at the same place of a node touch as many nodes.
            blocks = range(0, layout.ranks, size * stride)
            starts = {(first + offset) % per_node for first in blocks for offset in range(stride)}
            nodes = max(len({(start + rank * stride) // per_node for rank in range(size)}) for start in starts)
            found.append(Axis(name, size, stride, tuple(range(0, size * stride, stride)), nodes))
    return found


def ranks_text(ranks: Sequence[int]) -> str:
    """Formats ranks like `0-7`, or `0, 8, 16, ... 120`."""
    if ranks[1] - ranks[0] == 1:
        return f"{ranks[0]}-{ranks[-1]}"
    shown = [str(rank) for rank in ranks]
    return ", ".join(shown) if len(shown) <= 4 else f"{', '.join(shown[:3])}, ... {shown[-1]}"

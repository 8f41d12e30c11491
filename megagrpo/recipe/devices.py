"""Which devices ranks and engines get: one Ray bundle per device."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from megagrpo.recipe.defaults import engine_devices
from megagrpo.recipe.schema import AnyRecipe, SftRecipe


@dataclass(frozen=True)
class DevicePlan:
    """Bundle of every training rank, and bundles of every engine. Colocated ones share bundles and take turns.

    An engine has as many bundles as it has tensor ranks, side by side; none if somebody else runs it.
    """

    resource: str  # "GPU" or "CPU": what one device is to Ray
    bundles: int
    bundle_of_rank: tuple[int, ...]
    bundles_of_engine: tuple[tuple[int, ...], ...]
    rank_share: float  # of a device
    engine_share: float  # of its first device, where its actor runs


def plan_devices(recipe: AnyRecipe, device: str) -> DevicePlan:
    """Ranks on the first devices in rank order; engines beside them (colocated) or on devices of their own."""
    ranks = recipe.train.layout.parallel().ranks
    resource = "GPU" if device == "cuda" else "CPU"
    of_rank = tuple(range(ranks))
    if isinstance(recipe, SftRecipe):
        return DevicePlan(resource, ranks, of_rank, (), 1.0, 0.0)
    engines, each = recipe.rollout.engines, engine_devices(recipe)
    if each == 0:
        return DevicePlan(resource, ranks, of_rank, ((),) * engines, 1.0, 0.0)
    if recipe.cluster.placement == "colocated":
        of_engine = _blocks(engines, ranks // each, each, first=0)
        return DevicePlan(resource, ranks, of_rank, of_engine, 0.5, 0.5 / _crowd(of_engine))
    own = recipe.cluster.engine_devices or engines * each
    of_engine = _blocks(engines, own // each, each, first=ranks)
    return DevicePlan(resource, ranks + own, of_rank, of_engine, 1.0, 1.0 / _crowd(of_engine))


def _blocks(engines: int, blocks: int, each: int, first: int) -> tuple[tuple[int, ...], ...]:
    """Engines dealt out evenly over `blocks` runs of `each` devices."""
    starts = [first + i * blocks // engines * each for i in range(engines)]
    return tuple(tuple(range(start, start + each)) for start in starts)


def _crowd(of_engine: tuple[tuple[int, ...], ...]) -> int:
    """Most engines that share a device."""
    return max(Counter(bundles[0] for bundles in of_engine).values())

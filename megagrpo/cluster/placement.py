"""Which devices ranks and engines get: one Ray bundle per device."""

from __future__ import annotations

from dataclasses import dataclass

from megagrpo.recipe.schema import Recipe


@dataclass(frozen=True)
class DevicePlan:
    """Bundle index of every training rank and every engine. Colocated ones share a bundle and take turns."""

    resource: str  # "GPU" or "CPU": what one device is to Ray
    bundles: int
    bundle_of_rank: tuple[int, ...]
    bundle_of_engine: tuple[int, ...]
    rank_share: float  # of a device
    engine_share: float


def plan_devices(recipe: Recipe, device: str) -> DevicePlan:
    """Ranks on the first devices in rank order; engines beside them (colocated) or on devices of their own."""
    ranks = recipe.train.layout.parallel().ranks
    engines = recipe.rollout.engines
    resource = "GPU" if device == "cuda" else "CPU"
    if recipe.cluster.placement == "colocated":
        of_engine = tuple(i * ranks // engines if engines <= ranks else i % ranks for i in range(engines))
        engines_per_device = max(of_engine.count(bundle) for bundle in of_engine)
        return DevicePlan(resource, ranks, tuple(range(ranks)), of_engine, 0.5, 0.5 / engines_per_device)
    own = recipe.cluster.engine_devices or engines
    of_engine = tuple(ranks + i * own // engines for i in range(engines))
    return DevicePlan(
        resource, ranks + own, tuple(range(ranks)), of_engine, 1.0, 1.0 / max(of_engine.count(b) for b in of_engine)
    )

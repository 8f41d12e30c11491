"""What cannot run on a plan's machines: too little memory on a card, engines over the edge of a node."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megagrpo.errors import Problem
from megagrpo.plan.machines import Machines
from megagrpo.plan.memory.engine import EngineMemory, engine_memory
from megagrpo.plan.memory.parts import DeviceMemory, Part, PhaseMemory
from megagrpo.plan.units import byte_text
from megagrpo.recipe.defaults import engine_devices, plan_devices
from megagrpo.recipe.schema import AnyRecipe, SftRecipe
from megagrpo.weights.families.architecture import Architecture


def memory_problems(
    recipe: AnyRecipe, architecture: Architecture, held: Sequence[DeviceMemory], machines: Machines | None
) -> Iterator[Problem]:
    """The fullest device, if it needs more than a card has: one problem, since one change moves all of them. And an
    engine without room for a single response."""
    if machines is None:
        return
    engine = engine_on(recipe, architecture, machines)
    if engine is not None and engine.sequences == 0:
        yield Problem(
            "rollout.layout.tensor",
            given=f"weights of {byte_text(engine.weights)} on each GPU of an engine, and a cache of "
            f"{engine.cache_tokens} tokens beside them on one {machines.gpu.name}",
            needed=f"{engine.longest} tokens: the longest prompt and response",
            fix="more tensor ranks in each engine, or shorter responses",
        )
    kind = max(held, key=lambda kind: kind.fullest.bytes)
    fullest, card = kind.fullest, machines.gpu.memory_bytes
    if fullest.bytes <= card:
        return
    largest = max(fullest.parts, key=lambda part: part.bytes)
    lowered = next((part for part in _by_size(fullest) if part.lowered_by), largest)
    more = "" if lowered is largest else f" ({lowered.name})"
    yield Problem(
        f"memory of {kind.name}, {fullest.phase}",
        given=f"{byte_text(fullest.bytes)}, most of it {largest.name}: {byte_text(largest.bytes)}",
        needed=f"at most {byte_text(card)} of one {machines.gpu.name}: {byte_text(fullest.bytes - card)} too much",
        fix=f"change {', '.join(lowered.lowered_by)}{more}, or see what fits with --search",
    )


def node_problems(recipe: AnyRecipe) -> Iterator[Problem]:
    """Engines on GPUs of two nodes: a server's ranks are processes of one node."""
    if isinstance(recipe, SftRecipe) or recipe.cluster.device == "cpu":
        return
    per_node = recipe.cluster.gpus_per_node
    for engine, devices in enumerate(plan_devices(recipe, "cuda").bundles_of_engine):
        if len({device // per_node for device in devices}) > 1:
            yield Problem(
                "rollout.layout.tensor",
                given=f"{len(devices)}, which puts engine {engine} on GPUs {devices[0]}-{devices[-1]}, over nodes",
                needed=f"engines within nodes of {per_node} GPUs (cluster.gpus_per_node)",
                fix=f"a divisor of {per_node}, and a number of engines and of training ranks that fills nodes",
            )
            return


def engine_on(recipe: AnyRecipe, architecture: Architecture, machines: Machines | None) -> EngineMemory | None:
    """What a rank of an engine holds on a known card; None for recipes without engines of their own."""
    if machines is None or isinstance(recipe, SftRecipe) or engine_devices(recipe) == 0:
        return None
    return engine_memory(recipe, architecture, machines.gpu.memory_bytes, "cuda")


def _by_size(phase: PhaseMemory) -> list[Part]:
    return sorted(phase.parts, key=lambda part: part.bytes, reverse=True)

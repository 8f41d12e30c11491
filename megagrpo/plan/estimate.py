"""Memory and time of a recipe on some machines: what a plan shows and a search compares."""

from __future__ import annotations

from dataclasses import dataclass

from megagrpo.plan.assumptions import Assumptions
from megagrpo.plan.machines import Machines
from megagrpo.plan.memory.device_memory import memory
from megagrpo.plan.memory.parts import DeviceMemory
from megagrpo.plan.time.seconds import StepTime
from megagrpo.plan.time.step_time import step_time
from megagrpo.recipe.schema import AnyRecipe
from megagrpo.weights.families.architecture import Architecture


@dataclass(frozen=True)
class Estimate:
    """What a recipe needs and how long its steps take on some machines. `memory` has one entry for each kind of device.

    `lacking_bytes`: how much the fullest device has too little; 0 if everything fits.
    """

    memory: tuple[DeviceMemory, ...]
    time: StepTime
    lacking_bytes: int

    @property
    def fits(self) -> bool:
        return self.lacking_bytes == 0


def estimate(
    recipe: AnyRecipe,
    architecture: Architecture,
    machines: Machines,
    assumptions: Assumptions,
    critic: Architecture | None = None,
) -> Estimate:
    """What the recipe needs, and how long its steps take, on these GPUs. Its rules must hold (preflight/)."""
    held = memory(recipe, architecture, machines, "cuda", critic, assumptions.expert_imbalance)
    time = step_time(recipe, architecture, machines, assumptions, critic)
    return Estimate(held, time, lacking_bytes(held, machines))


def lacking_bytes(held: tuple[DeviceMemory, ...], machines: Machines, spare: float = 0.0) -> int:
    """How much the fullest device has too little; 0 if everything fits. `spare` is a share of a card to leave free."""
    return max(0, max(kind.fullest.bytes for kind in held) - int(machines.gpu.memory_bytes * (1 - spare)))

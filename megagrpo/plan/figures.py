"""What a plan says in numbers: memory by device and phase, seconds by phase. Plain data for printers and searches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Part:
    """One item on a device during a phase. `lowered_by` names recipe fields that make it smaller, best first."""

    name: str
    bytes: int
    lowered_by: tuple[str, ...] = ()


@dataclass(frozen=True)
class PhaseMemory:
    """What lies on a device at the fullest moment of a phase: rollout, logprobs, update or weight_sync."""

    phase: str
    parts: tuple[Part, ...]

    @cached_property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)


@dataclass(frozen=True)
class DeviceMemory:
    """Devices that hold equally much, as those of one pipeline stage. `devices` are indices in the device plan."""

    name: str
    devices: tuple[int, ...]
    phases: tuple[PhaseMemory, ...]

    @cached_property
    def fullest(self) -> PhaseMemory:
        return max(self.phases, key=lambda phase: phase.bytes)


@dataclass(frozen=True)
class PhaseTime:
    """Seconds of one phase of a step, and what they are made of: pairs of a name and seconds, which add up to them.

    `phase` is rollout, reward, logprobs, update or weight_sync, as in the metrics seconds/PHASE; or driver, what is
    between them.
    """

    phase: str
    parts: tuple[tuple[str, float], ...]

    @cached_property
    def seconds(self) -> float:
        return sum(seconds for _, seconds in self.parts)


@dataclass(frozen=True)
class StepTime:
    """Expected seconds of one step. `tokens` are the prompt and response tokens of its samples."""

    phases: tuple[PhaseTime, ...]
    tokens: float
    gpus: int
    steps: int | None  # None: the recipe counts epochs, and the data's size is not known

    @cached_property
    def seconds(self) -> float:
        return sum(phase.seconds for phase in self.phases)

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.tokens / self.seconds / self.gpus

    @property
    def days(self) -> float | None:
        return None if self.steps is None else self.steps * self.seconds / 86400


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

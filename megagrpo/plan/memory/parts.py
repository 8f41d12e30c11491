"""Memory in numbers: what lies on each kind of device in each phase. Plain data for printers and searches."""

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

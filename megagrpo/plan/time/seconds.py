"""Time in numbers: the phases of a step, and what each is made of. Plain data for printers and searches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

Seconds = dict[str, float]
"""By what they are spent on."""


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
    steps: int | None  # None: the recipe counts epochs, and nobody said how many rows one has

    @cached_property
    def seconds(self) -> float:
        return sum(phase.seconds for phase in self.phases)

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.tokens / self.seconds / self.gpus

    @property
    def pipeline_bubble(self) -> float:
        """Share of the update in which pipeline stages wait for one another."""
        update = next(phase for phase in self.phases if phase.phase == "update")
        return dict(update.parts).get("pipeline bubble", 0.0) / update.seconds

    @property
    def days(self) -> float | None:
        return None if self.steps is None else self.steps * self.seconds / 86400


def added(*parts: Mapping[str, float]) -> Seconds:
    """Seconds of one thing after the other, by what they are spent on."""
    total: Seconds = {}
    for part in parts:
        for name, seconds in part.items():
            total[name] = total.get(name, 0.0) + seconds
    return total

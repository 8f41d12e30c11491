"""schedule: the waits between sampling, training and the weight sync."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from megagrpo.section import ByName, Count, NonNegativeInt, Rules, Section

Staleness = Annotated[int, Field(ge=0, le=1000)]


class SyncConfig(Section):
    """One stage after another: a step samples, trains on its samples, and sends the weights to the engines."""

    kind: Literal["sync"]

    carry_over: NonNegativeInt = 0
    """Prompts beyond rollout.prompts_per_step that are sampled at once. Sampling ends when a step has its groups; what
    is incomplete then resumes in the next step, after its tokens so far. 0: a step waits for all its prompts."""

    oversample: NonNegativeInt = 0
    """Prompts beyond rollout.prompts_per_step that are sampled at once. Sampling ends when a step has its groups, and
    the rest is thrown away: training sees shorter responses than were sampled. The metrics cut/* say by how much.
    carry_over ends sampling as early, and throws nothing away."""

    max_staleness: Staleness = 0
    """Only with carry_over. Versions that the weights may be ahead of those with which a group began, when it is
    trained on. A step waits for groups that would become older."""

    @property
    def beyond(self) -> int:
        """Returns the prompts sampled at once beyond those that a step trains on. 0: a step waits for all its own."""
        return self.carry_over + self.oversample

    RULES: ClassVar[Rules[SyncConfig]] = {
        "oversample_and_carry_over": lambda sync: sync.carry_over and sync.oversample,
        "carry_over_without_staleness": lambda sync: sync.carry_over and not sync.max_staleness,
        "staleness_without_carry_over": lambda sync: sync.max_staleness and not sync.carry_over,
    }


class OneStepOffConfig(Section):
    """Sampling of a step's prompts while the step before it trains. Engines finish them before they get new weights."""

    kind: Literal["one_step_off"]

    @property
    def max_staleness(self) -> int:
        return 1


class AsyncConfig(Section):
    """Continuous sampling by the engines. A step trains on the oldest groups that are complete."""

    kind: Literal["async"]

    max_staleness: Staleness = 2
    """Versions that the weights may be ahead of those with which a group began, when it is trained on. A prompt begins
    only if this can be kept, and a step waits for groups that would become older. 0 gives the numbers of sync."""

    prompts_at_once: Count | None = None
    """Most prompts that have begun and are not trained on. null: rollout.prompts_per_step x (1 + max_staleness)."""


ScheduleConfig = Annotated[SyncConfig | OneStepOffConfig | AsyncConfig, ByName(key="kind", default="sync")]

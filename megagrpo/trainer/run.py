"""The objects that the stages of a step work with, its results, and the clock of its phases."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from megagrpo.algorithm.mismatch import Mismatch
from megagrpo.batching.work import Work
from megagrpo.checkpoint.groups import Pending
from megagrpo.cluster.rollouts import Rollouts
from megagrpo.cluster.stopping import Stopping
from megagrpo.cluster.train_ranks import Policy
from megagrpo.cluster.weight_sync import WeightSync
from megagrpo.data.cursor import Cursor
from megagrpo.errors import MegagrpoError
from megagrpo.progress import progress
from megagrpo.recipe.schema import Recipe
from megagrpo.reward.scorer import Scorer
from megagrpo.timeline import TIMELINE
from megagrpo.track.jsonl import StepProof
from megagrpo.track.rollout_writer import Learned
from megagrpo.trainer.batches import Sampled
from megagrpo.trainer.teachers import Teachers
from megagrpo.types import Prompt

SHOWN_AS = {
    "logprobs": "computing logprobs",
    "update": "updating",
    "weight_sync": "bringing weights to the engines",
    "eval": "evaluating",
    "save_batch": "saving the batch",
    "checkpoint": "saving a checkpoint",
    "export": "exporting a model",
}
"""Phases as progress shows them. Sampling and scoring report their own progress."""


class PhaseClock:
    """Adds up wall-clock seconds by phase name until `take` empties it."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            shown = progress(SHOWN_AS[name]) if name in SHOWN_AS else nullcontext()
            with TIMELINE.span("driver", name), shown:
                yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """Returns the metrics `seconds/<phase>` since the last call."""
        taken = {f"seconds/{name}": seconds for name, seconds in self._seconds.items()}
        self._seconds = {}
        return taken


@dataclass(frozen=True)
class TrainRun:
    """The training half of a run whose ranks have started: all that training on given samples needs."""

    recipe: Recipe
    total_steps: int
    policy: Policy
    clock: PhaseClock
    work: Work  # the policy's; data ranks get equal parts of it


@dataclass(frozen=True)
class Run(TrainRun):
    """A run of GRPO or PPO whose processes have started. Stages get it whole; it holds no result of a stage."""

    cursor: Cursor[Prompt]
    rollouts: Rollouts
    scorer: Scorer
    teachers: Teachers
    weights: WeightSync
    stopping: Stopping


class SampleSource(Protocol):
    """A source of the samples that steps train on.

    Its kinds: Live (schedule.py), Background (sampling.py), Logged (schedule_log.py), Untrained and Saved
    (one_half.py).
    """

    def next(self, step: int) -> Sampled:
        """Returns the samples of `step` with their scores. Raises StopRequested if the run is told to stop before that;
        the training ranks are then as before the step."""

    def sync(self, version: int, *, changed: bool) -> None:
        """Brings the policy's weights to the engines, if there are any and the run is not told to stop. changed: the
        step has changed them."""

    def metrics(self) -> dict[str, float]:
        """Returns metrics of sampling, scoring and syncs since the last call."""
        return {}

    def pending(self) -> Pending | None:
        """Returns the samples of later steps, for a checkpoint."""
        return None

    def drop(self) -> None:
        """Cancels all that is sampled for later steps."""
        return  # most kinds sample nothing; without a return it would be abstract

    def close(self) -> None:
        """Ends the threads that sample for later steps."""
        return


@dataclass(frozen=True)
class Step:
    """The results of a step: for the trackers, for the checkpoint and for the next step."""

    metrics: dict[str, float]
    tokens: int  # prompts and responses, or examples: for tokens_per_second
    responses: int = 0  # generated for training
    kl_coefficient: float | None = None  # of the next step
    failure: MegagrpoError | None = None  # ends the run once the step is saved
    pending: Pending | None = None  # as SampleSource has it after the step
    # Not in fine-tuning:
    sampled: Sampled = field(default_factory=lambda: Sampled([], []))
    learned: Learned | None = None  # of the samples of `sampled.groups`
    mismatch: Mismatch | None = None  # of the same rows; None: the policy was not trained
    proof: StepProof | None = None  # as `mismatch`

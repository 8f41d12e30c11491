"""The order of a step's stages: which waits for which, whose memory is free meanwhile, and what a stop gives up.

synchronous      sample all, train, sync
carrying_over    the same, but sampling ends when the step has its groups; the others continue in the next step, or are
                 dropped (oversample)
asynchronous     engines sample while the ranks train
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megagrpo.algorithm.mismatch import Mismatch
from megagrpo.errors import EngineError, MegagrpoError, NodeLostError, WeightSyncError
from megagrpo.recipe.schema.schedule import OneStepOffConfig, SyncConfig
from megagrpo.track.rollout_writer import Learned
from megagrpo.trainer.batches import Sampled
from megagrpo.trainer.run import Run
from megagrpo.trainer.sampling import Sampling
from megagrpo.trainer.schedule_log import schedule_line
from megagrpo.trainer.step import load, sample, solved_prompts, sync, train, what_was_learned
from megagrpo.trainer.step_metrics import step_metrics
from megagrpo.types import Group


@dataclass(frozen=True)
class Step:
    """The results of a step: for the trackers, and for the next step."""

    metrics: dict[str, float]
    groups: Sequence[Group]  # those that the step could train on; rows of `mismatch` are their samples
    sampled: Sequence[Group]  # all that were sampled, `groups` among them
    learned: Learned  # of the samples of `groups`
    mismatch: Mismatch | None  # None: the policy was not trained
    kl_coefficient: float  # of the next step
    failure: MegagrpoError | None = None  # engines did not get the new weights
    logged: dict[str, Any] | None = None  # its line of schedule.jsonl, if groups were sampled in the background


def grpo_step(run: Run, step: int, kl_coefficient: float) -> Step:
    """Runs step `step` (the first is 1), in the order of the recipe's schedule.

    The weight version afterwards is `step`, unless the run is told to stop. Raises StopRequested if it is told to stop
    before everything is scored; the training ranks are then as before the step.
    """
    if run.sampling is None:
        return synchronous(run, step, kl_coefficient)
    if isinstance(run.recipe.schedule, SyncConfig):
        return carrying_over(run, run.sampling, step, kl_coefficient)
    return asynchronous(run, run.sampling, step, kl_coefficient)


def synchronous(run: Run, step: int, kl_coefficient: float) -> Step:
    """Runs one stage after another: the weights that the step trains sample its groups. In a replay of another run's
    schedule, older weights sample some of them."""
    with run.stopping.giving_up(), run.policy.released():
        sampled = run.replayed.sample(run, step) if run.replayed else sample(run, step)
        run.rollouts.release_memory()
    return trained_step(run, sampled, step, kl_coefficient)


def carrying_over(run: Run, sampling: Sampling, step: int, kl_coefficient: float) -> Step:
    """Ends sampling when the step has its groups. Incomplete groups continue in the next step; with oversample they are
    dropped."""
    with run.stopping.giving_up(), run.policy.released():
        with run.clock.phase("rollout"):
            sampling.go_on()
            sampled = sampling.take(then_pause=True)
            sampling.pause()
            if isinstance(schedule := run.recipe.schedule, SyncConfig) and schedule.oversample:
                sampled = sampling.cut(sampled)
        run.rollouts.release_memory()
    return trained_step(run, sampled, step, kl_coefficient)


def asynchronous(run: Run, sampling: Sampling, step: int, kl_coefficient: float) -> Step:
    """Trains the step while engines sample, and continue to sample as they get its weights. With one_step_off they
    begin no more than the next step's prompts, and finish them before they get weights."""
    with run.stopping.giving_up(), run.clock.phase("rollout"):
        sampling.go_on()
        sampled = sampling.take()
    return trained_step(run, sampled, step, kl_coefficient)


def trained_step(run: Run, sampled: Sampled, step: int, kl_coefficient: float) -> Step:
    """Trains on a step's samples, syncs the weights and collects metrics; shared by all schedules."""
    rate = run.recipe.data.no_resampling_pass_rate
    if rate is not None:
        (run.sampling or run.cursor).set_aside(solved_prompts(sampled.all, rate))

    loaded = load(run, sampled, step, kl_coefficient)
    trained = train(run, loaded, step, kl_coefficient)
    learned = what_was_learned(run, sampled, loaded, trained)
    failure = None
    try:
        if run.sampling and isinstance(run.recipe.schedule, OneStepOffConfig):
            with run.clock.phase("rollout"):
                run.sampling.finish()  # also before a stop: what was sampled is saved
        if not run.stopping.requested:
            sync(run, version=step, changed=trained.changed)
            if run.sampling:
                run.sampling.advance(step)
    except (EngineError, WeightSyncError, NodeLostError) as error:
        failure = error

    metrics = step_metrics(run, sampled, loaded, trained, step, kl_coefficient)
    mismatch = trained.policy.mismatch if trained.policy else None
    logged = schedule_line(step, sampled) if sampled.begun else None
    return Step(metrics, sampled.groups, sampled.all, learned, mismatch, trained.kl_coefficient, failure, logged)

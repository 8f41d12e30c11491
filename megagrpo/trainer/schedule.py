"""When the stages of a step run: what waits for what, whose memory is free meanwhile, and what a stop gives up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megagrpo.algorithm.mismatch import Mismatch
from megagrpo.errors import EngineError, MegagrpoError, WeightSyncError
from megagrpo.trainer.run import Run
from megagrpo.trainer.step import load, sample, solved_prompts, sync, train
from megagrpo.trainer.step_metrics import step_metrics
from megagrpo.types import Group


@dataclass(frozen=True)
class Step:
    """What a step leaves behind: for the trackers, and for the next step."""

    metrics: dict[str, float]
    groups: Sequence[Group]  # those that the step could train on; rows of `mismatch` are their samples
    sampled: Sequence[Group]  # all that were sampled, `groups` among them
    mismatch: Mismatch | None  # None: the policy was not trained
    kl_coefficient: float  # of the next step
    failure: MegagrpoError | None = None  # engines did not get the new weights


def grpo_step(run: Run, step: int, kl_coefficient: float) -> Step:
    """Step `step` (the first is 1), one stage after another: samples come from the weights that are then trained.

    The weight version afterwards is `step`, unless the run is told to stop. Raises StopRequested if it is told so
    before everything is scored; the training ranks are then as before the step.
    """
    with run.stopping.giving_up(), run.policy.released():
        sampled = sample(run, step)
        run.rollouts.release_memory()
    rate = run.recipe.data.no_resampling_pass_rate
    if rate is not None:
        run.cursor.set_aside(solved_prompts(sampled.all, rate))

    loaded = load(run, sampled, step, kl_coefficient)
    trained = train(run, loaded, step, kl_coefficient)
    failure = None
    if not run.stopping.requested:
        try:
            sync(run, version=step)
        except (EngineError, WeightSyncError) as error:
            failure = error

    metrics = step_metrics(run, sampled, loaded, trained, step, kl_coefficient)
    mismatch = trained.policy.mismatch if trained.policy else None
    return Step(metrics, sampled.groups, sampled.all, mismatch, trained.kl_coefficient, failure)

"""The order of a step's stages: which waits for which, whose memory is free meanwhile, and what a stop gives up.

synchronous      sample all, train, sync
carrying_over    the same, but sampling ends when the step has its groups; the others continue in the next step, or are
                 dropped (oversample)
asynchronous     engines sample while the ranks train
"""

from __future__ import annotations

from megagrpo.errors import EngineError, MegagrpoError, NodeLostError, WeightSyncError
from megagrpo.recipe.schema.schedule import OneStepOffConfig, SyncConfig
from megagrpo.trainer.batches import Sampled
from megagrpo.trainer.run import Run, Step, TrainRun
from megagrpo.trainer.sampling import Sampling
from megagrpo.trainer.step import Trained, load, sample, set_solved_aside, sync, train, what_was_learned
from megagrpo.trainer.step_metrics import step_metrics


def grpo_step(run: Run, step: int, kl_coefficient: float) -> Step:
    """Runs step `step` (the first is 1), in the order of the recipe's schedule.

    The weight version afterwards is `step`, unless the run is told to stop. Raises StopRequested if it is told to stop
    before everything is scored; the training ranks are then as before the step.
    """
    with run.stopping.giving_up():
        if run.sampling is None:
            sampled = synchronous(run, step)
        elif isinstance(run.recipe.schedule, SyncConfig):
            sampled = carrying_over(run, run.sampling, run.recipe.schedule)
        else:
            sampled = asynchronous(run, run.sampling)
    return trained_step(run, sampled, step, kl_coefficient)


def synchronous(run: Run, step: int) -> Sampled:
    """Samples all of the step with the weights that it trains. In a replay of another run's schedule, older weights
    sample some of it."""
    with run.policy.released():
        sampled = run.replayed.sample(run, step) if run.replayed else sample(run, step)
        run.rollouts.release_memory()
    return sampled


def carrying_over(run: Run, sampling: Sampling, schedule: SyncConfig) -> Sampled:
    """Ends sampling when the step has its groups. Incomplete groups continue in the next step; with oversample they are
    dropped."""
    with run.policy.released():
        with run.clock.phase("rollout"):
            sampling.go_on()
            sampled = sampling.take(then_pause=True)
            sampling.pause()
            if schedule.oversample:
                sampled = sampling.cut(sampled)
        run.rollouts.release_memory()
    return sampled


def asynchronous(run: Run, sampling: Sampling) -> Sampled:
    """Takes the step's groups while engines continue to sample, also as they get its weights. With one_step_off they
    begin no more than the next step's prompts, and finish them before they get weights."""
    with run.clock.phase("rollout"):
        sampling.go_on()
        return sampling.take()


def trained_step(run: TrainRun, sampled: Sampled, step: int, kl_coefficient: float) -> Step:
    """Trains on a step's samples, then brings the weights to the engines, if there are any. All schedules share it, and
    runs on saved samples."""
    if isinstance(run, Run):
        set_solved_aside(run, sampled)
    loaded = load(run, sampled, step, kl_coefficient)
    trained = train(run, loaded, step, kl_coefficient)
    learned = what_was_learned(run, sampled, loaded, trained)
    failure = _synced(run, step, trained) if isinstance(run, Run) else None
    return Step(
        metrics=step_metrics(run, sampled, loaded, trained, step, kl_coefficient),
        tokens=sum(group.sequence_tokens for group in sampled.all),
        kl_coefficient=trained.kl_coefficient,
        failure=failure,
        sampled=sampled,
        learned=learned,
        mismatch=trained.policy.mismatch if trained.policy else None,
    )


def _synced(run: Run, step: int, trained: Trained) -> MegagrpoError | None:
    """Brings the weights to the engines, unless the run is told to stop; returns the error if they did not get them."""
    try:
        if run.sampling and isinstance(run.recipe.schedule, OneStepOffConfig):
            with run.clock.phase("rollout"):
                run.sampling.finish()  # also before a stop: what was sampled is saved
        if not run.stopping.requested:
            sync(run, version=step, changed=trained.changed)
            if run.sampling:
                run.sampling.advance(step)
    except (EngineError, WeightSyncError, NodeLostError) as error:
        return error
    return None

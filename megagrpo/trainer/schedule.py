"""The order of a step's stages, which is the same for every source of samples; and the source of the plain schedule.

A schedule is a source: its `next` decides what samples while the ranks train, whose memory is free meanwhile, and what
a stop gives up.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from megagrpo.errors import EngineError, MegagrpoError, NodeLostError, WeightSyncError
from megagrpo.trainer.batches import Sampled
from megagrpo.trainer.run import Run, SampleSource, Step, TrainRun
from megagrpo.trainer.step import learned_of, load, sample, solved_prompts, sync, train
from megagrpo.trainer.step_metrics import step_metrics, step_proof


def grpo_step(run: TrainRun, source: SampleSource, step: int, kl_coefficient: float) -> Step:
    """Runs step `step` (the first is 1) on the samples of `source`, which then samples with weight version `step`.

    Raises StopRequested if the run is told to stop before the samples are there. Engines that do not get the weights
    are the step's failure.
    """
    sampled = source.next(step)
    trained = train(run, load(run, sampled, step, kl_coefficient), step)
    learned = learned_of(run, sampled, trained)
    failure: MegagrpoError | None = None
    try:
        source.sync(step, changed=trained.changed)
    except (EngineError, WeightSyncError, NodeLostError) as error:
        failure = error
    return Step(
        metrics=step_metrics(run, sampled, trained, step, kl_coefficient) | source.metrics(),
        tokens=sum(group.sequence_tokens for group in sampled.all),
        kl_coefficient=trained.kl_coefficient,
        failure=failure,
        pending=source.pending(),
        sampled=sampled,
        learned=learned,
        mismatch=trained.policy.mismatch if trained.policy else None,
        proof=step_proof(run, sampled, trained),
    )


class EngineSource(SampleSource):
    """Samples that the run's engines make, and that its reward functions score."""

    def __init__(self, run: Run) -> None:
        self.run = run

    @abstractmethod
    def sample(self, step: int) -> Sampled:
        """Returns the samples of `step` with their scores."""

    def next(self, step: int) -> Sampled:
        with self.run.stopping.giving_up():
            sampled = self.sample(step)
        rate = self.run.recipe.data.no_resampling_pass_rate
        if rate is not None:
            self.set_aside(solved_prompts(sampled.all, rate))
        return sampled

    def set_aside(self, ids: Iterable[str]) -> None:
        """Keeps prompts of these ids from being sampled again."""
        self.run.cursor.set_aside(ids)

    def sync(self, version: int, *, changed: bool) -> None:
        if not self.run.stopping.requested:
            sync(self.run, version, changed=changed)

    def metrics(self) -> dict[str, float]:
        run = self.run
        idle, seconds = run.rollouts.idle()
        metrics = {
            **run.scorer.take_metrics(),
            **run.teachers.take_metrics(),
            "engines/serving": float(run.rollouts.serving),
            "weights/sync_bytes": float(run.weights.received_bytes),
            "engines/idle_seconds": idle,
            "engines/idle_share": idle / seconds if seconds else 0.0,
        }
        if run.recipe.agent is not None:
            metrics["agent/processes_restarted"] = float(run.rollouts.agents_restarted())
        if run.recipe.data.no_resampling_pass_rate is not None:
            metrics["prompts/set_aside"] = float(run.cursor.set_aside_count)
        return metrics

    @contextmanager
    def engines_alone(self) -> Iterator[None]:
        """Gives the engines the memory of the ranks, which wait, and then gives it back."""
        with self.run.policy.released():
            yield
            self.run.rollouts.release_memory()


class Live(EngineSource):
    """The samples of a step, all by the weights that it trains, before it trains them."""

    def sample(self, step: int) -> Sampled:
        with self.engines_alone():
            return sample(self.run, step)

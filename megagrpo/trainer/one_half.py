"""One half of a run: sampling without training, or training on the saved samples of another run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from megagrpo.batching.work import work_of
from megagrpo.checkpoint.store import Checkpoint
from megagrpo.cluster.runtime import Runtime, check_files
from megagrpo.cluster.train_ranks import Policy
from megagrpo.errors import MismatchError, Problem, RunStopped, UnusableCheckpointError
from megagrpo.preflight.preflight import Preflight
from megagrpo.recipe.defaults import run_directory, with_absolute_directories
from megagrpo.recipe.schema import Recipe
from megagrpo.recipe.schema.eval import EvalConfig
from megagrpo.trainer.batches import (
    Sampled,
    ranges,
    read_batch,
    require_another_directory,
    require_fitting,
    save_batch,
    saved_steps,
)
from megagrpo.trainer.run import PhaseClock, TrainRun
from megagrpo.trainer.run_loop import Progress, Setup, StepDone, run_to_end
from megagrpo.trainer.step import Loaded, Trained, load, sample, solved_prompts, train, what_was_learned
from megagrpo.trainer.step_metrics import report_mismatch, rollout_metrics, sampling_metrics, step_metrics
from megagrpo.trainer.stopping import StopRequested
from megagrpo.trainer.train import GrpoTraining, prompt_reader, start_training
from megagrpo.types import Prompt

# --- samples without training -----------------------------------------------------------------------------------------


def rollout_only(checked: Preflight[Recipe]) -> int:
    """Generates and scores responses for all steps with the weights that the run starts from, and saves the batches.

    Training ranks start as in a whole run: engines get their weights from them. Raises as `run_to_end` does.
    """
    kept = {"resume": "never", "export_hugging_face": False, "keep_best": None}
    return run_to_end(_changed(checked, kept), prompt_reader(checked.recipe), start_training, sample_all)


def sample_all(setup: Setup[Recipe, Prompt], training: GrpoTraining, progress: Progress) -> Progress:
    """Generates, scores and saves the batches of all steps. Raises RunStopped if the run is told to stop."""
    try:
        return _sample_steps(setup, training, progress)
    except StopRequested:
        training.give_up()
        batches = ranges(saved_steps(run_directory(setup.recipe)))
        given, fix = f"the batches of {batches} are saved", "start the same command again: it samples all steps anew"
        raise RunStopped(Problem("told to stop", given, fix=fix)) from None


def _sample_steps(setup: Setup[Recipe, Prompt], training: GrpoTraining, progress: Progress) -> Progress:
    run, clock = training.run, setup.clock
    rate = run.recipe.data.no_resampling_pass_rate
    for step in range(1, setup.total_steps + 1):
        if run.cursor.exhausted:
            setup.tracker.say(f"stopped after step {progress.step}: every prompt is set aside")
            break
        with setup.stopping.giving_up():
            with clock.phase("step"):
                sampled = sample(run, step)
            with clock.phase("save_batch"):
                save_batch(run.recipe, step, sampled, setup.total_steps, keep=setup.total_steps)
        if rate is not None:
            run.cursor.set_aside(solved_prompts(sampled.all, rate))
        setup.tracker.rollouts(step, sampled.groups, run.weights.version)
        metrics = rollout_metrics(sampled.all) | sampling_metrics(run.recipe, sampled)
        setup.tracker.log(step, metrics | clock.take())
        progress = replace(progress, step=step)
    return progress


# --- training on saved samples ----------------------------------------------------------------------------------------


def train_only(checked: Preflight[Recipe], source: Path) -> int:
    """Trains step by step on the batches that the run in `source` has saved; starts no engines and evaluates nothing.
    Raises as `run_to_end` does; UnusableCheckpointError if a step has no batch.
    """
    require_another_directory(checked.recipe, "--train-only", source)

    def start(setup: Setup[Recipe, Prompt], ray: Runtime, closing: ExitStack) -> TrainOnly:
        saved = saved_steps(source)
        if absent := sorted(set(range(1, setup.total_steps + 1)) - set(saved)):
            given, needed = f"batches of {ranges(saved)}", f"a batch for each of {setup.total_steps} steps"
            fix = "train fewer steps (train.total_steps), or sample again with a larger checkpoint.keep_batches"
            raise UnusableCheckpointError(Problem(f"{source}: no batch of {ranges(absent)}", given, needed, fix))
        setup.tracker.say(f"starting {setup.recipe.train.layout.parallel().ranks} training ranks, and no engines")

        def start_run(resumed: Checkpoint | None) -> TrainRun:
            directory = resumed.rank_directory if resumed else None
            return start_train_run(setup.checked, setup.total_steps, ray, closing, directory, setup.clock)

        return TrainOnly(start_run(setup.resumed), source, setup, start_run)

    return run_to_end(_changed(checked, {"keep_best": None}), prompt_reader(checked.recipe), start, engines_too=False)


def start_train_run(
    checked: Preflight[Recipe], steps: int, ray: Runtime, closing: ExitStack, saved: Path | None, clock: PhaseClock
) -> TrainRun:
    """Starts training ranks alone, from a checkpoint's rank directory if `saved` names one. steps: of the whole run."""
    model = checked.model_directory.absolute()
    critic = checked.critic_directory.absolute() if checked.critic_directory else model
    check_files(ray, checked.recipe, read=(model, critic))
    policy = Policy(ray, with_absolute_directories(checked.recipe), model, critic)
    closing.callback(policy.close)
    policy.begin(model, saved)
    return TrainRun(checked.recipe, steps, policy, clock, work_of(checked.architecture))


def train_on(run: TrainRun, sampled: Sampled, step: int, kl_coefficient: float) -> tuple[Loaded, Trained]:
    """Trains step `step` on the given samples."""
    loaded = load(run, sampled, step, kl_coefficient)
    return loaded, train(run, loaded, step, kl_coefficient)


@dataclass(frozen=True)
class TrainOnly:
    """The `Training` of a run on saved batches."""

    run: TrainRun
    source: Path
    setup: Setup[Recipe, Prompt]
    start_run: Callable[[Checkpoint | None], TrainRun]

    @property
    def ranks(self) -> Policy:
        return self.run.policy

    def step(self, step: int, kl_coefficient: float | None) -> StepDone:
        recipe, tracker, coefficient = self.run.recipe, self.setup.tracker, kl_coefficient or 0.0
        sampled = read_batch(self.source, step).sampled
        vocabulary = self.setup.checked.architecture.vocab
        require_fitting(sampled, recipe, vocabulary, f"step {step} of {self.source}")
        with self.run.clock.phase("step"):
            loaded, trained = train_on(self.run, sampled, step, coefficient)
            learned = what_was_learned(self.run, sampled, loaded, trained)
        metrics = step_metrics(self.run, sampled, loaded, trained, step, coefficient)
        tracker.rollouts(step, sampled.groups, step - 1, learned)
        mismatch = trained.policy.mismatch if trained.policy else None
        excess = report_mismatch(recipe, step, mismatch, sampled.groups, tracker, self.setup.tokenizer.decode)
        tokens = sum(group.sequence_tokens for group in sampled.all)
        failure = MismatchError(excess) if excess else None
        return StepDone(metrics, tokens, kl_coefficient=trained.kl_coefficient, failure=failure)

    def evaluate(self, step: int, sets: Sequence[str]) -> dict[str, float]:
        raise NotImplementedError("no engines: the recipe of such a run has no eval.sets")

    @contextmanager
    def saving(self, step: int, *, goes_on: bool) -> Iterator[None]:
        yield

    @contextmanager
    def exporting(self) -> Iterator[None]:
        yield

    def with_new_ranks(self, saved: Checkpoint | None) -> TrainOnly:
        return replace(self, run=self.start_run(saved))

    def give_up(self) -> None:
        """Does nothing: a stop here interrupts nothing that could keep the ranks from saving."""


def _changed(checked: Preflight[Recipe], kept: dict[str, object]) -> Preflight[Recipe]:
    """Returns `checked` with a recipe without evaluations, and with the settings `kept` of its `checkpoint`."""
    recipe = checked.recipe
    checkpoint = recipe.checkpoint.model_copy(update=kept)
    return replace(checked, recipe=recipe.model_copy(update={"eval": EvalConfig(), "checkpoint": checkpoint}))

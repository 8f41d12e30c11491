"""One half of a run: sampling without training, or training on the saved samples of another run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from megagrpo.batching.work import work_of
from megagrpo.checkpoint.store import Checkpoint
from megagrpo.checkpoint.trainer_state import TrainerState
from megagrpo.cluster.runtime import Runtime, check_files
from megagrpo.cluster.stopping import StopRequested
from megagrpo.cluster.train_ranks import Policy
from megagrpo.data.prompts import prompt_reader
from megagrpo.errors import Problem, RunStopped, UnusableCheckpointError
from megagrpo.preflight.preflight import Preflight
from megagrpo.recipe.defaults import run_directory, with_absolute_directories
from megagrpo.recipe.schema import Recipe
from megagrpo.recipe.schema.eval import EvalConfig
from megagrpo.trainer.batches import (
    ranges,
    read_batch,
    require_another_directory,
    require_fitting,
    save_batch,
    saved_steps,
)
from megagrpo.trainer.run import PhaseClock, Step, TrainRun
from megagrpo.trainer.run_loop import Training, run_to_end
from megagrpo.trainer.schedule import trained_step
from megagrpo.trainer.setup import Setup
from megagrpo.trainer.step import sample, set_solved_aside
from megagrpo.trainer.step_metrics import rollout_metrics, sampling_metrics
from megagrpo.trainer.train import GrpoTraining, model_and_critic, reported, start_policy, start_training
from megagrpo.types import Prompt

# --- samples without training -----------------------------------------------------------------------------------------


def rollout_only(checked: Preflight[Recipe]) -> int:
    """Generates and scores responses for all steps with the weights that the run starts from, and saves the batches.

    Training ranks start as in a whole run: engines get their weights from them. Raises as `run_to_end` does.
    """
    kept = {"resume": "never", "export_hugging_face": False, "keep_best": None}
    return run_to_end(_changed(checked, kept), prompt_reader(checked.recipe), start_training, sample_all)


def sample_all(setup: Setup[Recipe, Prompt], training: GrpoTraining, state: TrainerState) -> TrainerState:
    """Generates, scores and saves the batches of all steps. Raises RunStopped if the run is told to stop."""
    try:
        return _sample_steps(setup, training, state)
    except StopRequested:
        training.give_up()
        batches = ranges(saved_steps(run_directory(setup.recipe)))
        given, fix = f"the batches of {batches} are saved", "start the same command again: it samples all steps anew"
        raise RunStopped(Problem("told to stop", given, fix=fix)) from None


def _sample_steps(setup: Setup[Recipe, Prompt], training: GrpoTraining, state: TrainerState) -> TrainerState:
    run, clock = training.run, setup.clock
    for step in range(1, setup.total_steps + 1):
        if run.cursor.exhausted:
            setup.tracker.say(f"stopped after step {state.step}: every prompt is set aside")
            break
        with setup.stopping.giving_up():
            with clock.phase("step"):
                sampled = sample(run, step)
            with clock.phase("save_batch"):
                save_batch(run.recipe, step, sampled, setup.total_steps, keep=setup.total_steps)
        set_solved_aside(run, sampled)
        setup.tracker.rollouts(step, sampled.groups, run.weights.version)
        metrics = rollout_metrics(sampled.all) | sampling_metrics(run.recipe, sampled)
        setup.tracker.log(step, metrics | clock.take())
        state = replace(state, step=step)
    return state


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
        start_run = partial(start_train_run, setup.checked, setup.total_steps, ray, closing, setup.clock)
        return TrainOnly(start_run(setup.resumed), source, setup, start_run)

    return run_to_end(_changed(checked, {"keep_best": None}), prompt_reader(checked.recipe), start, engines_too=False)


def start_train_run(
    checked: Preflight[Recipe],
    steps: int,
    ray: Runtime,
    ends: ExitStack,
    clock: PhaseClock,
    saved: Checkpoint | None,
) -> TrainRun:
    """Starts training ranks alone. steps: of the whole run."""
    check_files(ray, checked.recipe, read=model_and_critic(checked))
    policy = start_policy(checked, with_absolute_directories(checked.recipe), ray, ends, saved)
    return TrainRun(checked.recipe, steps, policy, clock, work_of(checked.architecture))


@dataclass(frozen=True)
class TrainOnly(Training):
    """The training of a run on saved batches."""

    run: TrainRun
    source: Path
    setup: Setup[Recipe, Prompt]
    start_run: Callable[[Checkpoint | None], TrainRun]

    @property
    def ranks(self) -> Policy:
        return self.run.policy

    def step(self, step: int, kl_coefficient: float | None) -> Step:
        setup, sampled = self.setup, read_batch(self.source, step).sampled
        vocabulary = setup.checked.architecture.vocab
        require_fitting(sampled, self.run.recipe, vocabulary, f"step {step} of {self.source}")
        with self.run.clock.phase("step"):
            done = trained_step(self.run, sampled, step, kl_coefficient or 0.0)
        return reported(step, done, setup)

    def with_new_ranks(self, saved: Checkpoint | None) -> TrainOnly:
        return replace(self, run=self.start_run(saved))


def _changed(checked: Preflight[Recipe], kept: dict[str, object]) -> Preflight[Recipe]:
    """Returns `checked` with a recipe without evaluations, and with the settings `kept` of its `checkpoint`."""
    recipe = checked.recipe
    checkpoint = recipe.checkpoint.model_copy(update=kept)
    return replace(checked, recipe=recipe.model_copy(update={"eval": EvalConfig(), "checkpoint": checkpoint}))

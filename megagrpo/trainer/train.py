"""Runs of GRPO and PPO: training ranks, engines and rewards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from megagrpo.batching.work import work_of
from megagrpo.checkpoint.groups import pending_of
from megagrpo.checkpoint.store import Checkpoint
from megagrpo.cluster.engines import EngineActors
from megagrpo.cluster.reward_models import RewardModels
from megagrpo.cluster.reward_nodes import scorer_maker
from megagrpo.cluster.rollouts import Rollouts
from megagrpo.cluster.runtime import Runtime, check_files
from megagrpo.cluster.train_ranks import Policy
from megagrpo.cluster.weight_sync import WeightSync, with_transport
from megagrpo.data.prompts import prompt_reader
from megagrpo.errors import MismatchError, Problem, RecipeError
from megagrpo.evaluation.metrics import evaluation_metrics
from megagrpo.evaluation.responses import Response, ResponseFiles, responses_of
from megagrpo.preflight.data_check import SAMPLE, sample_warnings
from megagrpo.preflight.preflight import Preflight
from megagrpo.progress import progress
from megagrpo.recipe.defaults import own_rewards, run_directory, with_absolute_directories
from megagrpo.recipe.schema import Recipe
from megagrpo.recipe.schema.schedule import SyncConfig
from megagrpo.reward.scorer import Scorer
from megagrpo.track.rollout_files import TRAIN
from megagrpo.trainer.batches import require_another_directory
from megagrpo.trainer.run import Run, SampleSource, Step, TrainRun
from megagrpo.trainer.run_loop import Training, run_to_end
from megagrpo.trainer.sampling import Background
from megagrpo.trainer.schedule import Live, grpo_step
from megagrpo.trainer.schedule_log import Logged, read_schedule, schedule_line
from megagrpo.trainer.setup import Setup
from megagrpo.trainer.step import require_version
from megagrpo.trainer.step_metrics import report_mismatch
from megagrpo.trainer.teachers import Teachers
from megagrpo.types import Group, Prompt

SourceOf = Callable[[Run, Checkpoint | None], SampleSource]
"""Makes the source of a run's samples. Gets the checkpoint that the run is continued from."""


def train(checked: Preflight[Recipe]) -> int:
    """Runs the recipe to its end, as `run_to_end` says."""
    return run_to_end(checked, prompt_reader(checked.recipe), start_training)


def replay_schedule(checked: Preflight[Recipe], source: Path) -> int:
    """Runs the recipe with the schedule that the run in `source` has logged, from the first step to the end of the log.
    Raises as `run_to_end` does; UnusableCheckpointError if the log lacks a step; RecipeError for a recipe with an
    agent."""
    recipe = checked.recipe
    if recipe.agent is not None:
        needed = "a recipe without agent: what agents do and when is not logged"
        raise RecipeError(Problem("--replay-schedule", "a recipe with agent", needed, "remove --replay-schedule"))
    logged = read_schedule(source, recipe)
    require_another_directory(recipe, "--replay-schedule", source)
    checkpoint = recipe.checkpoint.model_copy(update={"resume": "never"})
    cluster = recipe.cluster.model_copy(update={"restarts_max": 0})
    recipe = recipe.model_copy(update={"checkpoint": checkpoint, "cluster": cluster})

    def start(setup: Setup[Recipe, Prompt], ray: Runtime, closing: ExitStack) -> GrpoTraining:
        return start_training(setup, ray, closing, lambda run, _: Logged(run, logged, setup.tracker.say))

    return run_to_end(replace(checked, recipe=recipe), prompt_reader(recipe), start, last_step=len(logged))


def start_training(
    setup: Setup[Recipe, Prompt], ray: Runtime, closing: ExitStack, source_of: SourceOf | None = None
) -> GrpoTraining:
    """Starts training ranks, engines and rewards, and brings the policy's weights to the engines. source_of: None: the
    source of the recipe's schedule."""
    checked, recipe, say = setup.checked, setup.recipe, setup.tracker.say
    model, critic, tokenizer = *model_and_critic(checked), checked.tokenizer_directory.absolute()
    beside = {path: directory.absolute() for path, directory in checked.models_beside.items()}
    check_files(ray, recipe, read=(model, tokenizer, critic, *beside.values(), *checked.teachers.values()))
    placed = with_transport(with_absolute_directories(recipe), ray)
    engines, ranks = recipe.rollout.engines, recipe.train.layout.parallel().ranks
    say(f"starting {ranks} training ranks and {engines} engines ({recipe.rollout.engine}) with {model}")
    if setup.resumed is None and recipe.reward.scores:
        with progress("trying reward functions on their own ground truths"):
            warnings = list(sample_warnings(setup.cursor.some(SAMPLE), recipe.reward))
        for line in warnings:
            say(line)

    def start_engines() -> Rollouts:
        started = Rollouts(EngineActors(ray, placed, model, tokenizer))
        closing.callback(started.close)
        return started

    judging = RewardModels(ray, placed, beside)
    closing.callback(judging.close)
    # Engines start while the ranks do, except on shared GPUs: a starting engine takes the memory that is free there.
    rollouts = None if ray.shares_gpus else start_engines()
    # A continued run finishes the groups that had begun, whatever its schedule is now.
    samples_itself = isinstance(recipe.schedule, SyncConfig) and recipe.schedule.beyond == 0
    in_background = not samples_itself or setup.pending is not None
    judged = recipe.rollout.prompts_per_step * recipe.rollout.samples_per_prompt if in_background else 1
    score_with = scorer_maker(recipe, ray, judging.served(), setup.stopping.check, say)
    scorer = score_with(recipe.reward, judged_responses=judged)
    scorers = {name: score_with(reward) for name, reward in own_rewards(recipe).items()}
    teachers = Teachers(recipe, judging.teachers(), setup.stopping.check, say, judged_responses=judged)
    for close in (teachers.close, *(one.close for one in (scorer, *scorers.values()))):
        closing.callback(close)
    teachers.contact()
    files = ResponseFiles(run_directory(recipe) / "evaluations", setup.state.step, say)
    closing.callback(files.close)

    def schedule_of(run: Run, saved: Checkpoint | None) -> SampleSource:
        step = saved.state.step if saved else 0
        return Background(run, step, pending_of(saved)) if in_background else Live(run)

    ends, source_of = closing.enter_context(ExitStack()), source_of or schedule_of
    policy = start_policy(checked, placed, ray, ends, setup.resumed)
    policy.release()  # the engines start with the memory
    rollouts = rollouts or start_engines()
    rollouts.wait_until_ready()
    judging.wait_until_ready()
    weights, work = first_sync(setup, placed, policy, rollouts, ends, setup.state.step), work_of(checked.architecture)
    of_training = recipe, setup.total_steps, policy, setup.clock, work
    run = Run(*of_training, setup.cursor, rollouts, scorer, teachers, weights, setup.stopping)
    source = source_of(run, setup.resumed)
    ends.callback(source.close)
    return GrpoTraining(setup, run, source, ray, placed, ends, source_of, scorers, files)


def model_and_critic(checked: Preflight[Recipe]) -> tuple[Path, Path]:
    """Returns the directories of the policy's model and the critic's, which is the same if the recipe names none."""
    return checked.model_directory.absolute(), (checked.critic_directory or checked.model_directory).absolute()


def start_policy(
    checked: Preflight[Recipe], placed: Recipe, ray: Runtime, ends: ExitStack, saved: Checkpoint | None
) -> Policy:
    """Starts training ranks, from a saved state or from the model. placed: the recipe as ranks get it."""
    model, critic = model_and_critic(checked)
    policy = Policy(ray, placed, model)
    ends.callback(policy.close)
    if placed.algorithm.critic is not None:
        policy.call("add_critic", str(critic))
    for name, directory in checked.teachers.items():
        policy.call("add_teacher", name, str(directory.absolute()))
    policy.begin(model, saved.rank_directory if saved else None)
    return policy


def first_sync(
    setup: Setup[Recipe, Prompt], placed: Recipe, policy: Policy, rollouts: Rollouts, ends: ExitStack, version: int
) -> WeightSync:
    """Brings the weights of ranks that have started to the engines."""
    setup.tracker.say("bringing the weights to the engines")
    rollouts.release_memory(["kv_cache"])  # a sync needs this memory for the parameters
    weights = WeightSync(policy, rollouts, placed, setup.tracker.say)
    ends.callback(weights.close)
    with policy.needed(["parameters"]), progress("bringing the weights to the engines"):
        weights.check_replicas()
        weights.sync(version)
    return weights


@dataclass(frozen=True)
class PolicyTraining(Training):
    """The training of a policy on the samples of a source."""

    setup: Setup[Recipe, Prompt]
    run: TrainRun
    source: SampleSource
    ray: Runtime
    placed: Recipe  # as ranks get it
    ends: ExitStack  # of all that starts again with new ranks

    @property
    def ranks(self) -> Policy:
        return self.run.policy

    def step(self, step: int, kl_coefficient: float | None) -> Step:
        """Takes a step; reports its samples, schedule and mismatch. It has failed if the mismatch ends the run."""
        setup, tracker = self.setup, self.setup.tracker
        with self.run.clock.phase("step"):
            done = grpo_step(self.run, self.source, step, kl_coefficient or 0.0)
        tracker.rollouts(step, {TRAIN: done.sampled.groups}, step - 1, done.learned)
        if done.sampled.logged:
            tracker.schedule(schedule_line(step, done.sampled))
        excess = report_mismatch(setup.recipe, step, done, tracker, setup.tokenizer.decode)
        return replace(done, failure=done.failure or (MismatchError(excess) if excess else None))

    def with_new_ranks(self, saved: Checkpoint | None) -> Self:
        self.source.drop()
        self.ends.close()
        policy = start_policy(self.setup.checked, self.placed, self.ray, self.ends, saved)
        return replace(self, run=replace(self.run, policy=policy))


@dataclass(frozen=True)
class GrpoTraining(PolicyTraining):
    """The training of GRPO and PPO."""

    run: Run
    source_of: SourceOf
    scorers: Mapping[str, Scorer]
    """By evaluation set: scorers of the sets with reward functions of their own."""
    files: ResponseFiles
    """Files of the responses that evaluations sampled."""

    def step(self, step: int, kl_coefficient: float | None) -> Step:
        done = super().step(step, kl_coefficient)
        return replace(done, responses=sum(len(group.samples) for group in done.sampled.all if not group.given))

    def evaluate(self, step: int, sets: Sequence[str]) -> dict[str, float]:
        run, metrics, responses, scored = self.run, dict[str, float](), list[Response](), dict[str, list[Group]]()
        run.policy.release()  # until the next step's update: the engines keep their memory for its responses
        sampled = run.rollouts.generate_for_evaluation({name: self.setup.held_out[name] for name in sets})
        for name, groups in sampled.items():
            require_version(groups, run.weights.version)
            scorer = self.scorers.get(name, run.scorer)
            scored[name] = scorer.score_unshaped(groups)
            of_set = responses_of(name, scored[name])
            scorer.take_metrics()  # the next step has a budget of its own
            figures = evaluation_metrics(of_set, run.recipe.eval.of_sets()[name].samples_per_prompt)
            metrics |= {f"{name}/{metric}": value for metric, value in figures.items()}
            responses += of_set
        self.files.begin(step, responses)
        self.setup.tracker.rollouts(step, scored, step)
        return metrics

    def with_new_ranks(self, saved: Checkpoint | None) -> Self:
        """Starts new ranks, which bring their weights to the engines, and a new source; engines and scorers stay."""
        rollouts = self.run.rollouts
        self.source.drop()
        self.ends.close()
        rollouts.release_memory()  # ranks that start take the memory that is free
        policy = start_policy(self.setup.checked, self.placed, self.ray, self.ends, saved)
        policy.release()
        version = saved.state.step if saved else 0
        weights = first_sync(self.setup, self.placed, policy, rollouts, self.ends, version)
        run = replace(self.run, policy=policy, weights=weights)
        source = self.source_of(run, saved)
        self.ends.callback(source.close)
        return replace(self, run=run, source=source)

    @contextmanager
    def saving(self, step: int, *, continues: bool) -> Iterator[None]:
        run = self.run
        engines_gone = run.policy.away and run.rollouts.release_memory()
        with run.policy.needed():
            run.weights.check_replicas()
            yield
        if engines_gone and continues and not run.stopping.requested:
            run.weights.sync(version=step)  # the engines need their weights back

    @contextmanager
    def exporting(self) -> Iterator[None]:
        self.run.rollouts.release_memory()
        with self.run.policy.needed(["parameters"]):
            yield

    def give_up(self) -> None:
        self.run.weights.give_up()
        self.run.rollouts.give_up()  # engines may hold memory that saving needs

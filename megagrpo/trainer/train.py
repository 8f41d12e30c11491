"""Runs of GRPO and PPO: training ranks, engines and rewards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from megagrpo.batching.work import work_of
from megagrpo.checkpoint.pending import pending_of
from megagrpo.checkpoint.store import Checkpoint
from megagrpo.cluster.reward_models import RewardModels
from megagrpo.cluster.reward_nodes import reward_pool
from megagrpo.cluster.rollouts import Rollouts
from megagrpo.cluster.runtime import Runtime, check_files
from megagrpo.cluster.train_ranks import Policy
from megagrpo.cluster.weight_sync import WeightSync, with_transport
from megagrpo.data.mixture import Mixture
from megagrpo.data.prompts import load_prompts
from megagrpo.errors import MismatchError, Problem, RecipeError
from megagrpo.evaluation.metrics import evaluation_metrics
from megagrpo.evaluation.responses import Response, ResponseFiles, responses_of
from megagrpo.preflight.data_check import SAMPLE, sample_warnings
from megagrpo.preflight.preflight import Preflight
from megagrpo.progress import progress
from megagrpo.recipe.defaults import own_rewards, run_directory, with_absolute_directories
from megagrpo.recipe.schema import DataFileConfig, Recipe
from megagrpo.recipe.schema.schedule import SyncConfig
from megagrpo.reward.asking import Asking, Models
from megagrpo.reward.scorer import EXECUTORS, Executors, Scorer
from megagrpo.trainer.batches import require_another_directory
from megagrpo.trainer.run import Run, Step
from megagrpo.trainer.run_loop import Training, run_to_end
from megagrpo.trainer.sampling import Sampling
from megagrpo.trainer.schedule import grpo_step
from megagrpo.trainer.schedule_log import LoggedStep, Replayed, read_schedule, schedule_line
from megagrpo.trainer.setup import Read, Setup
from megagrpo.trainer.step import require_version, with_signal
from megagrpo.trainer.step_metrics import report_mismatch
from megagrpo.types import Group, Prompt


def train(checked: Preflight[Recipe]) -> int:
    """Runs the recipe to its end, as `run_to_end` says."""
    return run_to_end(checked, prompt_reader(checked.recipe), start_training)


def prompt_reader(recipe: Recipe) -> Read[Prompt]:
    """Returns the reader of a recipe's prompts: each row must be of a source that a reward function is for."""

    def read(
        files: Sequence[DataFileConfig], tokenizer: PreTrainedTokenizerBase, held_out_set: str | None
    ) -> Mixture[Prompt]:
        reward = own_rewards(recipe).get(held_out_set or "", recipe.reward)
        held_out = None if held_out_set else [file for found in recipe.eval.files_of_sets().values() for file in found]
        return load_prompts(files, tokenizer, recipe.data, recipe.seed, reward.source_problem, held_out)

    return read


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
    start = partial(start_training, replayed=logged)
    return run_to_end(replace(checked, recipe=recipe), prompt_reader(recipe), start, last_step=len(logged))


def start_training(
    setup: Setup[Recipe, Prompt], ray: Runtime, closing: ExitStack, replayed: Sequence[LoggedStep] = ()
) -> GrpoTraining:
    """Starts training ranks, engines and rewards, and brings the policy's weights to the engines. replayed: logged
    steps of the run whose schedule this one repeats."""
    checked, recipe, say = setup.checked, setup.recipe, setup.tracker.say
    model, critic, tokenizer = *model_and_critic(checked), checked.tokenizer_directory.absolute()
    of_rewards = {name: directory.absolute() for name, directory in checked.reward_models.items()}
    check_files(ray, recipe, read=(model, tokenizer, critic, *of_rewards.values()))
    placed = with_transport(with_absolute_directories(recipe), ray)
    engines, ranks = recipe.rollout.engines, recipe.train.layout.parallel().ranks
    say(f"starting {ranks} training ranks and {engines} engines ({recipe.rollout.engine}) with {model}")
    if setup.resumed is None:
        with progress("trying reward functions on their own ground truths"):
            warnings = list(sample_warnings(setup.cursor.some(SAMPLE), recipe.reward))
        for line in warnings:
            say(line)

    def start_engines() -> Rollouts:
        started = Rollouts(ray, placed, model, tokenizer)
        closing.callback(started.close)
        return started

    judging = RewardModels(ray, placed, of_rewards)
    closing.callback(judging.close)
    # Engines start while the ranks do, except on shared GPUs: a starting engine takes the memory that is free there.
    early = None if ray.shares_gpus else start_engines()
    # A run that is continued finishes what had begun, whatever its schedule is now.
    samples_itself = isinstance(recipe.schedule, SyncConfig) and recipe.schedule.beyond == 0
    in_background = not replayed and (not samples_itself or setup.pending is not None)
    judged = recipe.rollout.prompts_per_step * recipe.rollout.samples_per_prompt if in_background else 1
    score_with = scorer_maker(recipe, ray, judging, setup.stopping.check, say)
    scorer = score_with(recipe.reward, judged_responses=judged)
    closing.callback(scorer.close)
    scorers = {name: score_with(reward) for name, reward in own_rewards(recipe).items()}
    for own in scorers.values():
        closing.callback(own.close)
    files = ResponseFiles(run_directory(recipe) / "evaluations", setup.state.step, say)
    closing.callback(files.close)

    def ready_engines() -> Rollouts:
        rollouts = early or start_engines()
        rollouts.wait_until_ready()
        judging.wait_until_ready()
        return rollouts

    starter = RankStarter(setup, ray, placed, in_background, closing.enter_context(ExitStack()))
    repeats = Replayed(replayed, say) if replayed else None
    return GrpoTraining(starter.start(setup.resumed, ready_engines, scorer, repeats), setup, starter, scorers, files)


def model_and_critic(checked: Preflight[Recipe]) -> tuple[Path, Path]:
    """Returns the directories of the policy's model and the critic's, which is the same if the recipe names none."""
    return checked.model_directory.absolute(), (checked.critic_directory or checked.model_directory).absolute()


def scorer_maker(
    recipe: Recipe, ray: Runtime, judging: RewardModels, check: Callable[[], None], say: Callable[[str], None]
) -> Callable[..., Scorer]:
    """Returns a function that makes scorers: from a reward section, and from what else `Scorer` takes by name."""
    limit, models = recipe.rollout.response_tokens_max, Models(run_directory(recipe), judging.served())
    own: Executors = {"workers": partial(reward_pool, ray), "asking": partial(Asking, models=models)}
    return partial(Scorer, response_tokens_max=limit, check=check, say=say, executors={**EXECUTORS, **own})


def start_policy(
    checked: Preflight[Recipe], placed: Recipe, ray: Runtime, ends: ExitStack, saved: Checkpoint | None
) -> Policy:
    """Starts training ranks, from a saved state or from the model. placed: the recipe as ranks get it."""
    model, critic = model_and_critic(checked)
    policy = Policy(ray, placed, model, critic)
    ends.callback(policy.close)
    policy.begin(model, saved.rank_directory if saved else None)
    return policy


@dataclass(frozen=True)
class RankStarter:
    """A starter of training ranks and of all that depends on them: at first, and again after a loss."""

    setup: Setup[Recipe, Prompt]
    ray: Runtime
    placed: Recipe
    in_background: bool
    ends: ExitStack  # of all that starts again with new ranks

    def start(
        self, saved: Checkpoint | None, engines: Callable[[], Rollouts], scorer: Scorer, replayed: Replayed | None
    ) -> Run:
        """Starts the ranks, then brings their weights to the engines, for which `engines` waits."""
        setup, recipe, step = self.setup, self.setup.recipe, saved.state.step if saved else 0
        policy = start_policy(setup.checked, self.placed, self.ray, self.ends, saved)
        policy.release()
        rollouts = engines()
        setup.tracker.say("bringing the weights to the engines")
        rollouts.release_memory(["kv_cache"])  # a sync needs this memory for the parameters
        weights = WeightSync(policy, rollouts, self.placed, setup.tracker.say)
        self.ends.callback(weights.close)
        with policy.needed(["parameters"]), progress("bringing the weights to the engines"):
            weights.check_replicas()
            weights.sync(version=step)
        sampling = None
        if self.in_background:
            sampling = Sampling(
                recipe,
                setup.total_steps,
                setup.cursor,
                rollouts,
                scorer,
                lambda group: recipe.rollout.dynamic_sampling is None or bool(with_signal([group], recipe)),
                step,
                pending_of(saved),
            )
            self.ends.callback(sampling.close)
        return Run(
            recipe=recipe,
            total_steps=setup.total_steps,
            policy=policy,
            clock=setup.clock,
            work=work_of(setup.checked.architecture),
            cursor=setup.cursor,
            rollouts=rollouts,
            scorer=scorer,
            weights=weights,
            stopping=setup.stopping,
            sampling=sampling,
            replayed=replayed,
        )

    def start_again(self, run: Run, saved: Checkpoint | None) -> Run:
        """Starts new ranks for lost ones; engines and scorer stay."""
        if run.sampling:
            run.sampling.drop()
        self.ends.close()
        run.rollouts.release_memory()  # ranks that start take the memory that is free
        return self.start(saved, lambda: run.rollouts, run.scorer, run.replayed)


@dataclass(frozen=True)
class GrpoTraining(Training):
    """The training of GRPO and PPO."""

    run: Run
    setup: Setup[Recipe, Prompt]
    starter: RankStarter
    scorers: Mapping[str, Scorer]
    """By evaluation set: scorers of the sets with reward functions of their own."""
    files: ResponseFiles
    """Files of the responses that evaluations sampled."""

    @property
    def ranks(self) -> Policy:
        return self.run.policy

    def step(self, step: int, kl_coefficient: float | None) -> Step:
        run = self.run
        with run.clock.phase("step"):
            done = grpo_step(run, step, kl_coefficient or 0.0)
        responses = sum(len(group.samples) for group in done.sampled.all)
        pending = run.sampling.pending() if run.sampling else None
        return replace(reported(step, done, self.setup), responses=responses, pending=pending)

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
            found = evaluation_metrics(of_set, run.recipe.eval.of_sets()[name].samples_per_prompt)
            metrics |= {f"{name}/{metric}": value for metric, value in found.items()}
            responses += of_set
        self.files.begin(step, responses)
        self.setup.tracker.evaluated(step, scored)
        return metrics

    @contextmanager
    def saving(self, step: int, *, goes_on: bool) -> Iterator[None]:
        run = self.run
        engines_gone = run.policy.away and run.rollouts.release_memory()
        with run.policy.needed():
            run.weights.check_replicas()
            yield
        if engines_gone and goes_on and not run.stopping.requested:
            run.weights.sync(version=step)  # the engines need their weights back

    @contextmanager
    def exporting(self) -> Iterator[None]:
        self.run.rollouts.release_memory()
        with self.run.policy.needed(["parameters"]):
            yield

    def with_new_ranks(self, saved: Checkpoint | None) -> GrpoTraining:
        return replace(self, run=self.starter.start_again(self.run, saved))

    def give_up(self) -> None:
        self.run.weights.give_up()
        self.run.rollouts.give_up()  # engines may hold memory that saving needs


def reported(step: int, done: Step, setup: Setup[Recipe, Prompt]) -> Step:
    """Reports a step's samples, schedule and mismatch. Returns the step, which has failed if the mismatch ends the
    run."""
    sampled, tracker = done.sampled, setup.tracker
    tracker.rollouts(step, sampled.groups, step - 1, done.learned)
    if sampled.logged:
        tracker.schedule(schedule_line(step, sampled))
    excess = report_mismatch(setup.recipe, step, done.mismatch, sampled.groups, tracker, setup.tokenizer.decode)
    return replace(done, failure=done.failure or (MismatchError(excess) if excess else None))

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
from megagrpo.reward.asking import Models
from megagrpo.reward.scorer import Scorer
from megagrpo.track.tracker import Tracker
from megagrpo.trainer.batches import require_another_directory
from megagrpo.trainer.run import Run
from megagrpo.trainer.run_loop import Read, Setup, StepDone, run_to_end
from megagrpo.trainer.sampling import Sampling
from megagrpo.trainer.schedule import grpo_step
from megagrpo.trainer.schedule_log import LoggedStep, Replayed, read_schedule
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
    checked, recipe, stopping = setup.checked, setup.recipe, setup.stopping
    model, tokenizer_directory = checked.model_directory.absolute(), checked.tokenizer_directory.absolute()
    critic = checked.critic_directory.absolute() if checked.critic_directory else model
    of_rewards = {name: directory.absolute() for name, directory in checked.reward_models.items()}
    check_files(ray, recipe, read=(model, tokenizer_directory, critic, *of_rewards.values()))
    placed = with_transport(with_absolute_directories(recipe), ray)

    engines, ranks = recipe.rollout.engines, recipe.train.layout.parallel().ranks
    setup.tracker.say(f"starting {ranks} training ranks and {engines} engines ({recipe.rollout.engine}) with {model}")

    if setup.resumed is None:
        with progress("trying reward functions on their own ground truths"):
            warnings = list(sample_warnings(setup.cursor.some(SAMPLE), recipe.reward))
        for line in warnings:
            setup.tracker.say(line)

    def start_engines() -> Rollouts:
        started = Rollouts(ray, placed, model, tokenizer_directory)
        closing.callback(started.close)
        return started

    judging = RewardModels(ray, placed, of_rewards)
    closing.callback(judging.close)
    # Engines start while the ranks do, except on shared GPUs: a starting engine takes the memory that is free there.
    early = None if ray.shares_gpus else start_engines()
    schedule, rollout = recipe.schedule, recipe.rollout
    # A run that is continued finishes what had begun, whatever its schedule is now.
    samples_itself = isinstance(schedule, SyncConfig) and schedule.beyond == 0
    in_background = not replayed and (not samples_itself or pending_of(setup.resumed) is not None)
    judged = rollout.prompts_per_step * rollout.samples_per_prompt if in_background else 1
    workers, models = partial(reward_pool, ray), Models(run_directory(recipe), judging.served())
    score_with = partial(Scorer, check=stopping.check, say=setup.tracker.say, pool_of=workers, models=models)
    scorer = score_with(recipe.reward, rollout.response_tokens_max, judged_responses=judged)
    closing.callback(scorer.close)
    scorers = {name: score_with(reward, rollout.response_tokens_max) for name, reward in own_rewards(recipe).items()}
    for own in scorers.values():
        closing.callback(own.close)
    resumed_step = setup.resumed.state.step if setup.resumed else 0
    files = ResponseFiles(run_directory(recipe) / "evaluations", resumed_step, setup.tracker.say)
    closing.callback(files.close)
    of_ranks = closing.enter_context(ExitStack())

    def start_policy(saved: Checkpoint | None) -> Policy:
        policy = Policy(ray, placed, model, critic)
        of_ranks.callback(policy.close)
        policy.begin(model, saved.rank_directory if saved else None)
        policy.release()
        return policy

    def bring_weights(policy: Policy, rollouts: Rollouts, saved: Checkpoint | None) -> WeightSync:
        setup.tracker.say("bringing the weights to the engines")
        rollouts.release_memory(["kv_cache"])  # a sync needs this memory for the parameters
        weights = WeightSync(policy, rollouts, placed, setup.tracker.say)
        of_ranks.callback(weights.close)
        with policy.needed(["parameters"]), progress("bringing the weights to the engines"):
            weights.check_replicas()
            weights.sync(version=saved.state.step if saved else 0)
        return weights

    def start_sampling(rollouts: Rollouts, scorer: Scorer, saved: Checkpoint | None) -> Sampling | None:
        if not in_background:
            return None
        sampling = Sampling(
            recipe,
            setup.total_steps,
            setup.cursor,
            rollouts,
            scorer,
            lambda group: rollout.dynamic_sampling is None or bool(with_signal([group], recipe)),
            step=saved.state.step if saved else 0,
            pending=pending_of(saved),
        )
        of_ranks.callback(sampling.close)
        return sampling

    def start_again(run: Run, saved: Checkpoint | None) -> Run:
        if run.sampling:
            run.sampling.drop()
        of_ranks.close()
        run.rollouts.release_memory()  # ranks that start take the memory that is free
        policy = start_policy(saved)
        weights = bring_weights(policy, run.rollouts, saved)
        sampling = start_sampling(run.rollouts, run.scorer, saved)
        return replace(run, policy=policy, weights=weights, sampling=sampling)

    policy = start_policy(setup.resumed)
    rollouts = early or start_engines()
    rollouts.wait_until_ready()
    judging.wait_until_ready()
    weights = bring_weights(policy, rollouts, setup.resumed)
    run = Run(
        sampling=start_sampling(rollouts, scorer, setup.resumed),
        replayed=Replayed(replayed, setup.tracker.say) if replayed else None,
        recipe=recipe,
        total_steps=setup.total_steps,
        cursor=setup.cursor,
        rollouts=rollouts,
        scorer=scorer,
        policy=policy,
        weights=weights,
        clock=setup.clock,
        work=work_of(checked.architecture),
        stopping=stopping,
    )
    return GrpoTraining(run, setup.held_out, setup.tracker, setup.tokenizer, start_again, scorers, files)


@dataclass(frozen=True)
class GrpoTraining:
    """The `Training` of GRPO and PPO."""

    run: Run
    held_out: Mapping[str, Sequence[Prompt]]  # by evaluation set
    tracker: Tracker
    tokenizer: PreTrainedTokenizerBase
    start_again: Callable[[Run, Checkpoint | None], Run]
    scorers: Mapping[str, Scorer]
    """By evaluation set: scorers of the sets with reward functions of their own."""
    files: ResponseFiles
    """Files of the responses that evaluations sampled."""

    @property
    def ranks(self) -> Policy:
        return self.run.policy

    def step(self, step: int, kl_coefficient: float | None) -> StepDone:
        run = self.run
        with run.clock.phase("step"):
            done = grpo_step(run, step, kl_coefficient or 0.0)
        self.tracker.rollouts(step, done.groups, step - 1, done.learned)
        if done.logged:
            self.tracker.schedule(done.logged)
        excess = report_mismatch(run.recipe, step, done.mismatch, done.groups, self.tracker, self.tokenizer.decode)
        return StepDone(
            done.metrics,
            tokens=sum(group.sequence_tokens for group in done.sampled),
            responses=sum(len(group.samples) for group in done.sampled),
            kl_coefficient=done.kl_coefficient,
            failure=done.failure or (MismatchError(excess) if excess else None),
            pending=run.sampling.pending() if run.sampling else None,
        )

    def evaluate(self, step: int, sets: Sequence[str]) -> dict[str, float]:
        run, metrics, responses, scored = self.run, dict[str, float](), list[Response](), dict[str, list[Group]]()
        run.policy.release()  # until the next step's update: the engines keep their memory for its responses
        sampled = run.rollouts.generate_for_evaluation({name: self.held_out[name] for name in sets})
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
        self.tracker.evaluated(step, scored)
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
        return replace(self, run=self.start_again(self.run, saved))

    def give_up(self) -> None:
        self.run.weights.give_up()
        self.run.rollouts.give_up()  # engines may hold memory that saving needs

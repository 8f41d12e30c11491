"""Runs of GRPO and PPO: training ranks, engines and rewards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from megagrpo.batching.work import work_of
from megagrpo.checkpoint.pending import pending_of
from megagrpo.checkpoint.store import Checkpoint
from megagrpo.cluster.rollouts import Rollouts
from megagrpo.cluster.runtime import Runtime, check_files
from megagrpo.cluster.train_ranks import Policy
from megagrpo.cluster.weight_sync import WeightSync, with_transport
from megagrpo.data.prompts import load_prompts
from megagrpo.errors import MismatchError
from megagrpo.preflight.preflight import Preflight
from megagrpo.recipe.defaults import with_absolute_directories
from megagrpo.recipe.schema import Recipe
from megagrpo.recipe.schema.schedule import SyncConfig
from megagrpo.reward.scorer import Scorer
from megagrpo.track.tracker import Tracker
from megagrpo.trainer.batches import require_another_directory
from megagrpo.trainer.evaluation import evaluation_metrics, reading_of
from megagrpo.trainer.run import Run
from megagrpo.trainer.run_loop import Setup, StepDone, run_to_end
from megagrpo.trainer.sampling import Sampling
from megagrpo.trainer.schedule import grpo_step
from megagrpo.trainer.schedule_log import LoggedStep, Replayed, read_schedule
from megagrpo.trainer.step import require_version, with_signal
from megagrpo.trainer.step_metrics import report_mismatch
from megagrpo.types import Prompt


def train(checked: Preflight[Recipe]) -> int:
    """Runs the recipe to its end, as `run_to_end` says."""
    return run_to_end(checked, load_prompts, start_training)


def replay_schedule(checked: Preflight[Recipe], source: Path) -> int:
    """The same, with the order that the run in `source` has logged. It always begins at the first step. Raises as
    `run_to_end` does; UnusableCheckpointError if the log lacks a step. It ends where the log does."""
    recipe = checked.recipe
    logged = read_schedule(source, recipe)
    require_another_directory(recipe, "--replay-schedule", source)
    checkpoint = recipe.checkpoint.model_copy(update={"resume": "never"})
    cluster = recipe.cluster.model_copy(update={"restarts_max": 0})
    recipe = recipe.model_copy(update={"checkpoint": checkpoint, "cluster": cluster})
    start = partial(start_training, replayed=logged)
    return run_to_end(replace(checked, recipe=recipe), load_prompts, start, last_step=len(logged))


def start_training(
    setup: Setup[Recipe, Prompt], ray: Runtime, closing: ExitStack, replayed: Sequence[LoggedStep] = ()
) -> GrpoTraining:
    """Starts training ranks, engines and rewards, and brings the policy's weights to the engines. replayed: what
    the run whose schedule this one repeats has logged."""
    checked, recipe, stopping = setup.checked, setup.recipe, setup.stopping
    model, tokenizer_directory = checked.model_directory.absolute(), checked.tokenizer_directory.absolute()
    critic = checked.critic_directory.absolute() if checked.critic_directory else model
    check_files(ray, recipe, read=(model, tokenizer_directory, critic))
    placed = with_transport(with_absolute_directories(recipe), ray)

    engines, ranks = recipe.rollout.engines, recipe.train.layout.parallel().ranks
    setup.tracker.say(f"starting {ranks} training ranks and {engines} engines ({recipe.rollout.engine}) with {model}")

    def start_engines() -> Rollouts:
        started = Rollouts(ray, placed, model, tokenizer_directory)
        closing.callback(started.close)
        return started

    # Engines start while the ranks do, except on shared GPUs: a starting engine takes the memory that is free there.
    early = None if ray.shares_gpus else start_engines()
    schedule, rollout = recipe.schedule, recipe.rollout
    # A run that is continued finishes what had begun, whatever its schedule is now.
    samples_itself = isinstance(schedule, SyncConfig) and schedule.beyond == 0
    in_background = not replayed and (not samples_itself or pending_of(setup.resumed) is not None)
    judged = rollout.prompts_per_step * rollout.samples_per_prompt if in_background else 1
    scorer = Scorer(recipe.reward, rollout.response_tokens_max, stopping.check, setup.tracker.say, judged)
    closing.callback(scorer.close)
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
        with policy.needed(["parameters"]):
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
    return GrpoTraining(run, setup.held_out, setup.tracker, setup.tokenizer, start_again)


@dataclass(frozen=True)
class GrpoTraining:
    """What the run loop asks of GRPO and PPO."""

    run: Run
    held_out: Sequence[Prompt]
    tracker: Tracker
    tokenizer: PreTrainedTokenizerBase
    start_again: Callable[[Run, Checkpoint | None], Run]

    @property
    def ranks(self) -> Policy:
        return self.run.policy

    def step(self, step: int, kl_coefficient: float | None) -> StepDone:
        run = self.run
        with run.clock.phase("step"):
            done = grpo_step(run, step, kl_coefficient or 0.0)
        self.tracker.rollouts(step, done.groups)
        if done.logged:
            self.tracker.schedule(done.logged)
        excess = report_mismatch(run.recipe, step, done.mismatch, done.groups, self.tracker, self.tokenizer.decode)
        tokens = [len(group.prompt.tokens) + len(sample.tokens) for group in done.sampled for sample in group.samples]
        return StepDone(
            done.metrics,
            tokens=sum(tokens),
            responses=len(tokens),
            kl_coefficient=done.kl_coefficient,
            failure=done.failure or (MismatchError(excess) if excess else None),
            pending=run.sampling.pending() if run.sampling else None,
        )

    def evaluate(self) -> dict[str, float]:
        run = self.run
        run.policy.release()  # until the next step's update: the engines keep their memory for its responses
        groups = run.rollouts.generate_for_evaluation(self.held_out)
        require_version(groups, run.weights.version)
        scored, reading = run.scorer.score_unshaped(groups), reading_of(run.recipe.reward.functions)
        return evaluation_metrics(scored, run.recipe.eval.samples_per_prompt, reading)

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

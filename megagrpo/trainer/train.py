"""A whole run: start or continue, step by step, evaluate, save, and leave a model behind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from megagrpo.batching.work import work_of
from megagrpo.checkpoint.store import CheckpointStore
from megagrpo.checkpoint.trainer_state import TrainerState
from megagrpo.cluster import runtime
from megagrpo.cluster.rollouts import Rollouts
from megagrpo.cluster.shared_files import check_files
from megagrpo.cluster.train_ranks import Policy
from megagrpo.cluster.weight_sync import WeightSync
from megagrpo.data.cursor import Cursor
from megagrpo.errors import MismatchError, Problem
from megagrpo.preflight.preflight import Preflight
from megagrpo.recipe.defaults import (
    checkpoint_directory,
    dtype_name,
    run_directory,
    total_steps,
    with_absolute_directories,
)
from megagrpo.recipe.schema import Recipe
from megagrpo.reward.scorer import Scorer
from megagrpo.track.tracker import Tracker
from megagrpo.trainer.clock import PhaseClock
from megagrpo.trainer.evaluation import EarlyStopping, evaluation_metrics
from megagrpo.trainer.mismatch import report_mismatch
from megagrpo.trainer.prompts import describe_files, read_mixture, read_tokenizer
from megagrpo.trainer.run import Run
from megagrpo.trainer.run_lock import only_process_of
from megagrpo.trainer.saving import checkpoint_to_resume, export, exported_step, open_store, recipe_values, save
from megagrpo.trainer.sequences import require_version
from megagrpo.trainer.step import grpo_step
from megagrpo.trainer.step_metrics import sequence_tokens
from megagrpo.trainer.stopping import Stopping, StopRequested, until_stopped
from megagrpo.types import Prompt


@dataclass(frozen=True)
class Progress:
    """How far a run is: what its next checkpoint will say. A step that is given up leaves it as it was."""

    kl_coefficient: float  # of the next step
    data_cursor: Mapping[str, Any]
    step: int = 0
    episodes: int = 0
    evaluation: dict[str, float] | None = None  # of exactly these weights
    unlogged: dict[str, float] | None = None  # of the step, if it still waits for its evaluation
    early: EarlyStopping | None = None  # None: the recipe has no rule


def train(checked: Preflight[Recipe]) -> int:
    """Runs the recipe to its end, from its newest checkpoint if it has one; 0.

    Raises MegagrpoError; RunStopped, once everything is saved, if the process was sent SIGTERM or SIGUSR1.
    """
    store = open_store(checked.recipe)
    return until_stopped(lambda stopping: _train(checked, store, stopping), store.newest)


def _train(checked: Preflight[Recipe], store: CheckpointStore, stopping: Stopping) -> int:
    recipe = checked.recipe
    with ExitStack() as closing:
        closing.enter_context(only_process_of(run_directory(recipe)))
        resumed = checkpoint_to_resume(store, recipe)
        tokenizer = read_tokenizer(recipe, checked.tokenizer_directory)
        prompts = read_mixture(recipe, recipe.data.train, tokenizer)
        held_out = read_mixture(recipe, recipe.eval.files, tokenizer) if recipe.eval.files else None
        cursor = Cursor(prompts.prompts, seed=recipe.seed, shuffle=recipe.data.shuffle)
        if resumed:
            cursor.restore(resumed.state.data_cursor)
        progress = _progress(recipe, cursor, resumed.state if resumed else None)
        steps = total_steps(recipe, len(cursor))

        tracker = closing.enter_context(Tracker(recipe, steps))
        runs = resumed.state.tracker_runs if resumed else None
        tracker.start(progress.step, runs, unlogged=progress.unlogged is not None)
        for mixture in (prompts, held_out):
            for line in describe_files(mixture.files, "prompts") if mixture else ():
                tracker.say(line)
        if resumed:
            for line in (f"continuing after step {progress.step} from {resumed.path}", *resumed.warnings):
                tracker.say(line)
            exported = not recipe.checkpoint.export_hugging_face or exported_step(recipe) == progress.step
            over = progress.step >= steps or _reason_to_stop(progress, cursor)
            if exported and over and progress.unlogged is None:
                tracker.say("the run is complete: nothing to do")
                return 0

        with stopping.giving_up():
            with stopping.while_ray_starts():
                ray = runtime.start(recipe, stopping.check)
            closing.callback(runtime.stop, ray)
            model, tokenizer_directory = checked.model_directory.absolute(), checked.tokenizer_directory.absolute()
            critic = checked.critic_directory.absolute() if checked.critic_directory else model
            written = (run_directory(recipe), checkpoint_directory(recipe))
            check_files(ray, written, (model, tokenizer_directory, critic), recipe.cluster.start_timeout_seconds)
            placed = with_absolute_directories(recipe)

            def start_engines() -> Rollouts:
                started = Rollouts(ray, placed, model, tokenizer_directory)
                closing.callback(started.close)
                return started

            # Beside the ranks, but for shared GPUs: engines that start take what is free there.
            early = None if ray.shares_gpus else start_engines()
            policy = Policy(ray, placed, model, critic)
            closing.callback(policy.close)
            if resumed:
                policy.load(resumed.rank_directory)
            policy.release()
            rollouts = early or start_engines()
            rollouts.wait_until_ready()
            rollouts.release_memory(["kv_cache"])  # not beside the parameters that a sync needs
            scorer = Scorer(recipe.reward, recipe.rollout.response_tokens_max, stopping.check)
            closing.callback(scorer.close)
            weights = WeightSync(policy, rollouts, placed, tracker.say)
            closing.callback(weights.close)
            with policy.needed(["parameters"]):
                weights.check_replicas()
                weights.sync(version=progress.step)

        clock, work = PhaseClock(), work_of(checked.architecture)
        run = Run(recipe, steps, cursor, rollouts, scorer, policy, weights, clock, work, stopping)
        step = _run_steps(run, progress, held_out.prompts if held_out else (), store, tracker, tokenizer.decode)
        if recipe.checkpoint.export_hugging_face:
            rollouts.release_memory()
            with stopping.giving_up(), policy.needed(["parameters"]):
                directory = export(policy, checked, tokenizer, step, dtype_name(recipe, ray.device))
            tracker.say(f"Hugging Face model: {directory}")
    return 0


def _progress(recipe: Recipe, cursor: Cursor[Prompt], state: TrainerState | None) -> Progress:
    """Where the run stands. Early stopping remembers the best only of the metric that it still watches."""
    rule = recipe.eval.early_stopping
    early = EarlyStopping(rule) if rule else None
    coefficient = recipe.algorithm.kl.coefficient
    if state is None:
        return Progress(coefficient, cursor.state(), early=early)
    if recipe.algorithm.kl.target is not None and state.kl_coefficient is not None:
        coefficient = state.kl_coefficient
    before = state.recipe["eval"]["early_stopping"]
    if rule and before and before["metric"] == rule.metric:
        early = EarlyStopping(rule, state.best_evaluation, state.evaluations_without_best)
    evaluation = dict(state.evaluation) if state.evaluation else None
    unlogged = dict(state.unlogged) if state.unlogged else None
    return Progress(coefficient, cursor.state(), state.step, state.episodes, evaluation, unlogged, early)


def _reason_to_stop(progress: Progress, cursor: Cursor[Prompt]) -> str | None:
    """Why the run ends before its length. Having nothing left to learn from is an end, not an error: the model of a
    run that solves all of its prompts is what was wanted, so it is evaluated, saved and exported as any other.
    """
    if cursor.exhausted:
        return "every prompt is set aside (data.no_resampling_pass_rate)"
    return progress.early.reason_to_stop() if progress.early else None


def _run_steps(
    run: Run,
    progress: Progress,
    held_out: Sequence[Prompt],
    store: CheckpointStore,
    tracker: Tracker,
    decode: Callable[[Sequence[int]], str],
) -> int:
    """Steps until the run's length or early stopping; evaluates and saves when due. Returns the last step.

    A step is logged before it is saved: a run killed in between repeats the step, and its line is written again.
    Raises MismatchError, once the step is saved, if it differs from its rollouts by more than the recipe lets it, and
    StopRequested once all steps that are done are saved.
    """
    recipe, saved = run.recipe, progress.step
    excess: Problem | None = None
    try:
        if progress.step == 0 and held_out and recipe.eval.before_training:
            progress = _evaluate(run, progress, held_out)
            tracker.log(0, _evaluation_metrics(progress) | run.clock.take())

        reason = _reason_to_stop(progress, run.cursor)
        while progress.unlogged is not None or (progress.step < run.total_steps and not reason):
            if progress.unlogged is None:
                progress, excess = _train_step(run, progress, tracker, decode)
            last = progress.step == run.total_steps or run.cursor.exhausted
            if held_out and (last or progress.step % recipe.eval.every_steps == 0):
                progress = _evaluate(run, progress, held_out)
            reason = _reason_to_stop(progress, run.cursor)
            step, metrics = progress.step, progress.unlogged or {}
            tracker.log(step, metrics | _evaluation_metrics(progress) | run.clock.take())
            progress = replace(progress, unlogged=None)
            due = last or reason or excess or step % recipe.checkpoint.every_steps == 0
            if due or _is_new_best(recipe.checkpoint.keep_best, progress.evaluation, store):
                _save(run, progress, store, tracker, goes_on=not (last or reason or excess))
                saved = step
            if excess:
                raise MismatchError(excess)
    except StopRequested:
        if progress.step > saved:
            run.weights.give_up()
            run.rollouts.give_up()  # they may hold memory that saving needs
            _save(run, progress, store, tracker, goes_on=False)
        if excess:
            raise MismatchError(excess) from None
        raise
    if reason:
        tracker.say(f"stopped after step {progress.step}: {reason}")
    return progress.step


def _train_step(
    run: Run, before: Progress, tracker: Tracker, decode: Callable[[Sequence[int]], str]
) -> tuple[Progress, Problem | None]:
    """The next step, not yet evaluated or logged; and how it differs from its rollouts, if that is to end the run."""
    step = before.step + 1
    with run.clock.phase("step"):
        done = grpo_step(run, step, before.kl_coefficient)
    tracker.rollouts(step, done.groups)
    excess = report_mismatch(run.recipe, step, done.mismatch, done.groups, tracker, decode)
    seconds = run.clock.take()
    speed = {"tokens_per_second": sequence_tokens(done.sampled) / seconds["seconds/step"]}
    progress = replace(
        before,
        kl_coefficient=done.kl_coefficient,
        data_cursor=run.cursor.state(),
        step=step,
        episodes=before.episodes + sum(len(group.samples) for group in done.sampled),
        evaluation=None,
        unlogged=done.metrics | speed | seconds,
    )
    return progress, excess


def _save(run: Run, progress: Progress, store: CheckpointStore, tracker: Tracker, *, goes_on: bool) -> None:
    """goes_on: there is another step, for which the engines need their weights back if saving took their place."""
    with run.clock.phase("checkpoint"):
        engines_gone = run.policy.away and run.rollouts.release_memory()
        with run.policy.needed():
            run.weights.check_replicas()
            save(run.policy, store, _trainer_state(run, progress, tracker))
        if engines_gone and goes_on and not run.stopping.requested:
            run.weights.sync(version=progress.step)


def _is_new_best(metric: str | None, evaluation: Mapping[str, float] | None, store: CheckpointStore) -> bool:
    """Whether these weights were evaluated as better than every checkpoint that is kept."""
    if metric is None or evaluation is None:
        return False
    best = store.best()
    return best is None or evaluation[metric] > best


def _evaluate(run: Run, progress: Progress, held_out: Sequence[Prompt]) -> Progress:
    with run.stopping.giving_up(), run.clock.phase("eval"):
        run.policy.release()  # until the next step's update: the engines keep their memory for its responses
        groups = run.rollouts.generate_for_evaluation(held_out)
        require_version(groups, run.weights.version)
        groups = run.scorer.score_unshaped(groups)
    evaluation = evaluation_metrics(groups, run.recipe.eval.samples_per_prompt)
    early = progress.early.after(evaluation) if progress.early else None
    return replace(progress, evaluation=evaluation, early=early)


def _evaluation_metrics(progress: Progress) -> dict[str, float]:
    return {f"eval/{name}": value for name, value in (progress.evaluation or {}).items()}


def _trainer_state(run: Run, progress: Progress, tracker: Tracker) -> TrainerState:
    return TrainerState(
        step=progress.step,
        weight_version=progress.step,
        data_cursor=progress.data_cursor,
        recipe=recipe_values(run.recipe),
        episodes=progress.episodes,
        kl_coefficient=progress.kl_coefficient,
        evaluation=progress.evaluation,
        unlogged=progress.unlogged,
        best_evaluation=progress.early.best if progress.early else None,
        evaluations_without_best=progress.early.evaluations_without_best if progress.early else 0,
        tracker_runs=tracker.run_ids,
    )

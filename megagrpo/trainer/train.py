"""A whole run: start or continue, step by step, evaluate, save, and leave a model behind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from megagrpo.batching.work import work_of
from megagrpo.checkpoint.store import CheckpointStore
from megagrpo.checkpoint.trainer_state import TrainerState
from megagrpo.cluster import runtime
from megagrpo.cluster.policy import Policy
from megagrpo.cluster.rollouts import Rollouts
from megagrpo.cluster.weight_sync import WeightSync
from megagrpo.data.cursor import Cursor
from megagrpo.errors import MismatchError
from megagrpo.recipe.defaults import dtype_name, run_directory
from megagrpo.recipe.schema import Recipe
from megagrpo.reward.scorer import Scorer
from megagrpo.track.tracker import Tracker
from megagrpo.trainer.clock import PhaseClock
from megagrpo.trainer.evaluation import EarlyStopping, evaluation_metrics
from megagrpo.trainer.mismatch import report_mismatch
from megagrpo.trainer.preflight import Preflight
from megagrpo.trainer.prompts import describe_files, read_mixture, read_tokenizer, total_steps
from megagrpo.trainer.run import Run
from megagrpo.trainer.run_lock import only_process_of
from megagrpo.trainer.saving import checkpoint_to_resume, export, exported_step, open_store, recipe_values, save
from megagrpo.trainer.sequences import require_version
from megagrpo.trainer.step import grpo_step
from megagrpo.trainer.step_metrics import sequence_tokens
from megagrpo.types import Prompt


@dataclass(frozen=True)
class Progress:
    """How far a run is: what its next checkpoint will say, apart from what the cursor and the tracker know."""

    kl_coefficient: float  # of the next step
    step: int = 0
    episodes: int = 0
    evaluation: dict[str, float] | None = None  # of exactly these weights
    stopping: EarlyStopping | None = None  # None: the recipe has no rule


def train(checked: Preflight[Recipe]) -> int:
    """Runs the recipe to its end, from its newest checkpoint if it has one; 0. Raises MegagrpoError."""
    recipe = checked.recipe
    with ExitStack() as closing:
        closing.enter_context(only_process_of(run_directory(recipe)))
        store = open_store(recipe)
        resumed = checkpoint_to_resume(store, recipe)
        progress = _progress(recipe, resumed.state if resumed else None)
        tokenizer = read_tokenizer(recipe, checked.tokenizer_directory)
        prompts = read_mixture(recipe, recipe.data.train, tokenizer)
        held_out = read_mixture(recipe, recipe.eval.files, tokenizer) if recipe.eval.files else None
        cursor = Cursor(prompts.prompts, seed=recipe.seed, shuffle=recipe.data.shuffle)
        if resumed:
            cursor.restore(resumed.state.data_cursor)
        steps = total_steps(recipe, len(cursor))

        tracker = closing.enter_context(Tracker(recipe, steps))
        tracker.start(progress.step, resumed.state.tracker_runs if resumed else None)
        for mixture in (prompts, held_out):
            for line in describe_files(mixture.files, "prompts") if mixture else ():
                tracker.say(line)
        if resumed:
            for line in (f"continuing after step {progress.step} from {resumed.path}", *resumed.warnings):
                tracker.say(line)
            exported = not recipe.checkpoint.export_hugging_face or exported_step(recipe) == progress.step
            if exported and (progress.step >= steps or _reason_to_stop(progress, cursor)):
                tracker.say("the run is complete: nothing to do")
                return 0

        ray = runtime.start(recipe)
        closing.callback(runtime.stop, ray)
        model_directory = checked.model_directory.absolute()
        rollouts = Rollouts(ray, recipe, model_directory, checked.tokenizer_directory.absolute())
        closing.callback(rollouts.close)
        policy = Policy(ray, recipe, model_directory, checked.critic_directory)
        rollouts.wait_until_ready()
        scorer = Scorer(recipe.reward, recipe.rollout.response_tokens_max)
        closing.callback(scorer.close)
        if resumed:
            policy.call("load", resumed.rank_directory)
        weights = WeightSync(policy, rollouts, recipe, tracker.say)
        closing.callback(weights.close)
        weights.check_replicas()
        weights.sync(version=progress.step)

        clock, work = PhaseClock(), work_of(checked.architecture)
        run = Run(recipe, steps, cursor, rollouts, scorer, policy, weights, clock, work)
        step = _run_steps(run, progress, held_out.prompts if held_out else (), store, tracker, tokenizer.decode)
        if recipe.checkpoint.export_hugging_face:
            directory = export(policy, checked, tokenizer, step, dtype_name(recipe, ray.device))
            tracker.say(f"Hugging Face model: {directory}")
    return 0


def _progress(recipe: Recipe, state: TrainerState | None) -> Progress:
    """Where the run stands. Early stopping remembers the best only of the metric that it still watches."""
    rule = recipe.eval.early_stopping
    stopping = EarlyStopping(rule) if rule else None
    coefficient = recipe.algorithm.kl.coefficient
    if state is None:
        return Progress(coefficient, stopping=stopping)
    if recipe.algorithm.kl.target is not None and state.kl_coefficient is not None:
        coefficient = state.kl_coefficient
    before = state.recipe["eval"]["early_stopping"]
    if rule and before and before["metric"] == rule.metric:
        stopping = EarlyStopping(rule, state.best_evaluation, state.evaluations_without_best)
    evaluation = dict(state.evaluation) if state.evaluation else None
    return Progress(coefficient, state.step, state.episodes, evaluation, stopping)


def _reason_to_stop(progress: Progress, cursor: Cursor[Prompt]) -> str | None:
    """Why the run ends before its length. Having nothing left to learn from is an end, not an error: the model of a
    run that solves all of its prompts is what was wanted, so it is evaluated, saved and exported as any other.
    """
    if cursor.exhausted:
        return "every prompt is set aside (data.no_resampling_pass_rate)"
    return progress.stopping.reason_to_stop() if progress.stopping else None


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
    Raises MismatchError, once the step is saved, if it differs from its rollouts by more than the recipe lets it.
    """
    recipe, clock = run.recipe, run.clock
    if progress.step == 0 and held_out and recipe.eval.before_training:
        progress = _evaluate(run, progress, held_out)
        tracker.log(0, _evaluation_metrics(progress) | clock.take())

    reason = _reason_to_stop(progress, run.cursor)
    while progress.step < run.total_steps and not reason:
        step = progress.step + 1
        with clock.phase("step"):
            done = grpo_step(run, step, progress.kl_coefficient)
        progress = replace(
            progress,
            step=step,
            episodes=progress.episodes + sum(len(group.samples) for group in done.sampled),
            evaluation=None,
            kl_coefficient=done.kl_coefficient,
        )
        last = step == run.total_steps or run.cursor.exhausted
        if held_out and (last or step % recipe.eval.every_steps == 0):
            progress = _evaluate(run, progress, held_out)
        reason = _reason_to_stop(progress, run.cursor)
        tracker.rollouts(step, done.groups)
        excess = report_mismatch(recipe, step, done.mismatch, done.groups, tracker, decode)
        seconds = clock.take()
        speed = {"tokens_per_second": sequence_tokens(done.sampled) / seconds["seconds/step"]}
        tracker.log(step, done.metrics | _evaluation_metrics(progress) | speed | seconds)
        due = last or reason or excess or step % recipe.checkpoint.every_steps == 0
        if due or _is_new_best(recipe.checkpoint.keep_best, progress.evaluation, store):
            with clock.phase("checkpoint"):
                run.weights.check_replicas()
                save(run.policy, store, _trainer_state(run, progress, tracker))
        if excess:
            raise MismatchError(excess)
    if reason:
        tracker.say(f"stopped after step {progress.step}: {reason}")
    return progress.step


def _is_new_best(metric: str | None, evaluation: Mapping[str, float] | None, store: CheckpointStore) -> bool:
    """Whether these weights were evaluated as better than every checkpoint that is kept."""
    if metric is None or evaluation is None:
        return False
    best = store.best()
    return best is None or evaluation[metric] > best


def _evaluate(run: Run, progress: Progress, held_out: Sequence[Prompt]) -> Progress:
    with run.clock.phase("eval"), run.policy.released():
        groups = run.rollouts.generate_for_evaluation(held_out)
        require_version(groups, run.weights.version)
        groups = run.scorer.score_unshaped(groups)
    evaluation = evaluation_metrics(groups, run.recipe.eval.samples_per_prompt)
    stopping = progress.stopping.after(evaluation) if progress.stopping else None
    return replace(progress, evaluation=evaluation, stopping=stopping)


def _evaluation_metrics(progress: Progress) -> dict[str, float]:
    return {f"eval/{name}": value for name, value in (progress.evaluation or {}).items()}


def _trainer_state(run: Run, progress: Progress, tracker: Tracker) -> TrainerState:
    return TrainerState(
        step=progress.step,
        weight_version=progress.step,
        data_cursor=run.cursor.state(),
        recipe=recipe_values(run.recipe),
        episodes=progress.episodes,
        kl_coefficient=progress.kl_coefficient,
        evaluation=progress.evaluation,
        best_evaluation=progress.stopping.best if progress.stopping else None,
        evaluations_without_best=progress.stopping.evaluations_without_best if progress.stopping else 0,
        tracker_runs=tracker.run_ids,
    )

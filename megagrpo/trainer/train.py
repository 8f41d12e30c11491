"""A whole run: start or continue, step by step, evaluate, save, and leave a model behind."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from megagrpo.checkpoint.store import CheckpointStore
from megagrpo.checkpoint.trainer_state import TrainerState
from megagrpo.cluster import runtime
from megagrpo.cluster.policy import Policy
from megagrpo.cluster.rollouts import Rollouts
from megagrpo.cluster.weight_sync import WeightSync
from megagrpo.data.cursor import Cursor
from megagrpo.recipe.defaults import dtype_name, export_directory
from megagrpo.reward.scorer import Scorer
from megagrpo.track.tracker import Tracker
from megagrpo.trainer.clock import PhaseClock
from megagrpo.trainer.evaluation import EarlyStopping, evaluation_metrics
from megagrpo.trainer.preflight import Preflight
from megagrpo.trainer.prompts import describe_mixture, read_mixture, read_tokenizer, total_steps
from megagrpo.trainer.saving import checkpoint_to_resume, export, open_store, recipe_values, save
from megagrpo.trainer.step import Run, grpo_step
from megagrpo.trainer.step_metrics import sequence_tokens
from megagrpo.types import Prompt


@dataclass(frozen=True)
class Progress:
    """How far a run is: what its next checkpoint will say, apart from what the cursor and the tracker know."""

    step: int = 0
    evaluation: dict[str, float] | None = None  # of exactly these weights
    stopping: EarlyStopping | None = None  # None: the recipe has no rule

    @property
    def reason_to_stop(self) -> str | None:
        return self.stopping.reason_to_stop() if self.stopping else None


def train(checked: Preflight) -> int:
    """Runs the recipe to its end, from its newest checkpoint if it has one; 0. Raises MegagrpoError."""
    recipe = checked.recipe
    store = open_store(recipe)
    resumed = checkpoint_to_resume(store, recipe)
    tokenizer = read_tokenizer(recipe, checked.tokenizer_directory)
    prompts = read_mixture(recipe, recipe.data.train, tokenizer)
    held_out = read_mixture(recipe, recipe.eval.files, tokenizer) if recipe.eval.files else None
    cursor = Cursor(prompts.prompts, seed=recipe.seed, shuffle=recipe.data.shuffle)
    rule = recipe.eval.early_stopping
    progress = Progress(stopping=EarlyStopping(rule) if rule else None)
    if resumed:
        state = resumed.state
        cursor.restore(state.data_cursor)
        stopping = EarlyStopping(rule, state.best_evaluation, state.evaluations_without_best) if rule else None
        progress = Progress(state.step, dict(state.evaluation) if state.evaluation else None, stopping)

    steps = total_steps(recipe, len(cursor))
    exported = export_directory(recipe)
    with ExitStack() as closing:
        tracker = closing.enter_context(Tracker(recipe, steps))
        tracker.start(progress.step, resumed.state.tracker_runs if resumed else None)
        for mixture in (prompts, held_out):
            for line in describe_mixture(mixture) if mixture else ():
                tracker.say(line)
        if resumed:
            for line in (f"continuing after step {progress.step} from {resumed.path}", *resumed.warnings):
                tracker.say(line)
            over = progress.step >= steps or progress.reason_to_stop
            if over and (exported.exists() or not recipe.checkpoint.export_hugging_face):
                tracker.say("the run is complete: nothing to do")
                return 0

        ray = runtime.start(recipe)
        closing.callback(runtime.stop, ray)
        rollouts = Rollouts(ray, recipe, checked.model_directory, checked.tokenizer_directory)
        policy = Policy(ray, recipe, checked.model_directory)
        rollouts.wait_until_ready()
        scorer = Scorer(recipe.reward)
        closing.callback(scorer.close)
        if resumed:
            policy.call("load", resumed.rank_directory)
        weights = WeightSync(policy, rollouts, recipe.cluster.step_timeout_seconds)
        weights.sync(version=progress.step)

        run = Run(recipe, steps, cursor, rollouts, scorer, policy, weights, PhaseClock())
        _run_steps(run, progress, held_out.prompts if held_out else (), store, tracker)
        if recipe.checkpoint.export_hugging_face:
            export(policy, checked.architecture, checked.model_directory, exported, dtype_name(recipe, ray.device))
            tracker.say(f"Hugging Face model: {exported}")
    return 0


def _run_steps(
    run: Run, progress: Progress, held_out: Sequence[Prompt], store: CheckpointStore, tracker: Tracker
) -> None:
    """Steps until the run's length or early stopping; evaluates and saves when due, and always at the end.

    A step is logged before it is saved: a run killed in between repeats the step, and its line is written again.
    """
    recipe, clock = run.recipe, run.clock
    if progress.step == 0 and held_out and recipe.eval.before_training:
        progress = _evaluate(run, progress, held_out)
        tracker.log(0, _evaluation_metrics(progress) | clock.take())

    reason = progress.reason_to_stop
    while progress.step < run.total_steps and not reason:
        step = progress.step + 1
        with clock.phase("step"):
            done = grpo_step(run, step)
        progress = replace(progress, step=step, evaluation=None)
        last = step == run.total_steps
        if held_out and (last or step % recipe.eval.every_steps == 0):
            progress = _evaluate(run, progress, held_out)
            reason = progress.reason_to_stop
        tracker.rollouts(step, done.groups)
        seconds = clock.take()
        speed = {"tokens_per_second": sequence_tokens(done.groups) / seconds["seconds/step"]}
        tracker.log(step, done.metrics | _evaluation_metrics(progress) | speed | seconds)
        if last or reason or step % recipe.checkpoint.every_steps == 0:
            with clock.phase("checkpoint"):
                save(run.policy, store, _trainer_state(run, progress, tracker))
    if reason:
        tracker.say(f"stopped after step {progress.step}: {reason}")


def _evaluate(run: Run, progress: Progress, held_out: Sequence[Prompt]) -> Progress:
    with run.clock.phase("eval"), run.policy.released():
        groups = run.scorer.score(run.rollouts.generate_for_evaluation(held_out))
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
        episodes=progress.step * run.recipe.rollout.prompts_per_step * run.recipe.rollout.samples_per_prompt,
        evaluation=progress.evaluation,
        best_evaluation=progress.stopping.best if progress.stopping else None,
        evaluations_without_best=progress.stopping.evaluations_without_best if progress.stopping else 0,
        tracker_runs=tracker.run_ids,
    )

"""One step of GRPO, from prompts to a new weight version (DeepSeekMath, arXiv:2402.03300, algorithm 1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megagrpo.algorithm.advantage import groups_with_signal, grpo_advantages, penalized_scores
from megagrpo.algorithm.learning_rate import learning_rate
from megagrpo.algorithm.mismatch import Mismatch
from megagrpo.batching.microbatch import RankBatch
from megagrpo.batching.rank_batches import make_rank_batches
from megagrpo.cluster.policy import Policy
from megagrpo.cluster.rollouts import Rollouts
from megagrpo.cluster.weight_sync import WeightSync
from megagrpo.data.cursor import Cursor
from megagrpo.recipe.schema import Recipe
from megagrpo.reward.scorer import Scorer
from megagrpo.trainer.clock import PhaseClock
from megagrpo.trainer.sequences import flat_scores, group_of_row, require_version, response_lengths, train_sequences
from megagrpo.trainer.step_metrics import batch_metrics, rollout_metrics, update_metrics
from megagrpo.types import Group, Prompt


@dataclass(frozen=True)
class Run:
    """Everything a step works with."""

    recipe: Recipe
    total_steps: int
    cursor: Cursor[Prompt]
    rollouts: Rollouts
    scorer: Scorer
    policy: Policy
    weights: WeightSync
    clock: PhaseClock


@dataclass(frozen=True)
class Step:
    """What a step leaves behind for the trackers."""

    metrics: dict[str, float]
    groups: Sequence[Group]
    mismatch: Mismatch | None  # None: no group was trained on


def grpo_step(run: Run, step: int) -> Step:
    """Runs step `step` (the first is 1). The weight version afterwards is `step`."""
    algorithm, clock = run.recipe.algorithm, run.clock

    with clock.phase("rollout"), run.policy.released():
        prompts = run.cursor.next(run.recipe.rollout.prompts_per_step)
        groups = run.rollouts.generate(prompts, step)
        require_version(groups, run.weights.version)
        run.rollouts.release_memory()

    with clock.phase("reward"):
        groups = run.scorer.score(groups)
        scores, group_ids = flat_scores(groups), group_of_row(groups)
        metrics = rollout_metrics(groups, scores)
        rows = ~np.isnan(scores)

    if kl_in_reward(run.recipe):
        with clock.phase("logprobs"):
            batches = _load_batch(run, groups, rows, step)
            if batches:
                kl = run.policy.token_kl(response_lengths(groups)).sums()
                scores = penalized_scores(scores, kl, algorithm.kl.coefficient)

    advantages = grpo_advantages(scores, group_ids, algorithm.advantage.standard_deviation, algorithm.advantage.epsilon)
    with_signal = groups_with_signal(advantages, group_ids)

    if not kl_in_reward(run.recipe):
        with clock.phase("logprobs"):
            if algorithm.skip_groups_without_signal:
                rows &= np.isin(group_ids, with_signal)
            batches = _load_batch(run, groups, rows, step)
    metrics |= batch_metrics(run.recipe, advantages, len(with_signal), batches)

    updated = None
    if batches:
        with clock.phase("update"):
            lr = learning_rate(step, run.total_steps, run.recipe.train.optimizer)
            coefficient = 0.0 if kl_in_reward(run.recipe) else algorithm.kl.coefficient
            updated = run.policy.update(advantages.astype(np.float32), lr, coefficient)
            metrics |= {"lr": lr} | update_metrics(updated)

    with clock.phase("weight_sync"):
        run.weights.sync(version=step)

    return Step(metrics | {"weights/version": float(step)}, groups, updated.mismatch if updated else None)


def kl_in_reward(recipe: Recipe) -> bool:
    return recipe.algorithm.kl.coefficient > 0 and recipe.algorithm.kl.placement == "reward"


def _load_batch(run: Run, groups: Sequence[Group], rows: np.ndarray, step: int) -> list[RankBatch]:
    """Sends the chosen rows to the training ranks and has them compute the logprobs that the recipe needs.

    Returns what was sent, one batch per data rank; nothing if no row was chosen.
    """
    sequences = train_sequences(groups, rows)
    if not sequences:
        return []
    algorithm, train = run.recipe.algorithm, run.recipe.train
    batches = make_rank_batches(
        sequences,
        layout=train.layout.parallel(),
        minibatches=algorithm.minibatches,
        tokens_per_microbatch=train.tokens_per_microbatch,
        seed=run.recipe.seed + step,
    )
    run.policy.load_batch(batches)
    # With one update per step the update's own forward pass gives the old logprobs.
    if algorithm.minibatches * algorithm.epochs > 1 or kl_in_reward(run.recipe):
        run.policy.compute_old_logprobs()
    if algorithm.kl.coefficient > 0:
        run.policy.compute_reference_logprobs()
    return batches

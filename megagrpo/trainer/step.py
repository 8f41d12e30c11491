"""One step of GRPO or PPO, from prompts to a new weight version (DeepSeekMath, arXiv:2402.03300, algorithm 1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megagrpo.algorithm.advantage import Advantages, compute_advantages, groups_with_signal, is_by_group
from megagrpo.algorithm.kl_coefficient import next_coefficient
from megagrpo.algorithm.learning_rate import learning_rate
from megagrpo.algorithm.mismatch import Mismatch
from megagrpo.batching.rank_batches import RankBatch
from megagrpo.recipe.passes import kl_in_reward, policy_learns, reads_batch
from megagrpo.recipe.schema import Recipe
from megagrpo.trainer.batch import load_batch, with_kl_and_values
from megagrpo.trainer.run import Run
from megagrpo.trainer.sampling import sample_step
from megagrpo.trainer.sequences import advantage_inputs, trainable_rows
from megagrpo.trainer.step_metrics import (
    batch_metrics,
    critic_metrics,
    rollout_metrics,
    sampling_metrics,
    update_metrics,
)
from megagrpo.types import Group


@dataclass(frozen=True)
class Step:
    """What a step leaves behind: for the trackers, and for the next step."""

    metrics: dict[str, float]
    groups: Sequence[Group]
    """Those that the step could train on: rows of `mismatch` are their samples."""

    sampled: Sequence[Group]
    """All that were sampled, `groups` among them."""

    mismatch: Mismatch | None
    """None: the policy was not trained."""

    kl_coefficient: float
    """Of the next step."""


def grpo_step(run: Run, step: int, kl_coefficient: float) -> Step:
    """Runs step `step` (the first is 1). The weight version afterwards is `step`, unless the run is told to stop.

    Raises StopRequested if it is told so before everything is scored: the training ranks are as if it never began.
    """
    recipe, algorithm, clock = run.recipe, run.recipe.algorithm, run.clock

    sampled = sample_step(run, step)
    inputs = advantage_inputs(recipe, sampled.groups, sampled.baselines)
    rows = trainable_rows(inputs)
    metrics = rollout_metrics(sampled.all) | sampling_metrics(recipe, sampled, run.cursor)

    batches: list[RankBatch] = []
    if reads_batch(algorithm):
        with clock.phase("logprobs"):
            batches = load_batch(run, sampled.groups, rows, step)
            inputs = with_kl_and_values(run, inputs, kl_coefficient, loaded=bool(batches))
    advantages = compute_advantages(inputs, algorithm.advantage)
    if not reads_batch(algorithm):
        with clock.phase("logprobs"):
            if skips_groups(recipe):
                rows &= np.isin(inputs.group_ids, groups_with_signal(advantages.of_rows, inputs.group_ids))
            batches = load_batch(run, sampled.groups, rows, step)

    mismatch = None
    if batches:
        metrics |= batch_metrics(recipe, advantages.of_rows, batches)
        with clock.phase("update"):
            metrics |= _update_critic(run, advantages, step)
            if policy_learns(algorithm, step):
                lr = policy_learning_rate(recipe, step, run.total_steps)
                in_loss = 0.0 if kl_in_reward(algorithm) else kl_coefficient
                updated = run.policy.update(advantages.of_tokens or advantages.of_rows, lr, in_loss, step)
                metrics |= {"lr": lr} | update_metrics(updated)
                mismatch = updated.mismatch
                if updated.kl is not None:
                    metrics["kl/coefficient"] = kl_coefficient
                    kl_coefficient = _next_kl_coefficient(recipe, kl_coefficient, updated.kl, int(rows.sum()))

    every = algorithm.reference.update_every_steps
    if every is not None and step % every == 0:
        with clock.phase("update"):
            run.policy.update_reference()

    if not run.stopping.requested:
        with clock.phase("weight_sync"):
            run.weights.sync(version=step)

    metrics["weights/version"] = float(step)
    return Step(metrics, sampled.groups, sampled.all, mismatch, kl_coefficient)


def skips_groups(recipe: Recipe) -> bool:
    """Whether groups whose advantages are all zero are left out. gpg's factor makes up for them: they must stay."""
    advantage = recipe.algorithm.advantage.name
    return recipe.algorithm.skip_groups_without_signal and is_by_group(advantage) and advantage != "gpg"


def policy_learning_rate(recipe: Recipe, step: int, total_steps: int) -> float:
    """train.optimizer's schedule, over the steps after the critic's warm-up."""
    critic = recipe.algorithm.critic
    waited = critic.warmup_steps if critic else 0
    return learning_rate(step - waited, total_steps - waited, recipe.train.optimizer)


def critic_learning_rate(recipe: Recipe, step: int, total_steps: int) -> float:
    """train.optimizer's schedule, its warm-up included, with the critic's peak."""
    if recipe.algorithm.critic is None:
        raise ValueError("no critic")
    optimizer = recipe.train.optimizer
    return learning_rate(step, total_steps, optimizer) * recipe.algorithm.critic.lr / optimizer.lr


def _update_critic(run: Run, advantages: Advantages, step: int) -> dict[str, float]:
    if advantages.returns is None:
        return {}
    lr = critic_learning_rate(run.recipe, step, run.total_steps)
    return {"critic/lr": lr} | critic_metrics(run.policy.update_critic(advantages.returns, lr))


def _next_kl_coefficient(recipe: Recipe, coefficient: float, kl: float, samples: int) -> float:
    settings = recipe.algorithm.kl
    return next_coefficient(coefficient, kl, settings.target, settings.horizon, samples)

"""A step's metrics on the driver. Names and meanings are in track/metrics.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from megagrpo.batching.rank_batches import RankBatch, imbalance, packing_efficiency
from megagrpo.data.cursor import Cursor
from megagrpo.recipe.schema import Recipe
from megagrpo.trainer.sampling import Sampled, with_signal
from megagrpo.trainer.sequences import flat_scores
from megagrpo.types import Group, Prompt

if TYPE_CHECKING:
    from megagrpo.rank_results import CriticMetrics, StepMetrics


def rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """What the rollouts and rewards of a step looked like."""
    scores = flat_scores(groups)
    samples = [sample for group in groups for sample in group.samples]
    lengths = np.array([len(sample.tokens) for sample in samples])
    metrics = {
        **_spread("reward", scores[~np.isnan(scores)]),
        "reward/errors": float(sum(bool(score.error) for group in groups for score in group.scores)),
        "reward/truncated_masked": float(sum(bool(score.masked) for group in groups for score in group.scores)),
        "reward/solved_share": float(np.mean([score.solved for group in groups for score in group.scores])),
        "response_tokens/mean": float(lengths.mean()),
        "response_tokens/max": float(lengths.max()),
        "response_tokens/truncated_share": float(np.mean([sample.finish == "length" for sample in samples])),
        "response_tokens/aborted_share": float(np.mean([sample.finish == "abort" for sample in samples])),
        "prompt_tokens/mean": float(np.mean([len(group.prompt.tokens) for group in groups])),
    }
    parts: dict[str, list[float]] = {}
    for group in groups:
        for score in group.scores:
            for name, value in score.parts.items():
                parts.setdefault(name, []).append(value)
    metrics.update({f"reward/{name}": float(np.mean(values)) for name, values in parts.items()})
    return metrics


def sampling_metrics(recipe: Recipe, sampled: Sampled, cursor: Cursor[Prompt]) -> dict[str, float]:
    """How many of the groups teach anything, and what became of the others."""
    metrics = {"groups/with_signal_share": len(with_signal(sampled.all, recipe)) / len(sampled.all)}
    if sampled.baselines is not None and not np.isnan(sampled.baselines).all():
        metrics["reward/greedy"] = float(np.nanmean(sampled.baselines))
    if recipe.rollout.dynamic_sampling:
        metrics |= {
            "groups/rounds": float(sampled.rounds),
            "groups/sampled": float(len(sampled.all)),
            "groups/left_over": float(sampled.left_over),
            "groups/missing": float(recipe.rollout.prompts_per_step - len(sampled.groups)),
        }
    if recipe.data.no_resampling_pass_rate is not None:
        metrics["prompts/set_aside"] = float(cursor.set_aside_count)
    return metrics


def batch_metrics(recipe: Recipe, advantages: np.ndarray, batches: Sequence[RankBatch]) -> dict[str, float]:
    """How the step's samples became work. `advantages` is float64 [rows]."""
    micros = [micro for batch in batches for minibatch in batch.minibatches for micro in minibatch]
    train = recipe.train
    return {
        "advantages/mean": float(advantages.mean()),
        "advantages/max": float(advantages.max()),
        "advantages/min": float(advantages.min()),
        "packing/microbatches": float(len(micros)),
        "packing/efficiency": packing_efficiency(batches, train.layout.parallel(), train.tokens_per_microbatch),
        "packing/imbalance": imbalance(batches),
    }


def sequence_tokens(groups: Sequence[Group]) -> int:
    """Prompt and response tokens of all samples."""
    return sum(len(group.prompt.tokens) + len(sample.tokens) for group in groups for sample in group.samples)


def _spread(name: str, values: np.ndarray) -> dict[str, float]:
    if not len(values):
        return {}
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/std": float(values.std()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }


def update_metrics(update: StepMetrics) -> dict[str, float]:
    """What the training ranks said of the update."""
    metrics = {
        "loss/total": update.loss,
        "loss/policy": update.policy_loss,
        "clip/low": update.clip_low_fraction,
        "clip/high": update.clip_high_fraction,
        "ratio/mean": update.ratio_mean,
        "entropy": update.entropy,
        "grad_norm": update.grad_norm,
        "logprob_difference/mean": update.mismatch.mean,
        "logprob_difference/p99": update.mismatch.p99,
        "logprob_difference/max": update.mismatch.max,
        "logprob_difference/k1": update.mismatch.k1,
        "logprob_difference/k3": update.mismatch.k3,
        "rollout_ratio/mean": update.mismatch.ratio_mean,
        "rollout_ratio/effective_share": update.mismatch.effective_share,
        "logprob_difference/reverse_k3": update.mismatch.reverse_k3,
        "rollout_ratio/chi2_token": update.mismatch.chi2_token,
        "rollout_ratio/chi2_sequence": update.mismatch.chi2_sequence,
        "perplexity/train": update.mismatch.train_perplexity,
        "perplexity/rollout": update.mismatch.rollout_perplexity,
    }
    if update.kl is not None:
        metrics["kl/mean"] = update.kl
    if update.correction is not None:
        metrics |= {
            "correction/weight_mean": update.correction.weight_mean,
            "correction/outside_share": update.correction.outside_share,
            "correction/rejected_share": update.correction.rejected_share,
            "correction/vetoed_share": update.correction.vetoed_share,
        }
    return metrics


def critic_metrics(update: CriticMetrics) -> dict[str, float]:
    """What the training ranks said of the critic's update."""
    return {
        "critic/loss": update.loss,
        "critic/clip": update.clip_fraction,
        "critic/value_mean": update.value_mean,
        "critic/return_mean": update.return_mean,
        "critic/explained_variance": update.explained_variance,
        "critic/grad_norm": update.grad_norm,
    }

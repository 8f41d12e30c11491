"""A step's metrics on the driver. Names and meanings are in track/metrics.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from megagrpo.batching.microbatch import RankBatch
from megagrpo.batching.pack import packing_efficiency
from megagrpo.recipe.schema import Recipe
from megagrpo.types import Group

if TYPE_CHECKING:
    from megagrpo.megatron.results import StepMetrics


def rollout_metrics(groups: Sequence[Group], scores: np.ndarray) -> dict[str, float]:
    """What the rollouts and rewards of a step looked like. `scores` is float64 [rows], NaN where a reward failed."""
    samples = [sample for group in groups for sample in group.samples]
    lengths = np.array([len(sample.tokens) for sample in samples])
    metrics = {
        **_spread("reward", scores[~np.isnan(scores)]),
        "reward/errors": float(np.isnan(scores).sum()),
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


def batch_metrics(
    recipe: Recipe, advantages: np.ndarray, with_signal: int, batches: Sequence[RankBatch]
) -> dict[str, float]:
    """How the step's samples became work. `advantages` is float64 [rows]; `with_signal` counts groups."""
    micros = [micro for batch in batches for minibatch in batch.minibatches for micro in minibatch]
    train = recipe.train
    return {
        "advantages/mean": float(advantages.mean()),
        "advantages/max": float(advantages.max()),
        "advantages/min": float(advantages.min()),
        "groups/with_signal_share": with_signal / recipe.rollout.prompts_per_step,
        "packing/microbatches": float(len(micros)),
        "packing/efficiency": packing_efficiency(batches, train.layout.parallel(), train.tokens_per_microbatch),
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
    }
    return metrics if update.kl is None else metrics | {"kl/mean": update.kl}

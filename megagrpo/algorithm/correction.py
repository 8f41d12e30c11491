"""Off-policy correction: engines sample a little differently from what the trainer computes.

A token's ratio r is its probability under the trainer, before the update, over that under the engine that sampled it.
Importance weights make up for it (truncated: https://fengyao.notion.site/off-policy-rl; masked: IcePop,
arXiv:2510.18855); what differs too much is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megagrpo.algorithm.log_ratio import bounded
from megagrpo.algorithm.sequences import Sequences
from megagrpo.recipe import schema


@dataclass(frozen=True)
class Corrected:
    """Of the tokens of a minibatch on one rank."""

    importance: Tensor | None  # float32 [tokens], constants: weights of the policy's loss. None: all 1
    kept: Tensor  # bool [tokens]: the others leave the loss and its denominators
    sums: Tensor  # float64 [6], which add over ranks and minibatches; `correction_of` reads them


@dataclass(frozen=True)
class Correction:
    """What a step's correction did, over all response tokens."""

    weight_mean: float  # mean weight within its bounds, before `normalize`; 1 without weights
    outside_share: float  # of tokens whose weight was outside of the bounds
    rejected_share: float  # of tokens that were left out, by rejections or the veto
    vetoed_share: float  # of sequences that the veto left out


def correct(
    old: Tensor,
    rollout: Tensor,
    sequences: Sequences,
    settings: schema.CorrectionConfig,
    sum_over_ranks: Callable[[Tensor], None],
) -> Corrected:
    """Weights of a whole minibatch's tokens, and which of them stay.

    old, rollout: float32 [tokens of this rank], the trainer's logprobs before the update and the engines';
    sum_over_ranks sums a float64 tensor in place over the ranks that hold the minibatch's other tokens.
    Every rejection judges the tokens as they came: their order does not matter. A statistic that is not a number is
    never within bounds.
    """
    log_ratio = old - rollout
    clamped = bounded(log_ratio)
    kept = torch.ones_like(log_ratio, dtype=torch.bool)
    for rejection in settings.reject:
        kept &= _within(clamped, sequences, rejection)
    vetoed = torch.zeros_like(kept)
    if settings.veto is not None:
        below = ~(log_ratio >= math.log(settings.veto))
        vetoed = sequences.of_tokens(sequences.sum(below)) > 0
        kept &= ~vetoed
    weights = outside = None
    if settings.weights is not None:
        weights, outside = _bounded_weights(log_ratio, sequences, settings)
    each = torch.ones_like(log_ratio, dtype=torch.float64)
    sums = torch.stack(
        [
            each,
            each if weights is None else weights.double(),
            torch.zeros_like(each) if outside is None else outside.double(),
            (~kept).double(),
            sequences.shares(),
            vetoed * sequences.shares(),
        ]
    ).sum(1)
    if weights is not None and settings.normalize:
        weights = weights / _mean_weight(weights, kept, sequences, settings, sum_over_ranks)
    importance = None if weights is None else torch.where(kept, weights, 0.0).float()
    return Corrected(importance, kept, sums)


def correction_of(sums: Tensor) -> Correction:
    """From `Corrected.sums` over all ranks and minibatches."""
    tokens, weight, outside, rejected, sequences, vetoed = sums.tolist()
    return Correction(
        weight_mean=weight / tokens if tokens else 1.0,
        outside_share=outside / max(tokens, 1.0),
        rejected_share=rejected / max(tokens, 1.0),
        vetoed_share=vetoed / max(sequences, 1.0),
    )


def _bounded_weights(
    log_ratio: Tensor, sequences: Sequences, settings: schema.CorrectionConfig
) -> tuple[Tensor, Tensor]:
    """Weights [tokens] within their bounds, and which were outside of them, bool [tokens]."""
    log_weight = log_ratio.double()
    if settings.weights == "sequence":
        log_weight = sequences.of_tokens(sequences.sum(log_weight))
    weights = bounded(log_weight).exp()
    outside = ~((weights >= settings.low) & (weights <= settings.high))
    if settings.outside == "truncate":
        return weights.clamp(settings.low, settings.high), outside
    return weights.masked_fill(outside, 0.0), outside


def _mean_weight(
    weights: Tensor,
    kept: Tensor,
    sequences: Sequences,
    settings: schema.CorrectionConfig,
    sum_over_ranks: Callable[[Tensor], None],
) -> Tensor:
    """Over the minibatch's kept tokens, or over the sequences that have any; 1 where all weights are 0."""
    counts = kept.double()
    if settings.weights == "sequence":
        counts = counts / sequences.of_tokens(sequences.sum(counts)).clamp(min=1)
    sums = torch.stack([torch.where(kept, weights, 0.0) * counts, counts]).sum(1)
    sum_over_ranks(sums)
    return torch.where(sums[0] > 0, sums[0] / sums[1].clamp(min=1), 1.0)


def _within(log_ratio: Tensor, sequences: Sequences, rejection: schema.RejectionConfig) -> Tensor:
    """Tokens whose statistic, or their response's, is within the bounds; bool [tokens]."""
    if rejection.level == "token":
        statistic = _statistic(log_ratio, rejection)
        return _at_least(statistic, rejection.low) & _at_most(statistic, rejection.high)
    if rejection.over == "max":
        # A largest value that spans ranks, told by sums alone: none may be above `high`, and one must reach `low`.
        statistic = _statistic(log_ratio, rejection)
        above = sequences.sum(~_at_most(statistic, rejection.high))
        reach = sequences.sum(_at_least(statistic, rejection.low))
        return sequences.of_tokens((above == 0) & (reach > 0))
    over = sequences.sum if rejection.over == "sum" else sequences.mean
    if rejection.statistic == "ratio":  # of the response, not a sum of its tokens' ratios
        statistic = bounded(over(log_ratio)).exp()
    else:
        statistic = over(_statistic(log_ratio, rejection))
    return sequences.of_tokens(_at_least(statistic, rejection.low) & _at_most(statistic, rejection.high))


def _statistic(log_ratio: Tensor, rejection: schema.RejectionConfig) -> Tensor:
    """By token, float64 [tokens]."""
    log_ratio = log_ratio.double()
    if rejection.statistic == "ratio":
        return log_ratio.exp()
    if rejection.statistic == "k1":
        return -log_ratio
    if rejection.statistic == "k2":
        return log_ratio.square() / 2
    return torch.expm1(log_ratio) - log_ratio


def _at_least(values: Tensor, low: float | None) -> Tensor:
    return torch.ones_like(values, dtype=torch.bool) if low is None else values >= low


def _at_most(values: Tensor, high: float | None) -> Tensor:
    return torch.ones_like(values, dtype=torch.bool) if high is None else values <= high

"""Compares the trainer's logprobs of sampled tokens with those of the engines that sampled them.

Everything here is arithmetic on one rank's tokens; what is summed or gathered over ranks is passed on as a function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megagrpo.algorithm.kl import bounded
from megagrpo.algorithm.over_ranks import Sequences, kth_smallest

PERCENT = 99
NO_ROW = -1

# A float32 without its sign bit sorts as the integer that its other 31 bits are.
BITS_WITHOUT_SIGN = 0x7FFFFFFF


@dataclass(frozen=True)
class TokenMismatch:
    """One sampled token, with its two logprobs in nats."""

    row: int  # of the sample in the step
    index: int  # among the sample's response tokens
    train_logprob: float
    rollout_logprob: float


@dataclass(frozen=True)
class Mismatch:
    """The mismatch over a step's trained response tokens, each counted once; d is train - rollout logprob, in nats.

    A logprob that is not a number makes the means NaN and is itself among the worst.
    """

    tokens: int
    mean: float  # of |d|
    p99: float  # the smallest |d| that at least 99 % of the tokens do not exceed
    max: float  # of |d|
    k1: float  # mean of -d: unbiased estimate of KL(rollout || train)
    k3: float  # mean of exp(d) - 1 - d: the same, never negative, of low variance
    reverse_k3: float  # mean of exp(d) d - (exp(d) - 1): the same for KL(train || rollout)
    ratio_mean: float  # of exp(d), the importance weights; 1 if the distributions are equal
    effective_share: float  # (sum of weights)^2 / (tokens x sum of squares)
    chi2_token: float  # mean of exp(d)^2, less 1: chi^2 divergence, the variance of the weights
    chi2_sequence: float  # mean over responses of (product of exp(d))^2, less 1
    train_perplexity: float  # exp of the mean of -logprob
    rollout_perplexity: float
    worst: tuple[TokenMismatch, ...]  # largest |d| first


def mismatch_sums(train: Tensor, rollout: Tensor, sequences: Sequences) -> Tensor:
    """Returns float64 [10], which add over ranks; `mismatch_of` reads them. train, rollout: float32 [tokens]."""
    difference = (train - rollout).double()
    clamped = bounded(difference)
    ratio, excess = clamped.exp(), clamped.expm1()
    of_sequence = bounded(sequences.of_tokens(sequences.sum(difference))).exp()
    return torch.stack(
        [
            torch.ones_like(ratio),
            difference.abs(),
            -difference,
            excess - clamped,
            ratio * clamped - excess,
            ratio,
            ratio.square(),
            of_sequence.square() * sequences.shares(),
            sequences.shares(),
            train.double(),
        ]
    ).sum(1)


def absolute_difference_bits(train: Tensor, rollout: Tensor) -> Tensor:
    """Returns |d| as integers of the same order, int32 [tokens]. Infinity and then NaN are the largest."""
    return (train - rollout).view(torch.int32) & BITS_WITHOUT_SIGN


def percentile_bits(bits: Tensor, total: int, sum_over_ranks: Callable[[Tensor], None]) -> int:
    """Returns the smallest of all ranks' bits that at least PERCENT % of them do not exceed; 0 if there are none.

    bits: int32 [tokens of this rank], not negative; total: tokens of all ranks; sum_over_ranks sums an int64 tensor in
    place. The result is exact.
    """
    if total == 0:
        return 0
    return kth_smallest(bits, -(-total * PERCENT // 100), BITS_WITHOUT_SIGN.bit_length(), sum_over_ranks)[0]


def float_of_bits(bits: int) -> float:
    return torch.tensor(bits, dtype=torch.int32).view(torch.float32).item()


def worst_tokens(rows: Tensor, index: Tensor, train: Tensor, rollout: Tensor, count: int) -> Tensor:
    """Selects the `count` tokens with the largest |d|, float64 [count, 4]: row, index in response, both logprobs.

    rows, index: int64 [tokens]; train, rollout: float32 [tokens]. Rows of NO_ROW fill up what is missing.
    """
    tokens = torch.full((count, 4), float(NO_ROW), dtype=torch.float64, device=rows.device)
    worst = absolute_difference_bits(train, rollout).topk(min(count, len(rows))).indices
    tokens[: len(worst)] = torch.stack([values[worst].double() for values in (rows, index, train, rollout)], 1)
    return tokens


def merge_worst(candidates: Tensor, count: int) -> tuple[TokenMismatch, ...]:
    """Selects the `count` worst of several ranks' worst tokens, [any, 4] from `worst_tokens`."""
    candidates = candidates[candidates[:, 0] != NO_ROW].cpu()
    train, rollout = candidates[:, 2].float(), candidates[:, 3].float()
    order = absolute_difference_bits(train, rollout).argsort(descending=True, stable=True)
    return tuple(
        TokenMismatch(int(row), int(index), *logprobs) for row, index, *logprobs in candidates[order[:count]].tolist()
    )


def mismatch_of(sums: Tensor, p99: float, largest: float, worst: tuple[TokenMismatch, ...]) -> Mismatch:
    """Computes the mismatch from the sums over all ranks, made by `mismatch_sums`."""
    tokens, absolute, k1, k3, reverse_k3, ratio, squares, sequence_squares, sequences, logprob = sums.tolist()
    count = max(tokens, 1.0)
    return Mismatch(
        tokens=round(tokens),
        mean=absolute / count,
        p99=p99,
        max=largest,
        k1=k1 / count,
        k3=k3 / count,
        reverse_k3=reverse_k3 / count,
        ratio_mean=ratio / count if tokens else 1.0,
        effective_share=ratio**2 / (tokens * squares) if tokens else 1.0,
        chi2_token=squares / count - 1 if tokens else 0.0,
        chi2_sequence=sequence_squares / sequences - 1 if tokens else 0.0,
        train_perplexity=_exp(-logprob / count),
        rollout_perplexity=_exp(-(logprob + k1) / count),
        worst=worst,
    )


def _exp(value: float) -> float:
    """Returns e^value; infinity where math.exp would raise."""
    return torch.tensor(value, dtype=torch.float64).exp().item()

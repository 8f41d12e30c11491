"""Selects tokens out of a minibatch whose tokens lie on several ranks: exactly, and without gathering them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megagrpo.algorithm.policy_losses import ClipCovConfig, CovarianceLoss
from megagrpo.splitmix64 import GAMMA, mixed, shifted

DIGIT_BITS = 11
FLOAT32_BITS = 32
DRAW_BITS = 53
"""Bits of a draw: as many as a float64 holds."""


def choose_by_covariance(
    old_logprobs: Tensor,
    advantages: Tensor,
    kept: Tensor,
    draws: Tensor,
    settings: CovarianceLoss,
    sum_over_ranks: Callable[[Tensor], None],
) -> Tensor:
    """Selects this rank's tokens of a minibatch that Clip-Cov or KL-Cov treats apart (arXiv:2505.22617, section 4):
    bool [tokens].

    A token's covariance is (logprob - mean logprob) x (advantage - mean advantage), means over the minibatch's kept
    tokens on all ranks. clip_cov chooses at random among those in [covariance_low, covariance_high], kl_cov the
    largest: covariance_share of the kept tokens, at least one. Logprobs are the old ones, so that the choice is
    made once, before any gradient: with those of the moment it would need all microbatches' forward passes first, or
    depend on how they are cut.

    old_logprobs, advantages: float [tokens]; kept: bool [tokens]; draws: float64 [tokens] in [0, 1), each token's own
    whatever the layout; sum_over_ranks sums a tensor in place.
    """
    logprobs, advantages = old_logprobs.double(), advantages.double()
    sums = torch.stack([torch.ones_like(logprobs), logprobs, advantages])[:, kept].sum(1)
    sum_over_ranks(sums)
    tokens = round(sums[0].item())
    logprob_mean, advantage_mean = (sums[1:] / max(tokens, 1)).tolist()
    covariance = ((logprobs - logprob_mean) * (advantages - advantage_mean)).float()
    candidates = kept
    if isinstance(settings, ClipCovConfig):
        candidates = kept & (covariance >= settings.covariance_low) & (covariance <= settings.covariance_high)
        covariance = torch.zeros_like(covariance)  # among these, draws alone decide
    count = candidates.sum()
    sum_over_ranks(count)
    wanted = min(max(int(settings.covariance_share * tokens), 1), int(count))
    chosen = torch.zeros_like(kept)
    if wanted:
        chosen[candidates] = _first(covariance[candidates], draws[candidates], wanted, sum_over_ranks)
    return chosen


def _first(values: Tensor, draws: Tensor, wanted: int, sum_over_ranks: Callable[[Tensor], None]) -> Tensor:
    """Selects the `wanted` largest of all ranks' values, of equal ones those with the smallest draws; bool [values]."""
    # int64 in [0, 2**32) that fall where the float32 values rise.
    bits = (values + 0.0).view(torch.int32).long()  # -0.0 + 0.0 is 0.0: both zeros are one value
    descending = (1 << (FLOAT32_BITS - 1)) - 1 - torch.where(bits < 0, -1 - (bits & 0x7FFFFFFF), bits)
    last, ties = kth_smallest(descending, wanted, FLOAT32_BITS, sum_over_ranks)
    tied = descending == last
    draw_bits = (draws * 2.0**DRAW_BITS).long()
    last_draw, _ = kth_smallest(draw_bits[tied], ties, DRAW_BITS, sum_over_ranks)
    return (descending < last) | (tied & (draw_bits <= last_draw))


def token_draws(seed: int, rows: Tensor, places: Tensor) -> Tensor:
    """Draws uniform numbers in [0, 1), float64 [tokens], by seed, row of the sample and place of the token in it.

    rows, places: int64 [tokens]; rows are those of the step. SplitMix64 of each number in turn, modulo 2**64.
    """
    state = mixed(torch.full_like(rows, seed) + GAMMA)
    for number in (rows, places):
        state = mixed(state + number + GAMMA)
    return shifted(state, 64 - DRAW_BITS).double() * 2.0**-DRAW_BITS


def kth_smallest(bits: Tensor, wanted: int, width: int, sum_over_ranks: Callable[[Tensor], None]) -> tuple[int, int]:
    """Returns the `wanted`-th smallest of all ranks' bits, and the number of its equals among the first `wanted`.

    bits: int32 or int64 [any number], at least 0 and below 2**width; wanted: from 1 to the number on all ranks;
    sum_over_ranks sums an int64 tensor in place. A radix selection: a histogram of 16 KiB is summed for each 11 bits.
    """
    smallest = 0
    for shift in range(-(-width // DIGIT_BITS) * DIGIT_BITS - DIGIT_BITS, -1, -DIGIT_BITS):
        digit = (bits >> shift) & ((1 << DIGIT_BITS) - 1)
        counts = torch.bincount(digit, minlength=1 << DIGIT_BITS)
        sum_over_ranks(counts)
        up_to = counts.cumsum(0)
        chosen = int((up_to < wanted).sum())
        wanted -= int(up_to[chosen] - counts[chosen])
        bits = bits[digit == chosen]
        smallest = smallest << DIGIT_BITS | chosen
    return smallest, wanted

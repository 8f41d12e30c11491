"""Which tokens Clip-Cov and KL-Cov treat apart: those that make the entropy fall. arXiv:2505.22617, section 4."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megagrpo.algorithm.draws import DRAW_BITS
from megagrpo.algorithm.selection import kth_smallest
from megagrpo.recipe import schema

FLOAT32_BITS = 32


def choose_by_covariance(
    old_logprobs: Tensor,
    advantages: Tensor,
    kept: Tensor,
    draws: Tensor,
    settings: schema.PolicyLossConfig,
    sum_over_ranks: Callable[[Tensor], None],
) -> Tensor:
    """The chosen ones among this rank's tokens of a minibatch, bool [tokens].

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
    if settings.name == "clip_cov":
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
    """The `wanted` largest of all ranks' values, of equal ones those with the smallest draws; bool [values]."""
    descending = _descending_bits(values)
    last, ties = kth_smallest(descending, wanted, FLOAT32_BITS, sum_over_ranks)
    tied = descending == last
    draw_bits = (draws * 2.0**DRAW_BITS).long()
    last_draw, _ = kth_smallest(draw_bits[tied], ties, DRAW_BITS, sum_over_ranks)
    return (descending < last) | (tied & (draw_bits <= last_draw))


def _descending_bits(values: Tensor) -> Tensor:
    """int64 [values] in [0, 2**32) that fall where the float32 values rise."""
    bits = (values + 0.0).view(torch.int32).long()  # -0.0 + 0.0 is 0.0: both zeros are one value
    ascending = torch.where(bits < 0, -1 - (bits & 0x7FFFFFFF), bits)
    return (1 << (FLOAT32_BITS - 1)) - 1 - ascending

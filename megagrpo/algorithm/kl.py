"""Per-token estimates of KL(policy || reference) from the two logprobs. http://joschu.net/blog/kl-approx.html"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from megagrpo.algorithm.policy_loss import LOG_RATIO_LIMIT

Estimator = Literal["k1", "k2", "k3", "abs"]


def kl_estimate(
    logprobs: Tensor, reference_logprobs: Tensor, estimator: Estimator, straight_through: bool = False
) -> Tensor:
    """Estimate at the sampled tokens, [tokens], with d = reference - policy logprob, r = exp(d):

    k1: -d, unbiased and of high variance (as a loss term its expected gradient is 0: use it in the reward);
    k2: d^2 / 2, biased, low variance;
    k3: r - 1 - d, unbiased, low variance, never negative; d is clamped before exp;
    abs: |d|.

    straight_through: this value with the gradient of k2.
    """
    if straight_through:
        value = kl_estimate(logprobs, reference_logprobs, estimator).detach()
        k2 = kl_estimate(logprobs, reference_logprobs, "k2")
        return value + (k2 - k2.detach())
    difference = reference_logprobs - logprobs
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k3":
        difference = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        return torch.expm1(difference) - difference
    return difference.abs()

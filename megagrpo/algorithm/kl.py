"""Per-token estimates of KL(policy || reference) from the two logprobs. http://joschu.net/blog/kl-approx.html"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from megagrpo.algorithm.log_ratio import bounded

Estimator = Literal["k1", "k2", "k3", "abs"]

K3_LIMIT = 10.0
"""One token that both policies see quite differently must not drown the others."""


def kl_estimate(
    logprobs: Tensor, reference_logprobs: Tensor, estimator: Estimator, straight_through: bool = False
) -> Tensor:
    """Estimate at the sampled tokens, [tokens], with d = reference - policy logprob, r = exp(d):

    k1: -d, unbiased and of high variance (as a loss term its expected gradient is 0: use it in the reward);
    k2: d^2 / 2, biased, low variance; its expected gradient is that of the divergence;
    k3: r - 1 - d, unbiased, low variance, never negative; d is clamped before exp and the value at K3_LIMIT;
    abs: |d|.
    straight_through: this value, with the gradient of k2 (arXiv:2510.01555).
    """
    value = _value(reference_logprobs - logprobs, estimator)
    if not straight_through:
        return value
    k2 = _value(reference_logprobs - logprobs, "k2")
    return value.detach() + (k2 - k2.detach())


def _value(difference: Tensor, estimator: Estimator) -> Tensor:
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k3":
        difference = bounded(difference)
        return (torch.expm1(difference) - difference).clamp(max=K3_LIMIT)
    return difference.abs()

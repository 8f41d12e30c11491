"""The KL penalty against a reference policy: its estimate by token, and its weight from step to step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from megagrpo.errors import Problem
from megagrpo.section import Fraction, NonNegativeFloat, PositiveFloat, PositiveInt, Section

if TYPE_CHECKING:
    from torch import Tensor

Estimator = Literal["k1", "k2", "k3", "abs"]

K3_LIMIT = 10.0
"""One token that both policies see quite differently must not drown the others."""
K3_FAR = (-10.99999, 2.61086)
"""Log ratios outside of which k3 is K3_LIMIT, with the gradient that it has there."""

CHANGE_MAX = 0.2


class KLConfig(Section):
    """Penalty for leaving the reference policy."""

    coefficient: NonNegativeFloat = 0.0
    """Weight of the penalty; 0 switches the reference policy off altogether."""

    estimator: Estimator = "k3"
    """Per-token estimate from the two logprobs (http://joschu.net/blog/kl-approx.html); k3 is the low-variance one."""

    straight_through: bool = False
    """In the loss: the estimator's value with the gradient of k2, which is that of the true divergence."""

    placement: Literal["loss", "reward"] = "loss"
    """loss: a term of the loss. reward: subtracted from each sample's score before the advantages, token by token where
    the advantages are."""

    target: PositiveFloat | None = None
    """Adapt the coefficient, step by step, towards this divergence in nats per token (arXiv:1909.08593, section 2.2).
    null: fixed."""

    horizon: PositiveInt = 10000
    """Samples after which an adaptive coefficient may have changed by a fifth."""

    def next_coefficient(self, coefficient: float, kl: float, samples: int) -> float:
        """Returns the next coefficient: coefficient x (1 + clip(kl / target - 1, -0.2, 0.2) x samples / horizon).

        arXiv:1909.08593, section 2.2. kl: nats per token; samples: the step's. A step of more samples than the horizon
        counts as one of as many, so that the coefficient never changes its sign. It is fixed without a target, and
        where the divergence is NaN.
        """
        if self.target is None or math.isnan(kl):
            return coefficient
        error = min(max(kl / self.target - 1, -CHANGE_MAX), CHANGE_MAX)
        return coefficient * (1 + error * min(samples / self.horizon, 1.0))

    def rules(self) -> Iterator[Problem]:
        if self.target is not None and self.coefficient == 0:
            needed = "a coefficient above 0 to start from: it adapts by factors"
            yield Problem("target", f"{self.target}, with coefficient 0", needed, "coefficient: 0.001")
        if self.target is None and self.given("horizon"):
            given = f"{self.horizon}, without a target"
            yield Problem("horizon", given, "nothing: the coefficient is fixed", "remove it, or give a target")
        if self.straight_through and self.placement == "reward":
            fix = "remove it, or write placement: loss"
            yield Problem("straight_through", "true, with placement: reward", "false: a reward has no gradient", fix)
        if self.coefficient > 0 and self.placement == "loss" and self.estimator == "k1" and not self.straight_through:
            given = "k1 in the loss"
            needed = "another: the gradient of k1 is the score function, whose expectation is 0 whatever the divergence"
            yield Problem("estimator", given, needed, "estimator: k3, straight_through: true, or placement: reward")


class ReferenceConfig(Section):
    """The policy that the KL penalty is against: the starting weights, unless it follows the policy."""

    update_every_steps: PositiveInt | None = None
    """Steps after which the reference moves towards the policy. null: never."""

    share: Fraction = 1.0
    """Fraction of the way to the policy per update: 1 copies it, less averages (Polyak)."""

    def rules(self) -> Iterator[Problem]:
        if self.update_every_steps is None and self.given("share"):
            given = f"{self.share}, without update_every_steps"
            needed = "nothing: the reference never moves"
            yield Problem("share", given, needed, "remove it, or write update_every_steps: 1")


def kl_estimate(
    logprobs: Tensor, reference_logprobs: Tensor, estimator: Estimator, straight_through: bool = False
) -> Tensor:
    """Estimates KL(policy || reference) at sampled tokens, [tokens], with d = reference - policy logprob, r = exp(d):

    k1: -d, unbiased and of high variance (as a loss term its expected gradient is 0: use it in the reward);
    k2: d^2 / 2, biased, low variance; its expected gradient is that of the divergence;
    k3: r - 1 - d, unbiased, low variance, never negative; at most K3_LIMIT, from where on its gradient stays the same;
    abs: |d|.
    straight_through: this value, with the gradient of k2 (arXiv:2510.01555).
    """
    difference = reference_logprobs - logprobs
    if estimator == "k3":
        low, high = K3_FAR
        near = difference.clamp(low, high)
        far = near.detach().expm1() * (difference.detach() != near.detach())  # the slope at the limit; 0 before it
        value = divergence(near, "k3").clamp(max=K3_LIMIT).where(far == 0, K3_LIMIT) + far * (
            logprobs.detach() - logprobs
        )
    else:
        value = divergence(difference, estimator)
    if not straight_through:
        return value
    k2 = divergence(difference, "k2")
    return value.detach() + (k2 - k2.detach())


def divergence(log_ratio: Tensor, estimator: Estimator) -> Tensor:
    """Returns the estimate by token, [tokens], for log ratios d: k1 is -d, k2 d^2 / 2, k3 exp(d) - 1 - d, abs |d|."""
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    return log_ratio.expm1() - log_ratio if estimator == "k3" else log_ratio.abs()

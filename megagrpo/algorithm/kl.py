"""The KL penalty against a reference policy: its estimate by token, and its weight from step to step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Literal

from megagrpo.section import Fraction, NonNegativeFloat, PositiveFloat, PositiveInt, Rules, Section

if TYPE_CHECKING:
    from torch import Tensor

Estimator = Literal["k1", "k2", "k3", "abs"]

LIMIT = 20.0
"""exp(20) is 5e8: beyond this a ratio says only that something is broken, and must not become inf or NaN."""

K3_LIMIT = 10.0
"""One token that both policies see quite differently must not drown the others."""
K3_FAR = (-10.99999, 2.61086)
"""Log ratios outside of which k3 is K3_LIMIT, with the gradient that it has there."""

CHANGE_MAX = 0.2

REST_MIN = 1e-8
"""Smallest probability of all other tokens in `binary_kl`: float32 logprobs near 0 say no more about it."""


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

    RULES: ClassVar[Rules[KLConfig]] = {
        "target_without_coefficient": lambda kl: kl.target is not None and kl.coefficient == 0,
        "horizon_without_target": lambda kl: kl.target is None and kl.given("horizon"),
        "straight_through_reward": lambda kl: kl.straight_through and kl.placement == "reward",
        "k1_in_the_loss": lambda kl: (
            kl.coefficient > 0 and kl.placement == "loss" and kl.estimator == "k1" and not kl.straight_through
        ),
    }


class ReferenceConfig(Section):
    """The policy that the KL penalty is against: the starting weights, unless it follows the policy."""

    update_every_steps: PositiveInt | None = None
    """Training steps, each of all its optimizer steps, after which the reference moves towards the policy. null:
    never."""

    share: Fraction = 1.0
    """Fraction of the way to the policy per update: 1 copies it, less averages (Polyak)."""

    RULES: ClassVar[Rules[ReferenceConfig]] = {
        "share_of_a_fixed_reference": lambda ref: ref.update_every_steps is None and ref.given("share")
    }


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


def binary_kl(logprobs: Tensor, others: Tensor) -> Tensor:
    """Returns KL(p || q) between two events, a token and any other token, float64 [tokens]: p log(p / q) + (1 - p)
    log((1 - p) / (1 - q)). At most the divergence over the whole vocabulary. logprobs: log p, others: log q, [tokens].
    """
    logprobs, others = logprobs.double(), others.double()
    rest, other_rest = (-logprobs.expm1()).clamp(min=REST_MIN), (-others.expm1()).clamp(min=REST_MIN)
    return logprobs.exp() * bounded(logprobs - others) + rest * (rest / other_rest).log()


def bounded(log_ratio: Tensor) -> Tensor:
    """Clamps a log ratio to LIMIT on both sides before exp; outside of it there is no gradient."""
    return log_ratio.clamp(-LIMIT, LIMIT)

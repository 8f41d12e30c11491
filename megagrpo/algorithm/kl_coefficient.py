"""The weight of the KL penalty from step to step."""

from __future__ import annotations

CHANGE_MAX = 0.2


def next_coefficient(coefficient: float, kl: float, target: float | None, horizon: int, samples: int) -> float:
    """The coefficient of the next step: coefficient x (1 + clip(kl / target - 1, -0.2, 0.2) x samples / horizon).

    arXiv:1909.08593, section 2.2. kl, target: nats per token; horizon, samples: the step's, in samples. A step of more
    samples than the horizon counts as one of as many, so that the coefficient never changes its sign. Without a target
    it is fixed.
    """
    if target is None:
        return coefficient
    error = min(max(kl / target - 1, -CHANGE_MAX), CHANGE_MAX)
    return coefficient * (1 + error * min(samples / horizon, 1.0))

"""PPO's critic: its settings, its loss per token, and how well its values explain the returns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from megagrpo.section import NonNegativeInt, PositiveFloat, Section

if TYPE_CHECKING:
    from torch import Tensor

EQUAL = 1e-10
"""Variance over mean square below which returns count as equal."""


class CriticConfig(Section):
    """The value model of PPO: the same architecture with a value head, on the same ranks."""

    path: str | None = None
    """Model directory to start from; the default is model.path. Its value head is new unless the files have one."""

    lr: Annotated[float, Field(gt=0, le=10)] = 1e-5
    """Peak learning rate. Everything else is as in train.optimizer, min_lr in proportion."""

    value_clip: PositiveFloat | None = 0.5
    """New values are compared as if they moved from the old by at most this. null: not clipped."""

    warmup_steps: NonNegativeInt = 0
    """First steps of the run in which only the critic learns. The policy's learning rate schedule begins after them."""


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    """Computes max((v - R)^2, (clip(v, old - clip, old + clip) - R)^2) / 2, [tokens]; (v - R)^2 / 2 if `clip` is None.

    Also returns bool [tokens]: the clipped value is the worse one, so that this token has no gradient.

    PPO's (arXiv:1707.06347, eq. 9) with the clipping of its reference implementation (arXiv:2005.12729, section 3):
    a value that has moved by more than `clip` towards its return since the rollout is not moved any further.
    """
    squared = (values - returns).square()
    if clip is None:
        return 0.5 * squared, values.new_zeros(values.shape).bool()
    near = values.maximum(old_values - clip).minimum(old_values + clip)
    squared_near = (near - returns).square()
    # A maximum splits the gradient of equals; inside of the range both are the same and have the whole of it.
    clipped = squared_near > squared
    return 0.5 * squared_near.where(clipped, squared), clipped.detach()


def explained_variance(tokens: float, returns: tuple[float, float], residuals: tuple[float, float]) -> float:
    """Returns 1 - Var(R - v) / Var(R) from (sum, sum of squares) of the returns R and of R - v over `tokens` tokens.

    1: values are the returns; 0: no better than a constant. 0 where all returns are equal, or differ by no more than
    sums in float64 can tell: there is nothing to explain.
    """
    if not tokens:
        return 0.0

    def variance(sums: tuple[float, float]) -> float:
        return max(sums[1] / tokens - (sums[0] / tokens) ** 2, 0.0)

    total = variance(returns)
    return 1.0 - variance(residuals) / total if total > EQUAL * returns[1] / tokens else 0.0

"""The clipped objective, per token. PPO, arXiv:1707.06347, eq. 7; separate bounds: DAPO, arXiv:2503.14476, eq. 10."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""exp(20) is 5e8: beyond this a ratio says only that something is broken, and must not become inf or NaN."""


@dataclass(frozen=True)
class PolicyLoss:
    """Everything is [tokens]. Only `loss` carries a gradient."""

    loss: Tensor
    ratio: Tensor
    clipped_low: Tensor  # bool: the lower bound cut this token's gradient (advantage < 0, ratio < 1 - clip_low)
    clipped_high: Tensor  # bool: the upper bound cut it (advantage > 0, ratio > 1 + clip_high)


def clipped_policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> PolicyLoss:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) where r = exp(logprob - old logprob). All [tokens]."""
    ratio = torch.exp((logprobs - old_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    ratio = ratio.detach()
    return PolicyLoss(
        loss=loss,
        ratio=ratio,
        clipped_low=(advantages < 0) & (ratio < 1 - clip_low),
        clipped_high=(advantages > 0) & (ratio > 1 + clip_high),
    )

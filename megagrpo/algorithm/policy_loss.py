"""The clipped objective, per token. PPO, arXiv:1707.06347, eq. 7; separate bounds: DAPO, arXiv:2503.14476, eq. 10."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megagrpo.algorithm.sequences import Sequences
from megagrpo.recipe import schema

LOG_RATIO_LIMIT = 20.0
"""exp(20) is 5e8: beyond this a ratio says only that something is broken, and must not become inf or NaN."""


@dataclass(frozen=True)
class PolicyInputs:
    """Response tokens of one microbatch, each [tokens]."""

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    sequences: Sequences
    chosen: Tensor | None = None  # bool, tokens that covariance.py chose


@dataclass(frozen=True)
class PolicyLoss:
    """Everything is [tokens]. Only `loss` carries a gradient."""

    loss: Tensor
    ratio: Tensor
    clipped_low: Tensor  # bool: the lower bound cut this token's gradient (advantage < 0, ratio < 1 - clip_low)
    clipped_high: Tensor  # bool: the upper bound cut it (advantage > 0, ratio > 1 + clip_high)


def policy_loss(inputs: PolicyInputs, settings: schema.PolicyLoss) -> PolicyLoss:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) where r = exp(logprob - old logprob). All [tokens]."""
    advantages = inputs.advantages
    ratio = torch.exp((inputs.logprobs - inputs.old_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    low, high = 1 - settings.clip_low, 1 + settings.clip_high
    loss = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    ratio = ratio.detach()
    return PolicyLoss(
        loss=loss,
        ratio=ratio,
        clipped_low=(advantages < 0) & (ratio < low),
        clipped_high=(advantages > 0) & (ratio > high),
    )

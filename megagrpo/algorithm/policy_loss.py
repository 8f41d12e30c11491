"""The policy's loss, per token: PPO's clipped objective and its relatives, each a pure function.

Below, r = exp(logprob - old logprob) is a token's ratio, A its advantage, sg(x) is x without a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megagrpo.algorithm.log_ratio import bounded
from megagrpo.algorithm.sequences import Sequences
from megagrpo.recipe import schema


@dataclass(frozen=True)
class PolicyInputs:
    """Response tokens of one microbatch, each [tokens]."""

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    sequences: Sequences
    chosen: Tensor | None = None  # bool, from covariance.py, for clip_cov and kl_cov


@dataclass(frozen=True)
class PolicyLoss:
    """Everything is [tokens]. Only `loss` carries a gradient."""

    loss: Tensor
    ratio: Tensor  # of the token, whatever ratio the loss is made of
    clipped_low: Tensor  # bool: the lower bound cut this token's gradient, or for cispo changed its weight
    clipped_high: Tensor  # bool: the upper bound or the dual clip did


def policy_loss(inputs: PolicyInputs, settings: schema.PolicyLossConfig) -> PolicyLoss:
    """The loss that the recipe names. Raises ValueError if it needs chosen tokens and has none."""
    return LOSSES[settings.name](inputs, settings)


def ppo_clip(inputs: PolicyInputs, settings: schema.PolicyLossConfig) -> PolicyLoss:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A); with dual_clip, where A < 0, at most dual_clip |A|.

    PPO, arXiv:1707.06347, eq. 7; bounds apart: DAPO, arXiv:2503.14476, eq. 10; dual clip: arXiv:1912.09729.
    """
    return _clipped(_log_ratio(inputs).exp(), inputs, settings, settings.dual_clip)


def gspo(inputs: PolicyInputs, settings: schema.PolicyLossConfig) -> PolicyLoss:
    """-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A) with s = exp(mean of log r over the response).

    GSPO, arXiv:2507.18071, eq. 5 to 7, as its token variant, eq. 13 and 14: s is sg(s) r / sg(r) at each token. Under
    weights that are equal within a response this has the value and the gradient of the loss by response, and the
    recipe's aggregation and any token's own advantage or weight still mean something. The mean is over all tokens of
    the response, also those that a correction leaves out of the loss.
    """
    mean = inputs.sequences.mean(inputs.logprobs - inputs.old_logprobs)
    own = bounded(inputs.sequences.of_tokens(mean)).to(inputs.logprobs.dtype)
    return _clipped((own + _gradient_of(inputs.logprobs)).exp(), inputs, settings, None)


def cispo(inputs: PolicyInputs, settings: schema.PolicyLossConfig) -> PolicyLoss:
    """-sg(clip(r, 1 - clip_low, 1 + clip_high)) A logprob: clipped tokens keep a gradient.

    CISPO, arXiv:2506.13585, eq. 4 and 5. (Its authors use no lower bound: clip_low 1.)
    """
    ratio = _log_ratio(inputs).exp().detach()
    low, high = 1 - settings.clip_low, 1 + settings.clip_high
    loss = -ratio.clamp(low, high) * inputs.advantages * inputs.logprobs
    return PolicyLoss(loss, ratio, clipped_low=ratio < low, clipped_high=ratio > high)


def gmpo(inputs: PolicyInputs, settings: schema.PolicyLossConfig) -> PolicyLoss:
    """-g A with g the geometric mean over the response of min(r, e^clip_high) if A > 0, else max(r, e^-clip_low).

    GMPO, arXiv:2507.20673: bounds are on log r, token by token. As in gspo each token carries its own part of
    the gradient, so that a token without a weight gets none.
    """
    log_ratio = _log_ratio(inputs).detach()
    clipped_low = (inputs.advantages < 0) & (log_ratio < -settings.clip_low)
    clipped_high = (inputs.advantages > 0) & (log_ratio > settings.clip_high)
    clipped = log_ratio.masked_fill(clipped_low, -settings.clip_low).masked_fill(clipped_high, settings.clip_high)
    mean = inputs.sequences.of_tokens(inputs.sequences.mean(clipped)).to(log_ratio.dtype)
    own = _gradient_of(inputs.logprobs).masked_fill(clipped_low | clipped_high, 0.0)
    return PolicyLoss(-(mean + own).exp() * inputs.advantages, log_ratio.exp(), clipped_low, clipped_high)


def sapo(inputs: PolicyInputs, settings: schema.PolicyLossConfig) -> PolicyLoss:
    """-4 / t sigmoid(t (r - 1)) A with t = temperature_positive if A > 0, else temperature_negative.

    SAPO, arXiv:2511.20347: the gradient fades as r leaves 1, and is that of r A at 1.
    """
    ratio = _log_ratio(inputs).exp()
    positive, negative = (ratio.new_tensor(t) for t in (settings.temperature_positive, settings.temperature_negative))
    temperature = torch.where(inputs.advantages > 0, positive, negative)
    gate = 4 / temperature * torch.sigmoid(temperature * (ratio - 1))
    return _unclipped(-gate * inputs.advantages, ratio)


def clip_cov(inputs: PolicyInputs, settings: schema.PolicyLossConfig) -> PolicyLoss:
    """ppo_clip without the chosen tokens, which still count in the denominators.

    Clip-Cov, arXiv:2505.22617, section 4: tokens of high covariance are what makes the entropy fall.
    """
    clipped = ppo_clip(inputs, settings)
    return PolicyLoss(
        clipped.loss.masked_fill(_chosen(inputs), 0.0), clipped.ratio, clipped.clipped_low, clipped.clipped_high
    )


def kl_cov(inputs: PolicyInputs, settings: schema.PolicyLossConfig) -> PolicyLoss:
    """-r A, and on the chosen tokens + covariance_kl |log r|. Nothing is clipped.

    KL-Cov, arXiv:2505.22617, section 4. The penalty has no gradient before the policy has moved: it needs more than
    one optimizer step for each batch.
    """
    log_ratio = _log_ratio(inputs)
    ratio = log_ratio.exp()
    penalty = (settings.covariance_kl * log_ratio.abs()).masked_fill(~_chosen(inputs), 0.0)
    return _unclipped(penalty - ratio * inputs.advantages, ratio)


def reinforce(inputs: PolicyInputs, settings: schema.PolicyLossConfig) -> PolicyLoss:
    """-A logprob. REINFORCE (Williams, 1992); GPG, arXiv:2504.02546."""
    return _unclipped(-inputs.advantages * inputs.logprobs, _log_ratio(inputs).exp())


LOSSES: dict[str, Callable[[PolicyInputs, schema.PolicyLossConfig], PolicyLoss]] = {
    "ppo_clip": ppo_clip,
    "gspo": gspo,
    "cispo": cispo,
    "gmpo": gmpo,
    "sapo": sapo,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "reinforce": reinforce,
}


def _log_ratio(inputs: PolicyInputs) -> Tensor:
    return bounded(inputs.logprobs - inputs.old_logprobs)


def _gradient_of(logprobs: Tensor) -> Tensor:
    """0, with the gradient of `logprobs`."""
    return logprobs - logprobs.detach()


def _clipped(
    ratio: Tensor, inputs: PolicyInputs, settings: schema.PolicyLossConfig, dual_clip: float | None
) -> PolicyLoss:
    """PPO's clipped objective for a ratio of the token or of its response."""
    low, high, advantages = 1 - settings.clip_low, 1 + settings.clip_high, inputs.advantages
    loss = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    clipped_high = (advantages > 0) & (ratio.detach() > high)
    if dual_clip is not None:
        beyond = (advantages < 0) & (ratio.detach() > dual_clip)
        loss = torch.where(beyond, -dual_clip * advantages, loss)
        clipped_high |= beyond
    return PolicyLoss(
        loss=loss,
        ratio=_log_ratio(inputs).exp().detach(),
        clipped_low=(advantages < 0) & (ratio.detach() < low),
        clipped_high=clipped_high,
    )


def _unclipped(loss: Tensor, ratio: Tensor) -> PolicyLoss:
    nothing = torch.zeros_like(ratio, dtype=torch.bool)
    return PolicyLoss(loss, ratio.detach(), clipped_low=nothing, clipped_high=nothing)


def _chosen(inputs: PolicyInputs) -> Tensor:
    if inputs.chosen is None:
        raise ValueError("a loss by covariance without chosen tokens")
    return inputs.chosen

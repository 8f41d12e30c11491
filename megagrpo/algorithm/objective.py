"""The whole objective: policy loss, KL penalty and entropy bonus, summed with global weights."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megagrpo.algorithm.kl import KLConfig, kl_estimate
from megagrpo.algorithm.policy_losses import PolicyInputs, PolicyLoss, PolicyLossMethod


@dataclass(frozen=True, kw_only=True)
class ObjectiveInputs(PolicyInputs):
    """The inputs of the policy loss and of the other terms, each [tokens]. `weights` come from aggregation.py."""

    weights: Tensor
    entropy: Tensor | None  # None: no entropy bonus, not reported
    reference_logprobs: Tensor | None  # None: no KL term, no estimate
    importance: Tensor | None = None  # of the policy's loss, from correction.py; None: 1


@dataclass(frozen=True)
class Objective:
    """The value of the objective. `loss`, a scalar, is minimised; the rest, [tokens], only explains it."""

    loss: Tensor
    policy: PolicyLoss
    policy_term: Tensor  # what the policy loss adds to `loss`
    kl: Tensor | None


def grpo_objective(
    inputs: ObjectiveInputs,
    method: PolicyLossMethod,
    kl_settings: KLConfig,
    *,
    kl_coefficient: float,
    entropy_coefficient: float,
) -> Objective:
    """Sums weight x (importance x policy loss + kl_coefficient x KL - entropy_coefficient x entropy) over tokens.

    kl_coefficient: this step's, of the loss term; 0 when the penalty is in the reward.
    GRPO, arXiv:2402.03300, eq. 3, negated. KL is estimated whenever reference logprobs are there, so that it can be
    reported. Raises ValueError if kl_coefficient needs them and they are not, or an entropy bonus has no entropies.
    """
    if kl_coefficient and inputs.reference_logprobs is None:
        raise ValueError("a KL term without reference logprobs")
    used = inputs.weights != 0
    # NaN in a token that a correction left out, times a weight of 0, would still be NaN: in the loss and its gradient.
    old = inputs.old_logprobs
    inputs = replace(inputs, old_logprobs=torch.where(used | old.isfinite(), old, inputs.logprobs.detach()))
    policy = method.of_tokens(inputs)
    per_token = policy.loss if inputs.importance is None else inputs.importance * policy.loss
    policy_term = torch.where(used, inputs.weights * per_token.detach(), 0.0)
    kl = None
    if inputs.reference_logprobs is not None:
        straight_through = kl_settings.straight_through
        kl = kl_estimate(inputs.logprobs, inputs.reference_logprobs, kl_settings.estimator, straight_through)
        if kl_coefficient:
            per_token = per_token + kl_coefficient * kl
    if entropy_coefficient:
        if inputs.entropy is None:
            raise ValueError("an entropy bonus without entropies")
        per_token = per_token - entropy_coefficient * inputs.entropy
    loss = torch.where(used, inputs.weights * per_token, 0.0).sum()
    return Objective(loss, policy, policy_term, None if kl is None else kl.detach())

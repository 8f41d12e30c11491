"""What an update says of itself: sums on every rank, reduced once, then means."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megagrpo.algorithm.objective import Objective, ObjectiveInputs


@dataclass(frozen=True)
class StepMetrics:
    """Over all ranks, minibatches and epochs of one update. Means are over response tokens unless said otherwise."""

    loss: float  # what was minimised, mean over optimizer steps
    policy_loss: float  # its clipped policy term
    kl: float | None  # estimate against the reference; None without a reference
    entropy: float
    clip_low_fraction: float  # tokens whose gradient the lower bound cut
    clip_high_fraction: float  # tokens whose gradient the upper bound cut
    ratio_mean: float  # probability ratio of the policy to the one before the update
    logprob_mean: float
    rollout_difference_mean: float  # |logprob before the update - rollout engine's logprob|
    rollout_difference_max: float
    grad_norm: float  # before clipping, mean over optimizer steps
    grad_norm_max: float
    tokens: int  # response tokens in the batch
    optimizer_steps: int


class MetricSums:
    """Sums over this rank's tokens, kept on its device so that no microbatch waits for them."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(10, dtype=torch.float64, device=device)
        self._largest_difference = torch.zeros((), dtype=torch.float32, device=device)
        self._has_kl = False

    def add(self, objective: Objective, inputs: ObjectiveInputs, rollout_logprobs: Tensor) -> None:
        """Adds one microbatch of response tokens, each [tokens]."""
        policy = objective.policy
        difference = (inputs.old_logprobs - rollout_logprobs).abs()
        self._has_kl |= objective.kl is not None
        per_token = torch.stack(
            [
                inputs.weights * policy.loss.detach(),
                objective.kl if objective.kl is not None else torch.zeros_like(difference),
                inputs.entropy.detach(),
                policy.clipped_low.float(),
                policy.clipped_high.float(),
                policy.ratio,
                inputs.logprobs.detach(),
                difference,
                torch.ones_like(difference),
            ]
        )
        self._sums[0] += objective.loss.detach()
        self._sums[1:] += per_token.sum(1, dtype=torch.float64)
        if len(difference):
            self._largest_difference = torch.maximum(self._largest_difference, difference.max())

    def reduce(self, group: dist.ProcessGroup, grad_norms: list[float], epochs: int) -> StepMetrics:
        """Means over `group`, the ranks that hold the other tokens. Two all-reduces."""
        if group.size() > 1:
            dist.all_reduce(self._sums, group=group)
            dist.all_reduce(self._largest_difference, op=dist.ReduceOp.MAX, group=group)
        loss, policy_loss, kl, entropy, low, high, ratio, logprob, difference, tokens = self._sums.tolist()
        count, steps = max(tokens, 1.0), max(len(grad_norms), 1)
        return StepMetrics(
            loss=loss / steps,
            policy_loss=policy_loss / steps,
            kl=kl / count if self._has_kl else None,
            entropy=entropy / count,
            clip_low_fraction=low / count,
            clip_high_fraction=high / count,
            ratio_mean=ratio / count,
            logprob_mean=logprob / count,
            rollout_difference_mean=difference / count,
            rollout_difference_max=self._largest_difference.item(),
            grad_norm=sum(grad_norms) / steps,
            grad_norm_max=max(grad_norms, default=0.0),
            tokens=round(tokens) // epochs,
            optimizer_steps=len(grad_norms),
        )

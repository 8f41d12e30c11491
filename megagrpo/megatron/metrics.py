"""Metrics of a policy update: sums on every rank, reduced once, then means."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megagrpo.algorithm.correction import correction_of
from megagrpo.algorithm.mismatch import (
    Mismatch,
    absolute_difference_bits,
    float_of_bits,
    merge_worst,
    mismatch_of,
    mismatch_sums,
    percentile_bits,
    worst_tokens,
)
from megagrpo.algorithm.objective import Objective, ObjectiveInputs
from megagrpo.megatron.batch import ResponseTokens, joined
from megagrpo.rank_results import StepMetrics


class MetricSums:
    """Sums over this rank's tokens, kept on its device so that no microbatch waits for them."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(9, dtype=torch.float64, device=device)
        self._correction: torch.Tensor | None = None
        self._has_kl = False

    def add(self, objective: Objective, inputs: ObjectiveInputs) -> None:
        """Adds one microbatch of response tokens, each [tokens]."""
        policy = objective.policy
        self._has_kl |= objective.kl is not None
        per_token = torch.stack(
            [
                objective.policy_term,
                objective.kl if objective.kl is not None else torch.zeros_like(policy.ratio),
                inputs.entropy.detach(),
                policy.clipped_low.float(),
                policy.clipped_high.float(),
                policy.ratio,
                inputs.logprobs.detach(),
                torch.ones_like(policy.ratio),
            ]
        )
        self._sums[0] += objective.loss.detach()
        self._sums[1:] += per_token.sum(1, dtype=torch.float64)

    def add_correction(self, sums: torch.Tensor | None) -> None:
        """Adds a minibatch's `Corrected.sums`, if there is a correction."""
        if sums is not None:
            self._correction = sums if self._correction is None else self._correction + sums

    def reduce(self, group: dist.ProcessGroup, grad_norms: list[float], epochs: int, mismatch: Mismatch) -> StepMetrics:
        """Means over `group`, the ranks that hold the other tokens."""
        if group.size() > 1:
            for sums in (self._sums, self._correction):
                if sums is not None:
                    dist.all_reduce(sums, group=group)
        loss, policy_loss, kl, entropy, low, high, ratio, logprob, tokens = self._sums.tolist()
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
            mismatch=mismatch,
            correction=None if self._correction is None else correction_of(self._correction),
            grad_norm=sum(grad_norms) / steps,
            grad_norm_max=max(grad_norms, default=0.0),
            tokens=round(tokens) // epochs,
            optimizer_steps=len(grad_norms),
        )


def reduce_mismatch(
    responses: Sequence[ResponseTokens], group: dist.ProcessGroup, worst: int, device: torch.device
) -> Mismatch:
    """Collective over `group`, the ranks that hold the other tokens: each token is on exactly one of them.

    `responses` are this rank's, after an update. About 33 KB go around, whatever the number of tokens, and 32 bytes for
    each of the `worst` tokens of each rank.
    """
    empty = torch.empty(0, dtype=torch.float32, device=device)
    train = torch.cat([empty, *(r.before_update for r in responses if r.before_update is not None)])
    rollout = torch.cat([empty, *(r.rollout_logprobs for r in responses)])
    rows = torch.cat([empty.long(), *(r.rows for r in responses)])
    positions = torch.cat([empty.long(), *(r.places for r in responses)])

    def reduce(tensor: Tensor, operation: dist.ReduceOp = dist.ReduceOp.SUM) -> None:
        if group.size() > 1:
            dist.all_reduce(tensor, op=operation, group=group)

    sums = mismatch_sums(train, rollout, joined(responses, device))
    reduce(sums)
    bits = absolute_difference_bits(train, rollout)
    largest = torch.cat([bits, bits.new_zeros(1)]).max()
    reduce(largest, dist.ReduceOp.MAX)
    p99 = percentile_bits(bits, round(sums[0].item()), reduce)
    found = worst_tokens(rows, positions, train, rollout, worst)
    if group.size() > 1:
        of_ranks = [torch.empty_like(found) for _ in range(group.size())]
        dist.all_gather(of_ranks, found, group=group)
        found = torch.cat(of_ranks)
    return mismatch_of(sums, float_of_bits(p99), float_of_bits(int(largest)), merge_worst(found, worst))

"""Metrics of an update, of the policy or of the critic: sums on every rank, reduced once, then means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megagrpo.algorithm.correction import correction_of
from megagrpo.algorithm.critic import explained_variance
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
from megagrpo.algorithm.policy_losses import Objective, ObjectiveInputs
from megagrpo.megatron.batch import Batch, TokenTensors, sampled_tokens, sum_over_ranks, whole_rows
from megagrpo.rank_results import CriticMetrics, StepMetrics


class MetricSums:
    """Sums over this rank's tokens, kept on its device so that no microbatch waits for them."""

    def __init__(self, device: torch.device, *, entropy: bool) -> None:
        self._loss = torch.zeros((), dtype=torch.float64, device=device)
        self._tokens = torch.zeros(7, dtype=torch.float64, device=device)
        self._correction: Tensor | None = None
        self._has_kl, self._has_entropy = False, entropy

    def add(self, objective: Objective, inputs: ObjectiveInputs) -> None:
        """Adds one microbatch."""
        policy = objective.policy
        self._has_kl |= objective.kl is not None
        none = torch.zeros_like(policy.ratio)
        per_token = torch.stack(
            [
                objective.policy_term,
                objective.kl if objective.kl is not None else none,
                inputs.entropy.detach() if inputs.entropy is not None else none,
                policy.clipped_low.float(),
                policy.clipped_high.float(),
                policy.ratio,
                torch.ones_like(policy.ratio),
            ]
        )
        if inputs.given is not None:
            per_token = per_token.masked_fill(inputs.given, 0.0)
        self._loss += objective.loss.detach()
        self._tokens += per_token.sum(1, dtype=torch.float64)

    def add_correction(self, sums: Tensor | None) -> None:
        """Adds a minibatch's `Corrected.sums`, if there is a correction."""
        if sums is not None:
            self._correction = sums if self._correction is None else self._correction + sums

    def reduce(self, grad_norms: Sequence[float], mismatch: Mismatch) -> StepMetrics:
        """Computes means over all ranks' tokens. Collective over the ranks that hold them."""
        sums = torch.cat([self._loss[None], self._tokens])
        sum_over_ranks(sums)
        if self._correction is not None:
            sum_over_ranks(self._correction)
        loss, policy_loss, kl, entropy, low, high, ratio, tokens = sums.tolist()
        count, steps = max(tokens, 1.0), max(len(grad_norms), 1)
        grad_norm, skipped = steps_taken(grad_norms)
        return StepMetrics(
            loss=loss / steps,
            policy_loss=policy_loss / steps,
            kl=kl / count if self._has_kl and tokens else None,
            entropy=entropy / count if self._has_entropy and tokens else None,
            clip_low_fraction=low / count,
            clip_high_fraction=high / count,
            ratio_mean=ratio / count if tokens else None,
            mismatch=mismatch,
            correction=None if self._correction is None else correction_of(self._correction),
            grad_norm=grad_norm,
            skipped_steps=skipped,
        )


class CriticSums:
    """Sums over this rank's tokens, kept on its device so that no microbatch waits for them."""

    def __init__(self, device: torch.device) -> None:
        self._trained = torch.zeros(3, dtype=torch.float64, device=device)

    def add(self, loss: Tensor, clipped: Tensor) -> None:
        """Adds one microbatch that was trained on. loss, clipped: [tokens]."""
        per_token = torch.stack([loss.detach(), clipped.float(), torch.ones_like(loss)])
        self._trained += per_token.sum(1, dtype=torch.float64)

    def reduce(self, values: TokenTensors, returns: TokenTensors, grad_norms: Sequence[float]) -> CriticMetrics:
        """Computes means over all ranks' tokens. Collective over the ranks that hold them.

        values: the critic's before its update; returns: what it learns to predict; both for the whole batch.
        """
        seen = torch.zeros(6, dtype=torch.float64, device=self._trained.device)
        for before, target in zip(values, returns, strict=True):
            v, r = before.double(), target.double()
            seen += torch.stack([torch.ones_like(v), v, r, r.square(), r - v, (r - v).square()]).sum(1)
        sums = torch.cat([self._trained, seen])
        sum_over_ranks(sums)
        loss, clipped, trained, tokens, value, total, squares, residual, residual_squares = sums.tolist()
        grad_norm, skipped = steps_taken(grad_norms)
        return CriticMetrics(
            loss=loss / max(trained, 1.0),
            clip_fraction=clipped / max(trained, 1.0),
            value_mean=value / max(tokens, 1.0),
            return_mean=total / max(tokens, 1.0),
            explained_variance=explained_variance(tokens, (total, squares), (residual, residual_squares)),
            grad_norm=grad_norm,
            skipped_steps=skipped,
        )


def steps_taken(grad_norms: Sequence[float]) -> tuple[float, int]:
    """Returns the mean norm of the optimizer steps taken (NaN if all were skipped), and the number of skipped steps."""
    taken = [norm for norm in grad_norms if math.isfinite(norm)]
    skipped = len(grad_norms) - len(taken)
    return (math.nan if skipped and not taken else sum(taken) / max(len(taken), 1)), skipped


def reduce_mismatch(batch: Batch, train_logprobs: Sequence[Tensor], worst: int, device: torch.device) -> Mismatch:
    """Compares the trainer's logprobs of all ranks' sampled tokens with the engines'. Collective over these ranks.

    train_logprobs: float32 [tokens] for each microbatch. About 33 KB are reduced, whatever the number of tokens, 8
    bytes for each rollout with several branches, and 32 bytes gathered for each of the `worst` tokens of each rank.
    """
    responses = batch.responses
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    empty = torch.empty(0, dtype=torch.float32, device=device)
    train = torch.cat([empty, *train_logprobs])
    rollout = torch.cat([empty, *(r.rollout_logprobs for r in responses)])
    rows = torch.cat([empty.long(), *(r.rows for r in responses)])
    index = torch.cat([empty.long(), *(r.index for r in responses)])
    sampled, sequences = sampled_tokens(responses), whole_rows(responses, batch.split, device)
    train, rollout, rows, index = (values[sampled] for values in (train, rollout, rows, index))
    sums = mismatch_sums(train, rollout, replace(sequences, index=sequences.index[sampled]))
    sum_over_ranks(sums)
    bits = absolute_difference_bits(train, rollout)
    largest = torch.cat([bits, bits.new_zeros(1)]).max()
    candidates = worst_tokens(rows, index, train, rollout, worst)
    if group.size() > 1:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        of_ranks = [torch.empty_like(candidates) for _ in range(group.size())]
        dist.all_gather(of_ranks, candidates, group=group)
        candidates = torch.cat(of_ranks)
    p99 = percentile_bits(bits, round(sums[0].item()), sum_over_ranks)
    return mismatch_of(sums, float_of_bits(p99), float_of_bits(int(largest)), merge_worst(candidates, worst))

"""The train-versus-rollout mismatch of a loaded batch, over all ranks that hold a part of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

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
from megagrpo.megatron.response import ResponseTokens, joined


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

"""Log-probabilities and entropies from logits whose vocabulary is split over tensor ranks.

Megatron's own cross-entropies are not used: one overwrites its logits, the fused one rounds gradients to bfloat16, and
neither knows temperature, entropy or padded columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_ELEMENTS = 2**24
"""Logits per chunk that are held in float32 at a time: 64 MiB, and a few temporaries of that size."""


@dataclass(frozen=True)
class VocabularyShard:
    """The columns of the whole vocabulary that one tensor rank's logits hold. Columns from `vocab` on are padding."""

    vocab: int
    first: int
    group: dist.ProcessGroup | None  # the tensor ranks; None if there is one

    def real_columns(self, columns: int) -> int:
        return max(0, min(columns, self.vocab - self.first))


def vocabulary_logprobs(
    logits: Tensor,
    positions: Tensor,
    labels: Tensor,
    shard: VocabularyShard,
    *,
    temperature: float,
    entropy: bool,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[Tensor, Tensor]:
    """log softmax(logits / temperature) at `labels`, and the entropy of that softmax, at `positions` only.

    logits: [tokens, columns of this rank], float32 or bfloat16, left as they are; positions: int64 [n], rows of logits;
    labels: int64 [n], in the whole vocabulary. Returns two float32 [n], the second zeros unless `entropy`; equal on all
    tensor ranks.
    Gradients flow through both. Only one chunk of rows exists in float32 at a time, in the backward pass too, which
    computes the softmax again; per chunk there are two all-reduces forward and none backward.
    """
    rows = max(1, chunk_elements // logits.shape[1])
    logprobs, entropies = _VocabularyLogprobs.apply(logits, positions, labels, shard, 1.0 / temperature, entropy, rows)
    return logprobs, entropies


class _VocabularyLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        positions: Tensor,
        labels: Tensor,
        shard: VocabularyShard,
        scale: float,
        entropy: bool,
        rows: int,
    ) -> tuple[Tensor, Tensor]:
        columns = shard.real_columns(logits.shape[1])
        local = labels - shard.first
        here = (local >= 0) & (local < columns)
        local = local.clamp(0, max(columns - 1, 0))
        count = len(positions)
        logprobs, entropies, normalizers = (logits.new_zeros(count, dtype=torch.float32) for _ in range(3))
        for chunk in _slices(count, rows):
            scaled = _scaled_rows(logits, positions[chunk], columns, scale)
            top = scaled.amax(-1) if columns else scaled.new_full((len(scaled),), -torch.inf)
            _all_reduce(top, dist.ReduceOp.MAX, shard)
            scaled -= top[:, None]
            sums = scaled.new_zeros(3, len(scaled))
            if columns:
                sums[1] = scaled.gather(1, local[chunk, None])[:, 0].where(here[chunk], 0.0)
                weights = scaled.exp()
                sums[0] = weights.sum(-1)
                if entropy:
                    sums[2] = torch.linalg.vecdot(weights, scaled)
            _all_reduce(sums, dist.ReduceOp.SUM, shard)
            log_sum = sums[0].log()
            logprobs[chunk] = sums[1] - log_sum
            normalizers[chunk] = top + log_sum
            if entropy:
                entropies[chunk] = log_sum - sums[2] / sums[0]
        ctx.save_for_backward(logits, positions, local, here, normalizers, entropies)
        ctx.constants = columns, scale, entropy, rows
        if not entropy:
            ctx.mark_non_differentiable(entropies)
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, logprob_grad: Tensor | None, entropy_grad: Tensor | None) -> tuple[Any, ...]:
        logits, positions, local, here, normalizers, entropies = ctx.saved_tensors
        columns, scale, entropy, rows = ctx.constants
        gradient = torch.zeros_like(logits)
        # d logprob / d x_j = [j is the label] - p_j;  d entropy / d x_j = -p_j (log p_j + entropy)
        for chunk in _slices(len(positions), rows) if columns else ():
            log_p = _scaled_rows(logits, positions[chunk], columns, scale)
            log_p -= normalizers[chunk, None]
            if entropy and entropy_grad is not None:
                factor = (log_p + entropies[chunk, None]) * entropy_grad[chunk, None]
                if logprob_grad is not None:
                    factor += logprob_grad[chunk, None]
                part = log_p.exp_().mul_(factor).neg_()
            elif logprob_grad is not None:
                part = log_p.exp_().mul_(-logprob_grad[chunk, None])
            else:
                continue
            if logprob_grad is not None:
                part.scatter_add_(1, local[chunk, None], (logprob_grad[chunk] * here[chunk])[:, None])
            gradient[positions[chunk], :columns] = part.mul_(scale).to(logits.dtype)
        return gradient, None, None, None, None, None, None


def _slices(count: int, rows: int) -> list[slice]:
    return [slice(first, first + rows) for first in range(0, count, rows)]


def _scaled_rows(logits: Tensor, positions: Tensor, columns: int, scale: float) -> Tensor:
    """A float32 copy [n, columns] of the real columns of some rows, divided by the temperature."""
    rows = logits[positions, :columns].to(torch.float32)
    return rows if scale == 1.0 else rows.mul_(scale)


def _all_reduce(tensor: Tensor, operation: Any, shard: VocabularyShard) -> None:
    if shard.group is not None and shard.group.size() > 1:
        dist.all_reduce(tensor, op=operation, group=shard.group)

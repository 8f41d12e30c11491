"""A microbatch as tensors: sequences laid end to end, without padding between them, aligned to the predicting position.

With context > 1 each sequence is padded to a multiple of 2 x context and cut into that many chunks; rank r holds chunks
r and 2 * context - 1 - r of every sequence ("zigzag": under causal attention all ranks then have the same work). With
tensor > 1 the total is padded by a masked dummy sequence, so that sequence parallelism can divide it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megagrpo.batching.rank_batches import Microbatch
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.megatron.buckets import AttentionPlan, plan_attention

NO_ROW = -1


@dataclass(kw_only=True)
class PackedSequences(PackedSeqParams):
    """Megatron's description of packed sequences, with what PackedAttention needs and computes once per microbatch."""

    positions: torch.Tensor  # int64 [tokens], within each sequence
    padded: np.ndarray  # int64 [sequences], their padded lengths over all context ranks
    context: int
    context_rank: int
    rotary: tuple[torch.Tensor, torch.Tensor] | None = None  # cosine and sine, set by the first layer

    @cached_property
    def plan(self) -> AttentionPlan:
        """Made by the first layer that asks: transformer-engine's attention never does, and masks take memory."""
        local = self.padded // self.context
        sequence = np.repeat(np.arange(len(local)), local)
        positions = [_positions(self.padded, sequence, self.context, rank) for rank in range(self.context)]
        return plan_attention(local, positions, self.context_rank, self.positions.device)


@dataclass(frozen=True)
class PackedTensors:
    """One microbatch on one context rank. `tokens` below is the number of tokens on this rank, padding included.

    Position t predicts token t + 1 of its sequence: `labels`, `mask` and `rollout_logprobs` are those of the predicted
    token.
    """

    tokens: torch.Tensor  # int64 [1, tokens], 0 in padding
    labels: torch.Tensor  # int64 [tokens], 0 where there is no next token
    mask: torch.Tensor  # bool [tokens], the next token is trained on
    rollout_logprobs: torch.Tensor  # float32 [tokens], 0 where mask is False
    rows: torch.Tensor  # int64 [tokens], row of the sequence in the step, NO_ROW in padding
    positions: torch.Tensor  # int64 [tokens], index in the sequence of the predicting token
    sequences: PackedSequences


def pack(
    microbatch: Microbatch, *, layout: ParallelLayout, context_rank: int, device: torch.device | str
) -> PackedTensors:
    """The tensors of `microbatch` for one context rank. A microbatch without sequences becomes padding only."""
    context = layout.context
    lengths = np.array([len(s.tokens) for s in microbatch.sequences], dtype=np.int64)
    lengths, padded = _with_padding(lengths, layout)
    sequence = np.repeat(np.arange(len(lengths)), padded // context)
    position = _positions(padded, sequence, context, context_rank)

    # Everything is looked up in the concatenated sequences, and what does not exist in the sentinel at their end.
    flat_tokens = np.concatenate([*(s.tokens for s in microbatch.sequences), [0]])
    flat_mask = np.concatenate([*(s.loss_mask for s in microbatch.sequences), [False]])
    flat_logprobs = np.concatenate([*(s.rollout_logprobs for s in microbatch.sequences), [0.0]])
    rows = np.array([*microbatch.rows, NO_ROW], dtype=np.int64)
    nothing = len(flat_tokens) - 1
    start = np.cumsum(lengths) - lengths
    real = position < lengths[sequence]
    this = np.where(real, start[sequence] + position, nothing)
    following = np.where(position + 1 < lengths[sequence], start[sequence] + position + 1, nothing)
    mask = flat_mask[following].astype(bool)

    def tensor(array: np.ndarray, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device=device, dtype=dtype)

    positions = tensor(position)
    offsets = tensor(np.concatenate([[0], np.cumsum(padded)]), torch.int32)
    longest = int(padded.max())
    return PackedTensors(
        tokens=tensor(flat_tokens[this])[None],
        labels=tensor(flat_tokens[following]),
        mask=tensor(mask, torch.bool),
        rollout_logprobs=tensor(np.where(mask, flat_logprobs[following], 0.0), torch.float32),
        rows=tensor(np.where(real, rows[np.minimum(sequence, len(rows) - 1)], NO_ROW)),
        positions=positions,
        sequences=PackedSequences(
            qkv_format="thd",
            cu_seqlens_q=offsets,
            cu_seqlens_kv=offsets,
            cu_seqlens_q_padded=offsets,
            cu_seqlens_kv_padded=offsets,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            positions=positions,
            padded=padded,
            context=context,
            context_rank=context_rank,
        ),
    )


def _with_padding(lengths: np.ndarray, layout: ParallelLayout) -> tuple[np.ndarray, np.ndarray]:
    """Real and padded lengths of all sequences; a last one of real length 0 is the dummy."""
    multiple = 2 * layout.context if layout.context > 1 else 1
    padded = -(-lengths // multiple) * multiple
    tokens_per_rank = int(padded.sum()) // layout.context
    dummy = -tokens_per_rank % layout.tensor if tokens_per_rank else layout.tensor
    if layout.context > 1 and dummy % 2:
        dummy += layout.tensor
    if dummy:
        lengths, padded = np.append(lengths, 0), np.append(padded, dummy * layout.context)
    return lengths, padded


def _positions(padded: np.ndarray, sequence: np.ndarray, context: int, context_rank: int) -> np.ndarray:
    """Position within its sequence of every token on `context_rank`."""
    local = padded // context
    index = np.arange(len(sequence)) - (np.cumsum(local) - local)[sequence]
    if context == 1:
        return index
    chunk = (local // 2)[sequence]
    return np.where(index < chunk, context_rank * chunk + index, (2 * context - 2 - context_rank) * chunk + index)

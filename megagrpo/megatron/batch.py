"""A rank's batch on its device: packed microbatches with their response tokens, and what passes found for these tokens.

A microbatch's sequences lie end to end without padding between them. With context > 1 each sequence is padded to a
multiple of 2 x context and cut into that many chunks; rank r holds chunks r and 2 * context - 1 - r of every sequence
("zigzag": under causal attention all ranks then have the same work). A masked dummy sequence pads the total to what
padded_tokens says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megagrpo.algorithm.sequences import Sequences
from megagrpo.batching.rank_batches import (
    Microbatch,
    RankBatch,
    SplitRow,
    joined_microbatches,
    padded_lengths,
    padded_tokens,
)
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.megatron.attention import PackedSequences, positions_on

NO_ROW = -1
OFFSETS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
LONGEST_MULTIPLE = 1024
"""Megatron keeps rotary tables for every length that it is told."""

TokenTensors = tuple[Tensor, ...]
"""For each microbatch, one number per response token on this rank: [response tokens]. Empty on ranks without logits."""


# --- microbatches as tensors ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PackedTensors:
    """One microbatch on one context rank. `tokens` below is the number of tokens on this rank, padding included.

    Position t predicts token t + 1 of its sequence: `labels`, `mask` and `rollout_logprobs` describe the predicted
    token.
    """

    tokens: Tensor  # int64 [1, tokens], 0 in padding
    labels: Tensor  # int64 [tokens], 0 where there is no next token
    mask: Tensor  # bool [tokens], the next token is trained on
    rollout_logprobs: Tensor  # float32 [tokens], 0 where mask is False
    rows: Tensor  # int64 [tokens], row of the sequence in the step, NO_ROW in padding
    positions: Tensor  # int64 [tokens], index in the sequence of the predicting token
    own: Tensor  # int64 [tokens], index of the sequence in the microbatch, 0 in padding
    index: Tensor  # int64 [tokens], index of the next token in its row's response, 0 where mask is False
    sequences: PackedSequences


@dataclass(frozen=True)
class ResponseTokens:
    """The response tokens of one microbatch on the last pipeline stage. Every tensor is [tokens].

    A context rank has a part of each sequence.
    """

    positions: Tensor  # int64, rows of the last stage's output
    labels: Tensor  # int64
    rows: Tensor  # int64, row of the sample in the step
    index: Tensor  # int64, index of the token in its row's response: tokens that are not trained on don't count
    numbers: Tensor  # int64, the token's place in its sequence: of a row in one sequence, it is drawn by this
    sequences: Sequences  # the microbatch's, each by itself
    rollout_logprobs: Tensor  # float32


def pack(
    microbatch: Microbatch,
    *,
    layout: ParallelLayout,
    context_rank: int,
    device: torch.device | str,
    tokens: int | None = None,
) -> PackedTensors:
    """Returns the tensors of `microbatch` for one context rank. A microbatch without sequences becomes padding only.

    `tokens`: its size on this rank with padding, if it is not the only one (padded_tokens).
    """
    context = layout.context
    lengths = np.array([len(s.tokens) for s in microbatch.sequences], dtype=np.int64)
    (size,) = [tokens] if tokens else padded_tokens([microbatch], layout, torch.device(device).type)
    lengths, padded = _with_padding(lengths, context, size)
    sequence = np.repeat(np.arange(len(lengths)), padded // context)
    position = positions_on(padded, sequence, context, context_rank)

    # Every token is looked up in the concatenated sequences; what does not exist, in the sentinel at their end.
    flat_tokens = np.concatenate([*(s.tokens for s in microbatch.sequences), [0]])
    flat_mask = np.concatenate([*(s.loss_mask for s in microbatch.sequences), [False]])
    flat_logprobs = np.concatenate([*(s.rollout_logprobs for s in microbatch.sequences), [0.0]])
    flat_index = np.concatenate([*(s.first - 1 + np.cumsum(s.loss_mask) for s in microbatch.sequences), [0]])
    rows = np.array([*microbatch.rows, NO_ROW], dtype=np.int64)
    nothing = len(flat_tokens) - 1
    start = np.cumsum(lengths) - lengths
    real = position < lengths[sequence]
    this = np.where(real, start[sequence] + position, nothing)
    following = np.where(position + 1 < lengths[sequence], start[sequence] + position + 1, nothing)
    mask = flat_mask[following].astype(bool)

    def tensor(array: np.ndarray, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device=device, dtype=dtype)

    positions = tensor(position)
    offsets = tensor(np.concatenate([[0], np.cumsum(padded)]), torch.int32)
    longest = -(-int(padded.max()) // LONGEST_MULTIPLE) * LONGEST_MULTIPLE
    if longest == padded.sum():  # Megatron takes a table of as many rows as tokens for one of all sequences end to end
        longest += LONGEST_MULTIPLE
    return PackedTensors(
        tokens=tensor(flat_tokens[this])[None],
        labels=tensor(flat_tokens[following]),
        mask=tensor(mask, torch.bool),
        rollout_logprobs=tensor(np.where(mask, flat_logprobs[following], 0.0), torch.float32),
        rows=tensor(np.where(real, rows[np.minimum(sequence, len(rows) - 1)], NO_ROW)),
        positions=positions,
        own=tensor(np.where(real, sequence, 0)),
        index=tensor(np.where(mask, flat_index[following], 0)),
        sequences=PackedSequences(
            qkv_format="thd",
            **dict.fromkeys(OFFSETS, offsets),
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            positions=positions,
            padded=padded,
            context=context,
            context_rank=context_rank,
        ),
    )


def _with_padding(lengths: np.ndarray, context: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns real and padded lengths of all sequences; the dummy is the last, with real length 0."""
    padded = padded_lengths(lengths, context)
    if dummy := tokens * context - int(padded.sum()):
        lengths, padded = np.append(lengths, 0), np.append(padded, dummy)
    return lengths, padded


def response_tokens(packed: PackedTensors, microbatch: Microbatch) -> ResponseTokens:
    """Selects the response tokens of `packed`."""
    positions = packed.mask.nonzero()[:, 0]
    own, device = packed.own[positions], positions.device
    counts = torch.tensor([float(s.loss_mask.sum()) for s in microbatch.sequences], device=device)
    return ResponseTokens(
        positions=positions,
        labels=packed.labels[positions],
        rows=packed.rows[positions],
        index=packed.index[positions],
        numbers=packed.positions[positions] + 1,
        sequences=Sequences(own, counts, over_context_ranks),
        rollout_logprobs=packed.rollout_logprobs[positions],
    )


# --- the batch --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Minibatch:
    """One rank's part of a minibatch. `responses` has an entry for each microbatch on ranks that compute logits."""

    first: int  # index of its first microbatch in the batch
    packed: list[PackedTensors]
    responses: list[ResponseTokens]
    tokens: int  # response tokens over all ranks
    rows: int  # rows with response tokens over all ranks
    split: tuple[SplitRow, ...]  # those of them with several sequences

    def own(self, values: TokenTensors) -> TokenTensors:
        """Returns the `values` of this minibatch's microbatches, out of those of the whole batch."""
        return values[self.first : self.first + len(self.responses)]


@dataclass(frozen=True)
class JoinedMicrobatch:
    """Several of training's microbatches as one, for a pass without gradients."""

    packed: PackedTensors
    responses: list[ResponseTokens]  # one; none on ranks without logits
    parts: range  # the batch's microbatches in it, whose response tokens lie end to end


@dataclass(frozen=True)
class Batch:
    """A step's work on this rank."""

    minibatches: tuple[Minibatch, ...] = ()
    joined: tuple[JoinedMicrobatch, ...] = ()

    @property
    def responses(self) -> list[ResponseTokens]:
        return [response for minibatch in self.minibatches for response in minibatch.responses]

    @property
    def split(self) -> list[SplitRow]:
        return [row for minibatch in self.minibatches for row in minibatch.split]


@dataclass(frozen=True)
class Passes:
    """The results of the passes over the batch, float32. None: the pass was not made."""

    before_update: TokenTensors | None = None  # the trainer's logprobs before the update
    entropies: TokenTensors | None = None  # of the policy, as the update first saw each microbatch
    old_logprobs: TokenTensors | None = None  # what ratios are to: the same, or the engines' logprobs
    reference_logprobs: TokenTensors | None = None
    values: TokenTensors | None = None  # the critic's estimates before its update


def as_tensors(
    batch: RankBatch,
    layout: ParallelLayout,
    context_rank: int,
    device: torch.device,
    *,
    has_logits: bool,
    at_once: int,
) -> Batch:
    """Puts a data rank's batch on `device` as tensors. Passes without gradients join up to `at_once` microbatches."""

    def tensors(micros: Sequence[Microbatch]) -> Iterator[tuple[PackedTensors, list[ResponseTokens]]]:
        for micro, size in zip(micros, padded_tokens(micros, layout, device.type), strict=True):
            packed = pack(micro, layout=layout, context_rank=context_rank, device=device, tokens=size)
            yield packed, [response_tokens(packed, micro)] if has_logits else []

    minibatches: list[Minibatch] = []
    pairs: list[tuple[PackedTensors, list[ResponseTokens]]] = []
    for micros, tokens, rows, split in zip(batch.minibatches, batch.tokens, batch.rows, batch.split, strict=True):
        own = list(tensors(micros))
        responses = [response for _, found in own for response in found]
        minibatches.append(Minibatch(len(pairs), [packed for packed, _ in own], responses, tokens, rows, split))
        pairs += own
    if at_once == 1:
        joined = [JoinedMicrobatch(*pair, range(i, i + 1)) for i, pair in enumerate(pairs)]
    else:
        all_micros = list(chain(*batch.minibatches))
        parts = joined_microbatches(len(all_micros), at_once, layout)
        larger = [Microbatch(tuple(s for i in part for s in all_micros[i].sequences)) for part in parts]
        joined = [JoinedMicrobatch(*pair, part) for pair, part in zip(tensors(larger), parts, strict=True)]
    return Batch(tuple(minibatches), tuple(joined))


def of_tokens(batch: Batch, values: Tensor, offsets: Tensor | None) -> TokenTensors:
    """Selects the driver's `values`, [rows] of the step or one per response token, for the batch's response tokens.

    offsets: None, or int64 [rows + 1]: values[offsets[r] : offsets[r + 1]] are those of row r's response tokens.
    """
    if offsets is None:
        return tuple(values[response.rows] for response in batch.responses)
    return tuple(values[offsets[response.rows] + response.index] for response in batch.responses)


# --- sums over ranks --------------------------------------------------------------------------------------------------


def sum_over_ranks(sums: Tensor) -> None:
    """Sums in place over the ranks that hold the other tokens: data and context ranks."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if group.size() > 1:
        dist.all_reduce(sums, group=group)


def over_context_ranks(sums: Tensor) -> Tensor:
    """Sums over the ranks that hold the other parts of the same sequences."""
    if parallel_state.get_context_parallel_world_size() == 1:
        return sums
    total = sums.clone()
    dist.all_reduce(total, group=parallel_state.get_context_parallel_group())
    return total

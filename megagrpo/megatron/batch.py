"""The loaded batch: microbatches as packed tensors with their response tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megagrpo.algorithm.aggregation import token_weights
from megagrpo.algorithm.correction import correct
from megagrpo.algorithm.covariance import choose_by_covariance
from megagrpo.algorithm.draws import token_draws
from megagrpo.algorithm.sequences import Sequences
from megagrpo.batching.rank_batches import Microbatch, joined_microbatches
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.megatron.attention import PackedSequences, positions_on
from megagrpo.recipe.passes import BY_COVARIANCE, corrects
from megagrpo.recipe.schema import AlgorithmConfig

NO_ROW = -1


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
    position = positions_on(padded, sequence, context, context_rank)

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


@dataclass
class ResponseTokens:
    """The response tokens of one microbatch on the last pipeline stage. Every tensor is [tokens] unless said otherwise.

    Under context parallelism these are a part of each sequence. What is None at first is filled in by passes over the
    same microbatch and by the update, and never leaves the rank unless asked for.
    """

    positions: Tensor  # int64, rows of the last stage's output
    labels: Tensor  # int64
    rows: Tensor  # int64, row of the sample in the step
    places: Tensor  # int64, index of the token in its sequence, prompt included
    index: Tensor  # int64, index of the token in its response
    sequences: Sequences
    rollout_logprobs: Tensor  # float32
    old_logprobs: Tensor | None = None  # float32, what ratios are to
    reference_logprobs: Tensor | None = None  # float32
    values: Tensor | None = None  # float32, the critic's estimates before its update
    before_update: Tensor | None = None  # float32, the trainer's logprobs when it first saw the tokens in this step
    weights: Tensor | None = None  # float32, in the loss; 0 for tokens that a correction rejects
    importance: Tensor | None = None  # float32, of the policy's loss; None: 1
    chosen: Tensor | None = None  # bool, tokens that a loss by covariance chose


def response_tokens(packed: PackedTensors, microbatch: Microbatch) -> ResponseTokens:
    """Selects the response tokens of `packed`."""
    positions = packed.mask.nonzero()[:, 0]
    rows = packed.rows[positions]
    places = packed.positions[positions] + 1
    device = positions.device
    sequence_of_row = np.zeros(max(microbatch.rows, default=0) + 1, dtype=np.int64)
    sequence_of_row[list(microbatch.rows)] = np.arange(len(microbatch.rows))
    start = np.array([int(s.loss_mask.argmax()) for s in microbatch.sequences], dtype=np.int64)
    index = torch.from_numpy(sequence_of_row).to(device)[rows]
    counts = torch.tensor([float(s.loss_mask.sum()) for s in microbatch.sequences], device=device)
    return ResponseTokens(
        positions=positions,
        labels=packed.labels[positions],
        rows=rows,
        places=places,
        index=places - torch.from_numpy(start).to(device)[index],
        sequences=Sequences(index, counts, over_context_ranks),
        rollout_logprobs=packed.rollout_logprobs[positions],
    )


def joined(responses: Sequence[ResponseTokens], device: torch.device) -> Sequences:
    """The sequences of several microbatches as those of one, their tokens laid end to end."""
    index, count = [torch.empty(0, dtype=torch.int64, device=device)], 0
    for response in responses:
        index.append(response.sequences.index + count)
        count += len(response.sequences.tokens)
    tokens = torch.cat([torch.empty(0, device=device), *(response.sequences.tokens for response in responses)])
    return Sequences(torch.cat(index), tokens, over_context_ranks)


def share_out(values: Tensor, responses: Sequence[ResponseTokens], name: str) -> None:
    """Sets the field `name` of each microbatch to its part of `values` [tokens of all, laid end to end]."""
    parts = values.split([len(response.rows) for response in responses])
    for response, part in zip(responses, parts, strict=True):
        setattr(response, name, part)


def over_context_ranks(sums: Tensor) -> Tensor:
    """Sum over the ranks that hold the other parts of the same sequences."""
    if parallel_state.get_context_parallel_world_size() == 1:
        return sums
    total = sums.clone()
    dist.all_reduce(total, group=parallel_state.get_context_parallel_group())
    return total


@dataclass(frozen=True)
class Minibatch:
    """One rank's part of one. `responses` has one for each microbatch on ranks that compute logits, else none.

    tokens, sequences: response tokens, and sequences with any, over all ranks.
    """

    packed: list[PackedTensors]
    responses: list[ResponseTokens]
    tokens: int
    sequences: int


def prepare(
    minibatch: Minibatch,
    advantages: Callable[[ResponseTokens], Tensor],
    algorithm: AlgorithmConfig,
    divisor: float,
    seed: int,
    device: torch.device,
) -> Tensor | None:
    """Gives every response token its weight in the loss, its importance, and the mark of a loss by covariance.

    What depends on the whole minibatch is summed over the ranks that hold its other tokens, so that losses depend on
    neither layout nor packing. Returns the sums of the correction, `Corrected.sums`, if there is one. Old logprobs must
    be there if `prepares_by_old_logprobs`.
    """
    responses = minibatch.responses
    if not responses:
        return None
    sequences = joined(responses, device)
    old = _joined([response.old_logprobs for response in responses])
    kept = torch.ones(len(sequences.index), dtype=torch.bool, device=device)
    tokens, count, sums = float(minibatch.tokens), float(minibatch.sequences), None
    if corrects(algorithm) and old is not None:
        rollout = torch.cat([response.rollout_logprobs for response in responses])
        corrected = correct(old, rollout, sequences, algorithm.correction, _sum_over_ranks)
        kept, sums = corrected.kept, corrected.sums
        if corrected.importance is not None:
            share_out(corrected.importance, responses, "importance")
        # Each context rank has a part of every sequence; a token's share of its sequence's kept ones counts them once.
        of_sequence = sequences.of_tokens(sequences.sum(kept))
        counts = torch.stack([kept.double(), torch.where(kept, 1 / of_sequence, 0.0)]).sum(1)
        _sum_over_ranks(counts)
        tokens, count = counts.tolist()
    if algorithm.loss.name in BY_COVARIANCE and old is not None:
        draws = torch.cat([token_draws(seed, response.rows, response.places) for response in responses])
        per_token = torch.cat([advantages(response) for response in responses])
        chosen = choose_by_covariance(old, per_token, kept, draws, algorithm.loss, _sum_over_ranks)
        share_out(chosen, responses, "chosen")
    share_out(token_weights(kept, sequences, algorithm.aggregation, tokens, count, divisor), responses, "weights")
    return sums


def of_tokens(values: Tensor, offsets: Tensor | None, response: ResponseTokens) -> Tensor:
    """Each response token's of `values`: by row of the step, or, with offsets [rows + 1], by its response tokens."""
    if offsets is None:
        return values[response.rows]
    return values[offsets[response.rows] + response.index]


def _joined(parts: list[Tensor | None]) -> Tensor | None:
    there = [part for part in parts if part is not None]
    return torch.cat(there) if len(there) == len(parts) else None


def _sum_over_ranks(sums: Tensor) -> None:
    """In place, over the ranks that hold the minibatch's other tokens."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if group.size() > 1:
        dist.all_reduce(sums, group=group)


Result = Literal["old_logprobs", "reference_logprobs", "values"]


@dataclass(frozen=True)
class InferenceBatch:
    """`responses` and `parts` are empty on ranks that compute no logits."""

    packed: list[PackedTensors]
    responses: list[ResponseTokens]
    parts: list[list[ResponseTokens]]
    """Of training's microbatches: response tokens i are those of parts[i], laid end to end."""

    def share_out(self, name: Result) -> None:
        """Gives the parts what was found for `responses`."""
        for response, parts in zip(self.responses, self.parts, strict=True):
            share_out(getattr(response, name), parts, name)


def inference_batch(
    microbatches: Sequence[Microbatch],
    responses: Sequence[ResponseTokens],
    at_once: int,
    layout: ParallelLayout,
    context_rank: int,
    device: torch.device,
) -> InferenceBatch:
    """Joins up to `at_once` of training's microbatches. responses: theirs, or none."""
    groups = joined_microbatches(len(microbatches), at_once, layout)
    whole = [Microbatch(tuple(s for i in group for s in microbatches[i].sequences)) for group in groups]
    packed = [pack(each, layout=layout, context_rank=context_rank, device=device) for each in whole]
    if not responses:
        return InferenceBatch(packed, [], [])
    joined_responses = [response_tokens(tensors, each) for tensors, each in zip(packed, whole, strict=True)]
    return InferenceBatch(packed, joined_responses, [[responses[i] for i in group] for group in groups])

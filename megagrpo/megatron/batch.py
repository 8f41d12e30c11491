"""A rank's batch on its device: packed microbatches with their response tokens, what passes compute for these tokens,
and each token's weight in the loss.

A microbatch's sequences lie end to end without padding between them. With context > 1 each sequence is padded to a
multiple of 2 x context and cut into that many chunks; rank r holds chunks r and 2 * context - 1 - r of every sequence
("zigzag": under causal attention all ranks then have the same work). A masked dummy sequence pads the total to what
padded_tokens says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megagrpo.algorithm.aggregation import MinibatchTokens, token_weights
from megagrpo.algorithm.correction import correct
from megagrpo.algorithm.over_ranks import Sequences, token_draws
from megagrpo.algorithm.policy_losses import CovarianceLoss
from megagrpo.algorithm.ragged import Ragged
from megagrpo.batching.rank_batches import (
    Microbatch,
    RankBatch,
    SplitRow,
    joined_microbatches,
    padded_tokens,
)
from megagrpo.layout.parallel import ParallelLayout, padded_length
from megagrpo.megatron.attention import PackedSequences, positions_on
from megagrpo.megatron.kept_head import KeptTokens, kept_tokens
from megagrpo.megatron.replay import NO_ROUTE, RoutesOnRank, require_digests
from megagrpo.recipe.schema import Recipe

OFFSETS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
LONGEST_MULTIPLE = 1024
"""Megatron keeps rotary tables for every length that it is told."""

RowOrTokenValues = np.ndarray | Ragged
"""float [rows of the step], one for each sample; or one for each response token."""

TokenTensors = tuple[Tensor, ...]
"""For each microbatch, one number per response token on this rank: [response tokens]. Empty on ranks without logits."""


# --- microbatches as tensors ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ResponseTokens:
    """The response tokens of one microbatch on the last pipeline stage. Every tensor is [response tokens].

    A context rank has a part of each sequence. Position t predicts token t + 1, which is the response token.
    """

    positions: Tensor  # int64, rows of the last stage's output, which predict the tokens
    labels: Tensor  # int64
    rows: Tensor  # int64, row of the sample in the step
    index: Tensor  # int64, index of the token in its row's response: tokens that are not trained on don't count
    numbers: Tensor  # int64, the token's place in its sequence: of a row in one sequence, it is drawn by this
    sequences: Sequences  # the microbatch's, each by itself
    rollout_logprobs: Tensor  # float32
    kept: KeptTokens | None  # None: drawn from the whole vocabulary
    teachers: Tensor | None  # int64, the place of each token's teacher among the recipe's, or -1; None: none has one
    taught: TaughtTokens | None  # by teachers that were asked for their most likely ids
    given: Tensor | None  # bool, tokens of given responses; None: the policy sampled all


@dataclass(frozen=True)
class TaughtTokens:
    """The teachers' k most likely ids in the place of each response token; logprobs are NaN for tokens without."""

    ids: Tensor  # int64 [tokens, k]
    logprobs: Tensor  # float32 [tokens, k]


@dataclass(frozen=True)
class Packed:
    """One microbatch on one context rank."""

    tokens: Tensor  # int64 [1, tokens on this rank], 0 in padding
    sequences: PackedSequences
    responses: tuple[ResponseTokens, ...]  # one; none on ranks without logits
    digests: np.ndarray  # uint64 [sequences], this rank's parts in the digests of their routes; [0] without replay


def pack(
    microbatch: Microbatch,
    *,
    layout: ParallelLayout,
    context_rank: int,
    device: torch.device | str,
    tokens: int | None = None,
    has_logits: bool = True,
    routes: RoutesOnRank | None = None,
) -> Packed:
    """Returns the tensors of `microbatch` for one context rank. A microbatch without sequences becomes padding only.

    `tokens`: its size on this rank with padding, if it is not the only one (padded_tokens).
    """
    context = layout.context
    counted = np.array([len(s.tokens) for s in microbatch.sequences], dtype=np.int64)
    (size,) = [tokens] if tokens else padded_tokens([microbatch], layout, torch.device(device).type)
    lengths, padded = _with_padding(counted, context, size)
    sequence = np.repeat(np.arange(len(lengths)), padded // context)
    position = positions_on(padded, sequence, context, context_rank)

    # Every token is looked up in the concatenated sequences, padding in the 0 at their end.
    flat_tokens = np.concatenate([*(s.tokens for s in microbatch.sequences), [0]])
    end = len(flat_tokens) - 1
    at = np.where(position < lengths[sequence], (np.cumsum(lengths) - lengths)[sequence] + position, end)
    longest = -(-int(padded.max()) // LONGEST_MULTIPLE) * LONGEST_MULTIPLE
    if longest == padded.sum():  # Megatron takes a table of as many rows as tokens for one of all sequences end to end
        longest += LONGEST_MULTIPLE
    of_routes, digests = None, np.zeros(0, np.uint64)
    if routes is not None:
        given = routes.of(microbatch, at)
        digests = routes.digests(given, len(counted), sequence, position)
        of_routes = _tensor(given, device, torch.int16)
    packed = PackedSequences(
        qkv_format="thd",
        **dict.fromkeys(OFFSETS, _tensor(np.concatenate([[0], np.cumsum(padded)]), device, torch.int32)),
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        positions=_tensor(position, device),
        padded=padded,
        context=context,
        context_rank=context_rank,
        routes=of_routes,
    )
    responses: tuple[ResponseTokens, ...] = ()
    if has_logits:
        following = np.where(position + 1 < lengths[sequence], at + 1, end)
        responses = (_response_tokens(microbatch, flat_tokens, following, sequence, position, device),)
    return Packed(_tensor(flat_tokens[at], device)[None], packed, responses, digests)


def _response_tokens(
    microbatch: Microbatch,
    flat_tokens: np.ndarray,
    following: np.ndarray,
    sequence: np.ndarray,
    position: np.ndarray,
    device: torch.device | str,
) -> ResponseTokens:
    """Returns the response tokens that the tokens of a context rank predict.

    flat_tokens: of all sequences, and a 0, [tokens of the microbatch + 1]. following, sequence, position: of the rank's
    tokens, int64 [tokens]: the place of the next token among flat_tokens, that of the 0 if there is none.
    """
    flat_mask = np.concatenate([*(s.loss_mask for s in microbatch.sequences), [False]]).astype(bool)
    flat_logprobs = np.concatenate([*(s.rollout_logprobs for s in microbatch.sequences), [0.0]])
    flat_index = np.concatenate([*(s.first - 1 + np.cumsum(s.loss_mask) for s in microbatch.sequences), [0]])
    predicting = np.flatnonzero(flat_mask[following])
    token, of = following[predicting], sequence[predicting]
    counts = torch.tensor([float(s.loss_mask.sum()) for s in microbatch.sequences], device=device)
    numbers = np.array([s.teacher for s in microbatch.sequences], dtype=np.int64)
    given = np.array([s.given for s in microbatch.sequences], dtype=bool)
    place = (np.cumsum(flat_mask) - 1)[token]
    return ResponseTokens(
        positions=_tensor(predicting, device),
        labels=_tensor(flat_tokens[token], device),
        rows=_tensor(np.array(microbatch.rows, dtype=np.int64)[of], device),
        index=_tensor(flat_index[token], device),
        numbers=_tensor(position[predicting] + 1, device),
        sequences=Sequences(_tensor(of, device), counts, over_context_ranks),
        rollout_logprobs=_tensor(flat_logprobs[token], device, torch.float32),
        kept=kept_tokens(microbatch.sequences, place, device),
        teachers=_tensor(numbers[of], device) if (numbers >= 0).any() else None,
        taught=_taught_tokens(microbatch, place, device),
        given=_tensor(given[of], device, torch.bool) if given.any() else None,
    )


def _taught_tokens(microbatch: Microbatch, place: np.ndarray, device: torch.device | str) -> TaughtTokens | None:
    """Returns what teachers said of a rank's response tokens. place: int64 [tokens], among all of the microbatch."""
    parts = [(sequence.taught, int(sequence.loss_mask.sum())) for sequence in microbatch.sequences]
    wide = max((taught.ids.shape[1] for taught, _ in parts if taught is not None), default=0)
    if not wide:
        return None
    ids = [np.zeros((n, wide), np.int64) if taught is None else taught.ids for taught, n in parts]
    logprobs = [np.full((n, wide), np.nan) if taught is None else taught.ids_logprobs for taught, n in parts]
    return TaughtTokens(
        _tensor(np.concatenate(ids)[place], device), _tensor(np.concatenate(logprobs)[place], device, torch.float32)
    )


def _tensor(array: np.ndarray, device: torch.device | str, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device=device, dtype=dtype)


def _with_padding(lengths: np.ndarray, context: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns real and padded lengths of all sequences; the dummy is the last, with real length 0."""
    padded = padded_length(lengths, context)
    if dummy := tokens * context - int(padded.sum()):
        lengths, padded = np.append(lengths, 0), np.append(padded, dummy)
    return lengths, padded


# --- the batch --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Minibatch:
    """One rank's part of a minibatch."""

    first: int  # index of its first microbatch in the batch
    packed: list[Packed]
    tokens: int  # response tokens over all ranks
    rows: int  # rows with response tokens over all ranks
    split: tuple[SplitRow, ...]  # the rows among them that have several sequences

    @property
    def responses(self) -> list[ResponseTokens]:
        """Returns an entry for each microbatch on ranks that compute logits."""
        return [response for packed in self.packed for response in packed.responses]

    def part_of(self, values: TokenTensors) -> TokenTensors:
        """Returns the `values` of this minibatch's microbatches, out of those of the whole batch."""
        return values[self.first : self.first + len(self.responses)]


@dataclass(frozen=True)
class Batch:
    """A step's work on this rank."""

    minibatches: tuple[Minibatch, ...] = ()
    joined: tuple[tuple[Packed, range], ...] = ()
    """Microbatches of passes without gradients: several of training's as one, and their range in the batch."""

    @property
    def responses(self) -> list[ResponseTokens]:
        return [response for minibatch in self.minibatches for response in minibatch.responses]

    @property
    def routed_tokens(self) -> int:
        """Counts this rank's tokens that have routes."""
        routes = [packed.sequences.routes for minibatch in self.minibatches for packed in minibatch.packed]
        return sum(int((of[:, 0, 0] != NO_ROUTE).sum()) for of in routes if of is not None and of.shape[1])

    @property
    def split(self) -> list[SplitRow]:
        return [row for minibatch in self.minibatches for row in minibatch.split]


@dataclass(frozen=True)
class Passes:
    """The results of the passes over the batch, float32. None: the pass was not made."""

    before_update: TokenTensors | None = None  # the trainer's logprobs before the update
    entropies: TokenTensors | None = None  # of the policy, as the update first saw each microbatch
    old_logprobs: TokenTensors | None = None  # denominators of ratios: before_update, or the engines' logprobs
    reference_logprobs: TokenTensors | None = None
    values: TokenTensors | None = None  # the critic's estimates before its update
    energy: TokenTensors | None = None  # of old logprobs, by token_energy


def as_tensors(
    batch: RankBatch,
    layout: ParallelLayout,
    context_rank: int,
    device: torch.device,
    *,
    has_logits: bool,
    at_once: int,
    routes: RoutesOnRank | None = None,
) -> Batch:
    """Puts a data rank's batch on `device` as tensors. Passes without gradients join up to `at_once` microbatches.

    With `routes` it is collective over the ranks that share them. Raises RankError if they are not those sent.
    """

    def packed(micros: Sequence[Microbatch]) -> list[Packed]:
        sizes = padded_tokens(micros, layout, device.type)
        where: dict[str, Any] = {"layout": layout, "context_rank": context_rank, "device": device}
        where |= {"has_logits": has_logits, "routes": routes}
        made = [pack(micro, **where, tokens=size) for micro, size in zip(micros, sizes, strict=True)]
        if routes is not None:
            require_digests(micros, [one.digests for one in made], device)
        return made

    minibatches: list[Minibatch] = []
    micros = [micro for minibatch in batch.minibatches for micro in minibatch]
    first = 0
    for part, tokens, rows, split in zip(batch.minibatches, batch.tokens, batch.rows, batch.split, strict=True):
        minibatches.append(Minibatch(first, packed(part), tokens, rows, split))
        first += len(part)
    if at_once == 1:
        parts = [range(index, index + 1) for index in range(len(micros))]
        joined = [one for minibatch in minibatches for one in minibatch.packed]
    else:
        parts = joined_microbatches(len(micros), at_once, layout)
        joined = packed([Microbatch(tuple(s for i in part for s in micros[i].sequences)) for part in parts])
    return Batch(tuple(minibatches), tuple(zip(joined, parts, strict=True)))


def of_tokens(batch: Batch, values: RowOrTokenValues, device: torch.device | str) -> TokenTensors:
    """Spreads the driver's numbers for rows or tokens of the step over the batch's response tokens, float32."""
    flat = values.values if isinstance(values, Ragged) else values
    on_device = torch.tensor(flat, dtype=torch.float32, device=device)  # a copy: Ray's arrays are read-only
    if not isinstance(values, Ragged):
        return tuple(on_device[response.rows] for response in batch.responses)
    offsets = torch.tensor(values.offsets, device=device)
    return tuple(on_device[offsets[response.rows] + response.index] for response in batch.responses)


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


# --- weights in the loss ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TokenWeights:
    """The weights of one minibatch's tokens, by microbatch. Corrections and choices leave given responses alone."""

    weights: TokenTensors  # float32, in the loss; 0 for tokens that a correction rejects
    importance: TokenTensors | None  # float32, of the policy's loss; None: 1
    chosen: TokenTensors | None  # bool, tokens that a loss by covariance chose
    correction: Tensor | None  # `Corrected.sums`, if the recipe has a correction


def weigh(
    minibatch: Minibatch,
    advantages: TokenTensors,
    old_logprobs: TokenTensors | None,
    recipe: Recipe,
    seed: int,
) -> TokenWeights:
    """Weighs a minibatch's response tokens, before its first backward pass. Collective over the ranks that hold them.

    What depends on the whole minibatch is summed over these ranks, so that losses depend on neither layout nor packing.
    advantages, old_logprobs: of the minibatch; old_logprobs must be there if `prepares_by_old_logprobs`.
    """
    responses = minibatch.responses
    if not responses:
        return TokenWeights((), None, None, None)
    algorithm, device = recipe.algorithm, responses[0].rows.device
    rollouts = whole_rows(responses, minibatch.split, device)
    old = None if old_logprobs is None else torch.cat(old_logprobs)
    sampled = sampled_tokens(responses)
    kept = torch.ones_like(rollouts.index, dtype=torch.bool)
    tokens, count = float(minibatch.tokens), float(minibatch.rows)
    importance = chosen = sums = None

    def split(values: Tensor) -> TokenTensors:
        return values.split([len(response.rows) for response in responses])

    if algorithm.correction.corrects and old is not None:
        rollout = torch.cat([response.rollout_logprobs for response in responses])
        of_sampled = replace(rollouts, index=rollouts.index[sampled])
        corrected = correct(old[sampled], rollout[sampled], of_sampled, algorithm.correction, sum_over_ranks)
        kept[sampled], sums = corrected.kept, corrected.sums
        if corrected.importance is not None:
            ratios = torch.ones_like(old)
            ratios[sampled] = corrected.importance
            importance = split(ratios)
        # Ranks may have parts of a row; a token's share of its row's kept ones counts the row once.
        of_row = rollouts.of_tokens(rollouts.sum(kept))
        counts = torch.stack([kept.double(), torch.where(kept, 1 / of_row, 0.0)]).sum(1)
        sum_over_ranks(counts)
        tokens, count = counts.tolist()
    if isinstance(algorithm.loss, CovarianceLoss) and old is not None:
        # Rollouts of agents are drawn alike however they are cut; their index tells tokens of a row apart.
        drawn_by = [response.index if recipe.agent else response.numbers for response in responses]
        rows = [response.rows for response in responses]
        draws = torch.cat([token_draws(seed, *pair) for pair in zip(rows, drawn_by, strict=True)])
        eligible = kept if isinstance(sampled, slice) else kept & sampled
        chosen = split(algorithm.loss.choose(old, torch.cat(advantages), eligible, draws, sum_over_ranks))
    longest = recipe.sequence_tokens_max if recipe.agent else recipe.rollout.response_tokens_max
    whole = MinibatchTokens(kept, rollouts, tokens, count, longest)
    weights = token_weights(algorithm.aggregation, whole)
    return TokenWeights(split(weights), importance, chosen, sums)


def sampled_tokens(responses: Sequence[ResponseTokens]) -> Tensor | slice:
    """Returns the index of the tokens of several microbatches, end to end, that are not of given responses."""
    if all(one.given is None for one in responses):
        return slice(None)
    return ~torch.cat([torch.zeros_like(one.rows).bool() if one.given is None else one.given for one in responses])


def whole_rows(responses: Sequence[ResponseTokens], split: Sequence[SplitRow], device: torch.device) -> Sequences:
    """Returns the rows of several microbatches, their tokens end to end: all branches of a rollout are one response.

    Rows in `split` are summed over all ranks that may hold a part of them, if there are any; others over context ranks.
    """
    rows, index, count = [torch.empty(0, dtype=torch.int64, device=device)], [], 0
    for response in responses:
        rows.append(response.rows)
        index.append(response.sequences.index + count)
        count += len(response.sequences.tokens)
    empty = torch.empty(0, device=device)
    tokens = torch.cat([empty, *(response.sequences.tokens for response in responses)])
    sequence = torch.cat([rows[0], *index])
    if not split:
        return Sequences(sequence, tokens, over_context_ranks)
    ordered = sorted(split, key=lambda split_row: split_row.row)
    split_rows = torch.tensor([split_row.row for split_row in ordered], device=device)
    row = torch.cat(rows)
    at = torch.searchsorted(split_rows, row).clamp(max=len(split_rows) - 1)

    def over_ranks(sums: Tensor) -> Tensor:
        """Sums over ranks: sequences (whose slots are empty if their row is split), then split rows."""
        of_split = sums[count:].clone()
        sum_over_ranks(of_split)
        return torch.cat([over_context_ranks(sums[:count]), of_split])

    of_split = torch.tensor([float(split_row.tokens) for split_row in ordered], device=device)
    sequence = torch.where(split_rows[at] == row, count + at, sequence)
    return Sequences(sequence, torch.cat([tokens, of_split]), over_ranks)

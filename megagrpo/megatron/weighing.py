"""Computes each token's weight in the loss, from the whole minibatch, before its first backward pass.

A rollout of several branches weighs as one response, wherever these lie: in other microbatches, on other data ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megagrpo.algorithm.aggregation import MinibatchTokens, token_weights
from megagrpo.algorithm.correction import correct
from megagrpo.algorithm.policy_losses import CovarianceLoss
from megagrpo.algorithm.selection import choose_by_covariance, token_draws
from megagrpo.algorithm.sequences import Sequences
from megagrpo.batching.rank_batches import SplitRow
from megagrpo.megatron.batch import Minibatch, ResponseTokens, TokenTensors, over_context_ranks, sum_over_ranks
from megagrpo.recipe.schema import Recipe


@dataclass(frozen=True)
class TokenWeights:
    """The weights of one minibatch's tokens, by microbatch."""

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
    """Weighs every response token of a minibatch. Collective over the ranks that hold its tokens.

    What depends on the whole minibatch is summed over these ranks, so that losses depend on neither layout nor packing.
    advantages, old_logprobs: of the minibatch; old_logprobs must be there if `prepares_by_old_logprobs`.
    """
    responses = minibatch.responses
    if not responses:
        return TokenWeights((), None, None, None)
    algorithm, device = recipe.algorithm, responses[0].rows.device
    rollouts = whole_rows(responses, minibatch.split, device)
    old = None if old_logprobs is None else torch.cat(old_logprobs)
    kept = torch.ones(len(rollouts.index), dtype=torch.bool, device=device)
    tokens, count = float(minibatch.tokens), float(minibatch.rows)
    importance = chosen = sums = None

    def split(values: Tensor) -> TokenTensors:
        return values.split([len(response.rows) for response in responses])

    if algorithm.correction.corrects and old is not None:
        rollout = torch.cat([response.rollout_logprobs for response in responses])
        corrected = correct(old, rollout, rollouts, algorithm.correction, sum_over_ranks)
        kept, sums = corrected.kept, corrected.sums
        importance = None if corrected.importance is None else split(corrected.importance)
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
        chosen = split(choose_by_covariance(old, torch.cat(advantages), kept, draws, algorithm.loss, sum_over_ranks))
    longest = recipe.sequence_tokens_max if recipe.agent else recipe.rollout.response_tokens_max
    whole = MinibatchTokens(kept, rollouts, tokens, count, longest)
    weights = token_weights(algorithm.aggregation, whole)
    return TokenWeights(split(weights), importance, chosen, sums)


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

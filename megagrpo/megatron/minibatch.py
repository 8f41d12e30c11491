"""What an optimizer step works on, and what it must know of its whole minibatch before its first backward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megagrpo.algorithm.aggregation import token_weights
from megagrpo.algorithm.correction import correct
from megagrpo.algorithm.covariance import choose_by_covariance
from megagrpo.algorithm.draws import token_draws
from megagrpo.megatron.packed import PackedTensors
from megagrpo.megatron.response import ResponseTokens, joined, share_out
from megagrpo.recipe.passes import BY_COVARIANCE, corrects
from megagrpo.recipe.schema import AlgorithmConfig


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

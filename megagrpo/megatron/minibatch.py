"""What an optimizer step works on, and what it must know of its whole minibatch before its first backward pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megagrpo.algorithm.aggregation import Aggregation, token_weights
from megagrpo.megatron.packed import PackedTensors
from megagrpo.megatron.response import ResponseTokens


@dataclass(frozen=True)
class Minibatch:
    """One rank's part of one. `responses` has one for each microbatch on ranks that compute logits, else none.

    tokens, sequences: response tokens, and sequences with any, over all ranks.
    """

    packed: list[PackedTensors]
    responses: list[ResponseTokens]
    tokens: int
    sequences: int


def weigh_tokens(minibatch: Minibatch, aggregation: Aggregation, divisor: float) -> None:
    """Gives every response token its weight in the loss."""
    for response in minibatch.responses:
        kept = torch.ones_like(response.positions, dtype=torch.bool)
        response.weights = token_weights(
            kept, response.sequences, aggregation, minibatch.tokens, minibatch.sequences, divisor
        )


def of_tokens(values: Tensor, offsets: Tensor | None, response: ResponseTokens) -> Tensor:
    """Each response token's of `values`: [rows of the step], or [response tokens of the step] with offsets [rows + 1]."""
    if offsets is None:
        return values[response.rows]
    return values[offsets[response.rows] + response.index]

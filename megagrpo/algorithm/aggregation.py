"""From losses per token to one number. Denominators count the whole minibatch, on all ranks and in all microbatches.

The loss is the sum of weight x loss over tokens, and sums do not care how the tokens are split. So losses and gradients
are the same for every layout, packing and microbatch size, which is not true of means of means.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from megagrpo.algorithm.sequences import Sequences

Aggregation = Literal["token_mean", "token_sum", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm"]


def token_weights(
    kept: Tensor, sequences: Sequences, kind: Aggregation, tokens: float, count: float, divisor: float
) -> Tensor:
    """Weight of each response token in the loss, float32 [tokens]; 0 where `kept` (bool [tokens]) is False.

    tokens, count: kept tokens, and sequences with any, of the minibatch over all ranks.
    token_mean: 1 / tokens, every token counts the same (DAPO, arXiv:2503.14476, eq. 12).
    token_sum: 1.
    seq_mean_token_sum: 1 / count.
    seq_mean_token_mean: 1 / (own kept tokens x count), every response counts the same (GRPO, arXiv:2402.03300, eq. 3).
    seq_mean_token_sum_norm: 1 / (divisor x count), the divisor a constant (Dr.GRPO, arXiv:2503.20783).
    """
    weights = kept.double()
    tokens, count = max(tokens, 1.0), max(count, 1.0)
    if kind == "token_mean":
        weights = weights / tokens
    elif kind == "seq_mean_token_sum":
        weights = weights / count
    elif kind == "seq_mean_token_mean":
        weights = weights / (sequences.of_tokens(sequences.sum(weights).clamp(min=1)) * count)
    elif kind == "seq_mean_token_sum_norm":
        weights = weights / (divisor * count)
    return weights.float()

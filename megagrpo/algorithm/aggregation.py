"""From losses per token to one number. Denominators count the whole minibatch, on all ranks and in all microbatches.

The loss is the sum of weight x loss over tokens, and sums do not care how the tokens are split. So losses and gradients
are the same for every layout, packing and microbatch size, which is not true of means of means.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

Aggregation = Literal["token_mean", "sequence_mean"]


def sequence_weights(response_tokens: np.ndarray, kind: Aggregation, tokens: int, sequences: int) -> np.ndarray:
    """Weight of each response token of each sequence, float64 [sequences].

    response_tokens: int [sequences], the response tokens of each *whole* sequence, wherever its tokens are computed.
    tokens, sequences: response tokens, and sequences with any, of the minibatch over all ranks.
    token_mean: 1 / tokens, every token counts the same (DAPO, arXiv:2503.14476, eq. 12).
    sequence_mean: 1 / (own tokens x sequences), every response counts the same (GRPO, arXiv:2402.03300, eq. 3).
    """
    if kind == "token_mean":
        return np.full(len(response_tokens), 1.0 / max(tokens, 1))
    return 1.0 / (np.maximum(response_tokens, 1) * max(sequences, 1))

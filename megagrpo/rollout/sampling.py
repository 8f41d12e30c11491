"""One token for each row of logits: seeds, temperature, top-k, top-p, and the logprob that training compares with."""

from __future__ import annotations

import torch

from megagrpo.splitmix64 import GAMMA, mixed, shifted
from megagrpo.types import SamplingParams


def draw(logits: torch.Tensor, uniforms: torch.Tensor, sampling: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens (int64 [rows]) and their logprobs (float32 [rows]) from `logits` [rows, vocab] and `uniforms` [rows].

    Drawn by inverting the cumulative distribution at each row's uniform number. The logprob is under the whole
    temperature-scaled distribution even when top-k or top-p narrowed the draw, and at temperature 1 when greedy.
    """
    logits = logits.float()
    if sampling.temperature == 0:
        logprobs = logits.log_softmax(-1)
        tokens = logits.argmax(-1)
    else:
        logprobs = (logits / sampling.temperature).log_softmax(-1)
        tokens = _invert(truncate(logprobs.exp(), sampling.top_k, sampling.top_p), uniforms)
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]


def truncate(probabilities: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """`probabilities` [rows, vocab] with 0 outside the k likeliest tokens (0: all) and then outside their nucleus.

    The nucleus is the smallest set of likeliest tokens whose share of the remaining mass reaches `top_p`
    (Holtzman et al., arXiv:1904.09751). Not renormalised, and in the order of the vocabulary: two tokens that swap
    ranks by a rounding error then do not swap places under the uniform number.
    """
    vocab = probabilities.shape[-1]
    if not 0 < top_k < vocab and top_p >= 1:
        return probabilities
    ranked, order = probabilities.sort(dim=-1, descending=True, stable=True)
    if 0 < top_k < vocab:
        ranked = ranked[:, :top_k]
        order = order[:, :top_k]
    if top_p < 1:
        total = ranked.cumsum(-1, dtype=torch.float64)
        mass_before = total - ranked
        ranked = ranked.masked_fill(mass_before >= top_p * total[:, -1:], 0.0)
    return torch.zeros_like(probabilities).scatter(-1, order, ranked)


def _invert(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The first token whose cumulated weight exceeds the uniform share of the total; never one of weight 0."""
    cumulated = weights.cumsum(-1, dtype=torch.float64)
    return torch.searchsorted(cumulated, uniforms[:, None] * cumulated[:, -1:], right=True)[:, 0]


def uniforms(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One uniform number in [0, 1) for each (seed, position): the same in any batch, order, engine or restart.

    `seeds` and `positions` are int64 of one shape, as is the float64 result. It is SplitMix64, started at the mixed
    seed and jumped to the position. 52 of its bits are kept: `u * total < total` then holds in float64 for any total,
    so that some token is always drawn.
    """
    state = mixed(seeds) + (positions + 1) * GAMMA
    return shifted(mixed(state), 12).to(torch.float64) * 2.0**-52

"""How much there is to compute for a sequence of some length."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megagrpo.weights.families.architecture import Architecture


@dataclass(frozen=True)
class Work:
    """Floating-point operations of a forward pass over one sequence: linear x length + quadratic x length^2.

    A backward pass is twice as many.
    """

    linear: float
    quadratic: float

    def of(self, lengths: np.ndarray) -> np.ndarray:
        """float64 [sequences], for lengths in tokens."""
        return lengths * (self.linear + self.quadratic * lengths)


TOKENS = Work(linear=1.0, quadratic=0.0)
"""Counts tokens, for when the model doesn't matter."""


def work_of(arch: Architecture) -> Work:
    """Two operations for each weight that a token meets, and causal attention's products with half of all pairs."""
    experts = arch.experts
    dense_layers = arch.layers if experts is None else experts.dense_layers
    weights = arch.layers * _attention_weights(arch) + dense_layers * 3 * arch.hidden * arch.ffn
    if experts is not None:
        met = 3 * (experts.per_token * experts.ffn + experts.shared_ffn) + experts.count  # the router's row of each
        weights += (arch.layers - dense_layers) * arch.hidden * met
    weights += arch.hidden * (1 if arch.value_head else arch.vocab)
    value_dim = arch.head_dim if arch.latent is None else arch.latent.value_dim
    return Work(2.0 * weights, float(arch.layers * arch.heads * (arch.head_dim + value_dim)))


def _attention_weights(arch: Architecture) -> int:
    """Of one layer's projections."""
    latent = arch.latent
    if latent is None:
        return 2 * arch.hidden * arch.head_dim * (arch.heads + arch.query_groups)
    queries = arch.heads * arch.head_dim
    rank = latent.query_rank
    query = arch.hidden * queries if rank is None else rank * (arch.hidden + queries)
    down = arch.hidden * (latent.key_value_rank + latent.rotary_dim)
    up = latent.key_value_rank * arch.heads * (latent.plain_dim + latent.value_dim)
    return query + down + up + arch.heads * latent.value_dim * arch.hidden

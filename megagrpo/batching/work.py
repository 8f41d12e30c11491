"""Floating-point operations of a forward pass over a sequence, by its length."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megagrpo.weights.families.architecture import Architecture


@dataclass(frozen=True)
class Work:
    """The operations of a forward pass: linear x length + quadratic x length^2. A backward pass takes twice as many."""

    linear: float
    quadratic: float

    def of(self, lengths: np.ndarray) -> np.ndarray:
        """Returns the operations for lengths in tokens, float64 [sequences]."""
        return lengths * (self.linear + self.quadratic * lengths)


TOKENS = Work(linear=1.0, quadratic=0.0)
"""Counts tokens, for when the model doesn't matter."""


@dataclass(frozen=True)
class LayerWork:
    """Operations of one layer's forward pass per token: two for each weight that a token meets."""

    projections: float
    mlp: float
    """With experts: of the shared ones and the router."""
    experts: float
    pairs: float
    up: float = 0.0
    """The part of the projections that leads from latents up to heads."""
    shared: float = 0.0
    """The shared experts' part of mlp."""

    @property
    def linear(self) -> float:
        return self.projections + self.mlp + self.experts


def layer_work(arch: Architecture, layer: int) -> LayerWork:
    """Returns the work of layer `layer`, counted from 0."""
    experts = arch.experts
    mlp, routed, shared, up = 3 * arch.hidden * arch.ffn, 0, 0, 0
    if experts is not None and layer >= experts.dense_layers:
        shared = 3 * arch.hidden * experts.shared_ffn
        mlp = shared + arch.hidden * experts.count
        routed = 3 * arch.hidden * experts.per_token * experts.ffn
    value_dim = arch.head_dim
    if (latent := arch.latent) is not None:
        value_dim = latent.value_dim
        up = latent.key_value_rank * arch.heads * (latent.plain_dim + latent.value_dim)
        up += (latent.query_rank or arch.hidden) * arch.heads * arch.head_dim
    pairs = arch.heads * (arch.head_dim + value_dim)
    projections = 2.0 * _attention_weights(arch)
    return LayerWork(projections, 2.0 * mlp, 2.0 * routed, float(pairs), up=2.0 * up, shared=2.0 * shared)


def head_work(arch: Architecture) -> float:
    """Returns the operations of the output layer, or of a critic's value head, per token that it sees."""
    return 2.0 * arch.hidden * (1 if arch.value_head else arch.vocab)


def work_of(arch: Architecture) -> Work:
    """Returns the work of the whole model, with the output layer at every token."""
    layers = [layer_work(arch, layer) for layer in range(arch.layers)]
    return Work(sum(layer.linear for layer in layers) + head_work(arch), sum(layer.pairs for layer in layers))


def _attention_weights(arch: Architecture) -> int:
    """Returns the number of weights of one layer's projections."""
    latent = arch.latent
    if latent is None:
        return 2 * arch.hidden * arch.head_dim * (arch.heads + arch.query_groups)
    queries = arch.heads * arch.head_dim
    rank = latent.query_rank
    query = arch.hidden * queries if rank is None else rank * (arch.hidden + queries)
    down = arch.hidden * (latent.key_value_rank + latent.rotary_dim)
    up = latent.key_value_rank * arch.heads * (latent.plain_dim + latent.value_dim)
    return query + down + up + arch.heads * latent.value_dim * arch.hidden

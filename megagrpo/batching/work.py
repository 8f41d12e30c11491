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
    experts, latent = arch.experts, arch.latent
    mlp, routed, shared = 3 * arch.hidden * arch.ffn, 0, 0
    if experts is not None and layer >= experts.dense_layers:
        shared = 3 * arch.hidden * experts.shared_ffn
        mlp = shared + arch.hidden * experts.count
        routed = 3 * arch.hidden * experts.per_token * experts.ffn
    if latent is None:
        value_dim, up = arch.head_dim, 0
        projections = 2 * arch.hidden * arch.head_dim * (arch.heads + arch.query_groups)
    else:
        value_dim = latent.value_dim
        up = latent.key_value_rank * arch.heads * (latent.plain_dim + value_dim)
        up += (latent.query_rank or arch.hidden) * arch.heads * arch.head_dim
        down = arch.hidden * (latent.key_value_rank + latent.rotary_dim + (latent.query_rank or 0))
        projections = down + up + arch.heads * value_dim * arch.hidden
    pairs = arch.heads * (arch.head_dim + value_dim)
    return LayerWork(2.0 * projections, 2.0 * mlp, 2.0 * routed, float(pairs), up=2.0 * up, shared=2.0 * shared)


def head_work(arch: Architecture) -> float:
    """Returns the operations of the output layer, or of a critic's value head, per token that it sees."""
    return 2.0 * arch.hidden * (1 if arch.value_head else arch.vocab)


def work_of(arch: Architecture) -> Work:
    """Returns the work of the whole model, with the output layer at every token."""
    layers = [layer_work(arch, layer) for layer in range(arch.layers)]
    return Work(sum(layer.linear for layer in layers) + head_work(arch), sum(layer.pairs for layer in layers))

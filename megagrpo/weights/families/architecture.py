"""What a model is, read from its Hugging Face config: the numbers that every side needs, and its checkpoint tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Rope:
    """Rotary embedding. `llama3` scaling (arXiv:2407.21783) when `factor` is not None."""

    theta: float
    factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True)
class Experts:
    """Mixture-of-experts layers. Every layer has experts (mixed dense and sparse stacks are refused)."""

    count: int
    per_token: int
    ffn: int
    normalize_top_k: bool


@dataclass(frozen=True)
class Architecture:
    """A decoder-only transformer with RMSNorm, rotary embedding, grouped-query attention and gated SiLU MLPs."""

    family: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    query_groups: int
    head_dim: int
    vocab: int
    max_positions: int
    norm_epsilon: float
    tied_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    rope: Rope
    experts: Experts | None = None

    def padded_vocab(self, tensor: int) -> int:
        """Rows of the embedding after padding, so that `tensor` ranks hold the same number."""
        return -(-self.vocab // tensor) * tensor


Role = Literal[
    "embedding", "head", "final_norm", "input_norm", "post_attention_norm",
    "q", "k", "v", "q_bias", "k_bias", "v_bias", "q_norm", "k_norm", "o",
    "gate", "up", "down", "router", "expert_gate", "expert_up", "expert_down",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of the checkpoint: its key, its shape [out, in] or [n], and what it is to the model."""

    name: str
    shape: tuple[int, ...]
    role: Role
    layer: int | None = None
    expert: int | None = None

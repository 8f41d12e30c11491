"""A model's architecture: the numbers of its Hugging Face config that every side needs, and its checkpoint tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from megagrpo.weights.boxes import Box


@dataclass(frozen=True)
class Yarn:
    """Scaling of a rotary embedding (arXiv:2309.00071), with the two factors of DeepSeek for its magnitude."""

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0


@dataclass(frozen=True)
class Rope:
    """Rotary embedding. `llama3` scaling (arXiv:2407.21783) when `factor` is not None."""

    theta: float
    factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    yarn: Yarn | None = None


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (arXiv:2405.04434): queries, keys and values are projected down, normed and up again.

    A head of queries or keys has `plain_dim` elements without position and `rotary_dim` elements with it. All heads
    share the rotary part of the keys. `query_rank` is None where one matrix projects the queries.
    """

    query_rank: int | None
    key_value_rank: int
    plain_dim: int
    rotary_dim: int
    value_dim: int


@dataclass(frozen=True)
class SigmoidRouter:
    """Routing as in DeepSeek-V3 (arXiv:2412.19437): sigmoid scores, and a bias that only the choice of experts sees.

    A token chooses among the experts of its best `groups_per_token` of `groups` groups. `scale` multiplies the weights.
    """

    groups: int
    groups_per_token: int
    scale: float


@dataclass(frozen=True)
class Experts:
    """Mixture-of-experts layers: all but the first `dense_layers`. `router` is None for softmax scores.

    `shared_ffn` is the total size of the experts that every token passes.
    """

    count: int
    per_token: int
    ffn: int
    normalize_top_k: bool
    router: SigmoidRouter | None = None
    shared_ffn: int = 0
    dense_layers: int = 0


@dataclass(frozen=True)
class Architecture:
    """A decoder-only transformer with RMSNorm, rotary embedding and gated SiLU MLPs.

    Attention has query groups, or is latent. With latent attention `head_dim` is the size of a query or key head.
    """

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
    latent: LatentAttention | None = None
    value_head: bool = False
    """A critic: its head gives one number for each token, in place of logits over the vocabulary."""

    @property
    def has_dense_layers(self) -> bool:
        """Returns whether some layer has an MLP of size `ffn`."""
        return self.experts is None or self.experts.dense_layers > 0

    def padded_vocab(self, tensor: int) -> int:
        """Returns the number of rows of the embedding after padding to a multiple of `tensor`."""
        return -(-self.vocab // tensor) * tensor


def critic_of(arch: Architecture) -> Architecture:
    """Returns the same transformer with a value head, which is never tied to the embedding."""
    return replace(arch, tied_embeddings=False, value_head=True)


Role = Literal[
    "embedding", "head", "value_head", "final_norm", "input_norm", "post_attention_norm",
    "q", "k", "v", "q_bias", "k_bias", "v_bias", "q_norm", "k_norm", "o",
    "q_down", "q_down_norm", "q_up", "kv_down", "kv_down_norm", "kv_up",
    "gate", "up", "down", "router", "router_bias", "expert_gate", "expert_up", "expert_down",
    "shared_gate", "shared_up", "shared_down",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of the checkpoint: its key, its shape [out, in] or [n], and its role in the model."""

    name: str
    shape: tuple[int, ...]
    role: Role
    layer: int | None = None
    expert: int | None = None

    @property
    def box(self) -> Box:
        """Returns the box of the whole tensor."""
        return Box(self.name, (0,) * len(self.shape), self.shape)

    @property
    def trained(self) -> bool:
        """Returns whether the tensor has gradients. A router's bias keeps its loaded values."""
        return self.role != "router_bias"

    def stored_as(self, dtype: str) -> str:
        """Returns its dtype on every side: `dtype`, the model's, but float32 for routers' biases and value heads."""
        return "float32" if self.role in ("router_bias", "value_head") else dtype

    @property
    def optional(self) -> bool:
        """Returns whether a model directory may lack the tensor. A value head then starts from zeros."""
        return self.role == "value_head"

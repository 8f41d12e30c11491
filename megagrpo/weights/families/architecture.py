"""A model's architecture: the numbers of its Hugging Face config that every side needs, and its checkpoint tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


# --- tensors that families have in common -----------------------------------------------------------------------------


def attention(arch: Architecture, layer: int) -> Iterator[Tensor]:
    prefix = f"model.layers.{layer}.self_attn."
    query, key = arch.heads * arch.head_dim, arch.query_groups * arch.head_dim
    yield Tensor(prefix + "q_proj.weight", (query, arch.hidden), "q", layer)
    yield Tensor(prefix + "k_proj.weight", (key, arch.hidden), "k", layer)
    yield Tensor(prefix + "v_proj.weight", (key, arch.hidden), "v", layer)
    if arch.qkv_bias:
        yield Tensor(prefix + "q_proj.bias", (query,), "q_bias", layer)
        yield Tensor(prefix + "k_proj.bias", (key,), "k_bias", layer)
        yield Tensor(prefix + "v_proj.bias", (key,), "v_bias", layer)
    if arch.qk_norm:
        yield Tensor(prefix + "q_norm.weight", (arch.head_dim,), "q_norm", layer)
        yield Tensor(prefix + "k_norm.weight", (arch.head_dim,), "k_norm", layer)
    yield Tensor(prefix + "o_proj.weight", (arch.hidden, query), "o", layer)


def latent_attention(arch: Architecture, latent: LatentAttention, layer: int) -> Iterator[Tensor]:
    prefix = f"model.layers.{layer}.self_attn."
    query, rank = arch.heads * arch.head_dim, latent.key_value_rank
    if latent.query_rank is None:
        yield Tensor(prefix + "q_proj.weight", (query, arch.hidden), "q", layer)
    else:
        yield Tensor(prefix + "q_a_proj.weight", (latent.query_rank, arch.hidden), "q_down", layer)
        yield Tensor(prefix + "q_a_layernorm.weight", (latent.query_rank,), "q_down_norm", layer)
        yield Tensor(prefix + "q_b_proj.weight", (query, latent.query_rank), "q_up", layer)
    yield Tensor(prefix + "kv_a_proj_with_mqa.weight", (rank + latent.rotary_dim, arch.hidden), "kv_down", layer)
    yield Tensor(prefix + "kv_a_layernorm.weight", (rank,), "kv_down_norm", layer)
    up = arch.heads * (latent.plain_dim + latent.value_dim)
    yield Tensor(prefix + "kv_b_proj.weight", (up, rank), "kv_up", layer)
    yield Tensor(prefix + "o_proj.weight", (arch.hidden, arch.heads * latent.value_dim), "o", layer)


def feed_forward(
    arch: Architecture,
    layer: int,
    module: str = "mlp",
    gate: str = "gate_proj",
    up: str = "up_proj",
    down: str = "down_proj",
) -> Iterator[Tensor]:
    """Yields a layer's MLP; or its router and experts, one tensor per expert and projection, and its shared experts.
    The strings are names in the keys."""
    prefix, experts = f"model.layers.{layer}.{module}.", arch.experts
    if experts is None or layer < experts.dense_layers:
        yield Tensor(f"{prefix}{gate}.weight", (arch.ffn, arch.hidden), "gate", layer)
        yield Tensor(f"{prefix}{up}.weight", (arch.ffn, arch.hidden), "up", layer)
        yield Tensor(f"{prefix}{down}.weight", (arch.hidden, arch.ffn), "down", layer)
        return
    yield Tensor(prefix + "gate.weight", (experts.count, arch.hidden), "router", layer)
    if experts.router is not None:
        yield Tensor(prefix + "gate.e_score_correction_bias", (experts.count,), "router_bias", layer)
    for expert in range(experts.count):
        of_expert = f"{prefix}experts.{expert}."
        yield Tensor(f"{of_expert}{gate}.weight", (experts.ffn, arch.hidden), "expert_gate", layer, expert)
        yield Tensor(f"{of_expert}{up}.weight", (experts.ffn, arch.hidden), "expert_up", layer, expert)
        yield Tensor(f"{of_expert}{down}.weight", (arch.hidden, experts.ffn), "expert_down", layer, expert)
    if ffn := experts.shared_ffn:
        yield Tensor(f"{prefix}shared_experts.{gate}.weight", (ffn, arch.hidden), "shared_gate", layer)
        yield Tensor(f"{prefix}shared_experts.{up}.weight", (ffn, arch.hidden), "shared_up", layer)
        yield Tensor(f"{prefix}shared_experts.{down}.weight", (arch.hidden, ffn), "shared_down", layer)


def decoder_tensors(
    arch: Architecture, mlp: Callable[[Architecture, int], Iterator[Tensor]] = feed_forward
) -> tuple[Tensor, ...]:
    """Returns a decoder's tensors in the order of the forward pass; `mlp` lists a layer's feed-forward tensors."""
    tensors = [Tensor("model.embed_tokens.weight", (arch.vocab, arch.hidden), "embedding")]
    for layer in range(arch.layers):
        prefix = f"model.layers.{layer}."
        tensors.append(Tensor(prefix + "input_layernorm.weight", (arch.hidden,), "input_norm", layer))
        tensors += attention(arch, layer) if arch.latent is None else latent_attention(arch, arch.latent, layer)
        tensors.append(Tensor(prefix + "post_attention_layernorm.weight", (arch.hidden,), "post_attention_norm", layer))
        tensors += mlp(arch, layer)
    tensors.append(Tensor("model.norm.weight", (arch.hidden,), "final_norm"))
    if arch.value_head:  # the name in transformers' ForSequenceClassification and ForTokenClassification
        tensors.append(Tensor("score.weight", (1, arch.hidden), "value_head"))
    elif not arch.tied_embeddings:
        tensors.append(Tensor("lm_head.weight", (arch.vocab, arch.hidden), "head"))
    return tuple(tensors)

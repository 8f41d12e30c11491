"""The checkpoint tensors that families have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megagrpo.weights.families.architecture import Architecture, LatentAttention, Tensor

LayerTensors = Callable[[Architecture, int], Iterator[Tensor]]


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


def decoder_tensors(arch: Architecture, mlp: LayerTensors = feed_forward) -> tuple[Tensor, ...]:
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

"""The checkpoint tensors that families have in common, in the order of the forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megagrpo.errors import ModelError, Problem
from megagrpo.weights.families.architecture import Architecture, Tensor

LayerTensors = Callable[[Architecture, int], Iterator[Tensor]]


def decoder_tensors(arch: Architecture, mlp: LayerTensors) -> tuple[Tensor, ...]:
    """Every tensor of the model; `mlp` gives those of one layer's feed-forward part."""
    tensors = [Tensor("model.embed_tokens.weight", (arch.vocab, arch.hidden), "embedding")]
    for layer in range(arch.layers):
        prefix = f"model.layers.{layer}."
        tensors.append(Tensor(prefix + "input_layernorm.weight", (arch.hidden,), "input_norm", layer))
        tensors += attention(arch, layer)
        tensors.append(Tensor(prefix + "post_attention_layernorm.weight", (arch.hidden,), "post_attention_norm", layer))
        tensors += mlp(arch, layer)
    tensors.append(Tensor("model.norm.weight", (arch.hidden,), "final_norm"))
    if not arch.tied_embeddings:
        tensors.append(Tensor("lm_head.weight", (arch.vocab, arch.hidden), "head"))
    return tuple(tensors)


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


def gated_mlp(arch: Architecture, layer: int) -> Iterator[Tensor]:
    prefix = f"model.layers.{layer}.mlp."
    yield Tensor(prefix + "gate_proj.weight", (arch.ffn, arch.hidden), "gate", layer)
    yield Tensor(prefix + "up_proj.weight", (arch.ffn, arch.hidden), "up", layer)
    yield Tensor(prefix + "down_proj.weight", (arch.hidden, arch.ffn), "down", layer)


def routed_experts(arch: Architecture, layer: int, module: str, gate: str, up: str, down: str) -> Iterator[Tensor]:
    """A router and its experts, one tensor per expert and projection. `module` and the others are names in the keys."""
    if arch.experts is None:
        raise ModelError(Problem(f"{arch.family} without experts", "experts = None", "the number and size of experts"))
    prefix, ffn = f"model.layers.{layer}.{module}.", arch.experts.ffn
    yield Tensor(prefix + "gate.weight", (arch.experts.count, arch.hidden), "router", layer)
    for expert in range(arch.experts.count):
        of_expert = f"{prefix}experts.{expert}."
        yield Tensor(f"{of_expert}{gate}.weight", (ffn, arch.hidden), "expert_gate", layer, expert)
        yield Tensor(f"{of_expert}{up}.weight", (ffn, arch.hidden), "expert_up", layer, expert)
        yield Tensor(f"{of_expert}{down}.weight", (arch.hidden, ffn), "expert_down", layer, expert)

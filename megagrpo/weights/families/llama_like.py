"""Llama, Mistral, Qwen and others: attention by query groups, and in every layer an MLP or the same number of experts.

transformers 5 stacks experts in memory, under names of its own (sides/checkpoint.py). It saves them one by one,
under the names of published checkpoints. This module uses the published names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.families.parts.attention import Attention, Temperature
from megagrpo.weights.families.parts.experts import Experts
from megagrpo.weights.families.reading import ConfigReader


def _alike(read: ConfigReader, *, bias: bool = False, norm: Literal["head"] | None = None) -> Architecture:
    """Returns a model whose layers are all alike, with MLPs."""
    return read.model([read.layer(read.attention(bias=bias, norm=norm), read.mlp())] * read.layers)


def llama(config: Mapping[str, Any]) -> Architecture:
    """Reads Llama 2 and 3.x (`LlamaForCausalLM`): no biases, rotary embedding with or without llama3 scaling."""
    read = ConfigReader(config)
    read.refuse_if_set("attention_bias", "mlp_bias")
    return _alike(read)


def mistral(config: Mapping[str, Any]) -> Architecture:
    """Reads Mistral (`MistralForCausalLM`): llama, with windows unless sliding_window is null."""
    read = ConfigReader(config, num_key_value_heads=8, sliding_window=4096)
    return read.model([read.layer(_with_window(read, read.attention()), read.mlp())] * read.layers)


def qwen2(config: Mapping[str, Any]) -> Architecture:
    """Reads Qwen2 and Qwen2.5 (`Qwen2ForCausalLM`): biases on q, k and v. The small models tie their embeddings."""
    return _alike(ConfigReader(config, num_key_value_heads=32, use_sliding_window=False), bias=True)


def mimo(config: Mapping[str, Any]) -> Architecture:
    """Reads MiMo 7B (`MiMoForCausalLM`), which has Qwen2's tensors, and layers for further tokens."""
    read = ConfigReader(config, num_key_value_heads=32, use_sliding_window=False)
    read.require(attention_bias=True)
    return _alike(read, bias=True)


def qwen3(config: Mapping[str, Any]) -> Architecture:
    """Reads Qwen3 (`Qwen3ForCausalLM`): RMSNorm on each query and key head, a head_dim of its own, no biases."""
    read = ConfigReader(config, num_key_value_heads=32, head_dim=128, use_sliding_window=False)
    read.refuse_if_set("attention_bias")
    return _alike(read, norm="head")


def qwen3_moe(config: Mapping[str, Any]) -> Architecture:
    """Reads Qwen3 (`Qwen3MoeForCausalLM`): the dense model's attention, with experts in place of most MLPs."""
    read = ConfigReader(config, num_key_value_heads=4, use_sliding_window=False)
    read.refuse_if_set("attention_bias")
    experts = read.experts(ffn="moe_intermediate_size", normalize_top_k=read.flag("norm_topk_prob"))
    attention = read.attention(norm="head")
    return read.model([read.layer(attention, mlp) for mlp in read.some_sparse(experts)])


def qwen2_moe(config: Mapping[str, Any]) -> Architecture:
    """Reads Qwen2 and Qwen1.5 (`Qwen2MoeForCausalLM`): biases on q, k and v, and a weighted shared expert."""
    read = ConfigReader(config, num_key_value_heads=16, use_sliding_window=False)
    normalize = read.flag("norm_topk_prob")
    experts = experts_beside_shared_one(read, normalize)
    attention = read.attention(bias=read.flag("qkv_bias", default=True))
    return read.model([read.layer(attention, mlp) for mlp in read.some_sparse(experts)])


def experts_beside_shared_one(read: ConfigReader, normalize_top_k: bool) -> Experts:
    """Reads experts beside a shared one, whose output has a weight of its own."""
    experts = read.experts("num_experts", ffn="moe_intermediate_size", normalize_top_k=normalize_top_k)
    return replace(experts, shared_ffn=read.integer("shared_expert_intermediate_size"), shared_weight=True)


def mixtral(config: Mapping[str, Any]) -> Architecture:
    """Reads Mixtral (`MixtralForCausalLM`): llama's attention, and experts instead of an MLP in every layer."""
    read = ConfigReader(config, default_theta=1e6, num_key_value_heads=8, rms_norm_eps=1e-5)
    read.refuse_if_set("sliding_window", "router_jitter_noise")
    experts = read.experts(ffn="intermediate_size", normalize_top_k=True)
    return read.model([read.layer(read.attention(), experts)] * read.layers)


MIXTRAL_NAMES = (
    (".mlp.", ".block_sparse_moe."), (".gate_proj.", ".w1."), (".up_proj.", ".w3."), (".down_proj.", ".w2.")
)  # fmt: skip


SHARED_EXPERT_NAMES = ((".shared_experts.", ".shared_expert."),)


def seed_oss(config: Mapping[str, Any]) -> Architecture:
    """Reads Seed-OSS (`SeedOssForCausalLM`): biases on q, k and v, and a head_dim of its own."""
    read = ConfigReader(config, num_key_value_heads=8, head_dim=128)
    read.refuse_if_set("attention_out_bias", "mlp_bias")
    return _alike(read, bias=read.flag("attention_bias", default=True))


def arcee(config: Mapping[str, Any]) -> Architecture:
    """Reads Arcee (`ArceeForCausalLM`): llama with MLPs without a gate, and relu^2."""
    read = ConfigReader(config, rms_norm_eps=1e-5)
    read.refuse_if_set("attention_bias", "mlp_bias")
    return read.model([read.layer(read.attention(), read.mlp("relu2"))] * read.layers)


def smollm3(config: Mapping[str, Any]) -> Architecture:
    """Reads SmolLM3 (`SmolLM3ForCausalLM`): llama, with every fourth layer without a rotary embedding."""
    read = ConfigReader(config, 2e6, num_key_value_heads=4, tie_word_embeddings=True)
    read.refuse_if_set("attention_bias", "mlp_bias", "use_sliding_window")
    step, rotated = read.integer("no_rope_layer_interval", default=4), read.config.get("no_rope_layers")
    if rotated is None:
        rotated = [int((layer + 1) % step != 0) for layer in range(read.layers)]
    if not isinstance(rotated, list) or len(rotated) != read.layers or any(its not in (0, 1) for its in rotated):
        needed = f"a list of num_hidden_layers = {read.layers} of 0 (no rotary embedding) and 1"
        read.refuse("no_rope_layers", rotated, needed)
        rotated = [1] * read.layers
    attention, mlp = read.attention(), read.mlp()
    return read.model([read.layer(attention if its else replace(attention, rope=None), mlp) for its in rotated])


def granite(config: Mapping[str, Any]) -> Architecture:
    """Reads Granite 3 (`GraniteForCausalLM`): llama, with four factors."""
    read = ConfigReader(config)
    read.refuse_if_set("attention_bias", "mlp_bias")
    embedding, logits, added, scores = (read.number(name, 1.0) for name in GRANITES_FACTORS)
    layer = read.layer(read.attention(scale=scores), read.mlp(), factor=added)
    return replace(read.model([layer] * read.layers), embedding_scale=embedding, logit_scale=1 / logits)


GRANITES_FACTORS = ("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier")


def glm4(config: Mapping[str, Any]) -> Architecture:
    """Reads GLM-4-0414 (`Glm4ForCausalLM`): norms before a part and after it, and half of each head rotated, in
    neighbouring pairs."""
    read = ConfigReader(config, num_key_value_heads=2, head_dim=128, rms_norm_eps=1.5625e-07)
    bias = read.flag("attention_bias", default=True)
    attention = read.attention(bias=bias, rope=read.rope(part=0.5, pairs=True))
    return read.model([read.layer(attention, read.mlp(), outputs=True)] * read.layers)


GLM4_NAMES = (
    ("attention_output_layernorm", "post_self_attn_layernorm"), ("mlp_output_layernorm", "post_mlp_layernorm")
)  # fmt: skip


def ernie4_5(config: Mapping[str, Any]) -> Architecture:
    """Reads ERNIE 4.5 (`Ernie4_5ForCausalLM`): llama with neighbouring elements rotated together."""
    read = ConfigReader(config, 5e5, num_key_value_heads=2, head_dim=128, rms_norm_eps=1e-5, tie_word_embeddings=True)
    read.refuse_if_set("use_bias")
    layer = read.layer(read.attention(rope=read.rope(pairs=True)), read.mlp())
    return read.model([layer] * read.layers)


def ministral3(config: Mapping[str, Any]) -> Architecture:
    """Reads Ministral 3 (`Ministral3ForCausalLM`): mistral, with yarn and queries that grow with the position."""
    read = ConfigReader(config, num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5)
    parameters = read.config.get("rope_scaling") or read.config.get("rope_parameters") or MINISTRALS_ROPE
    temperature = None
    if isinstance(parameters, Mapping) and (beta := parameters.get("llama_4_scaling_beta")):
        positions = parameters.get("original_max_position_embeddings")
        temperature = Temperature(
            read.positive("llama_4_scaling_beta", beta),
            int(read.positive("original_max_position_embeddings", positions)),
        )
    full = read.attention(
        rope=read.rope("yarn", others=MINISTRALS_KEYS, absent=MINISTRALS_ROPE), temperature=temperature
    )
    layer = read.layer(_with_window(read, full), read.mlp())
    return read.model([layer] * read.layers)


def phi3(config: Mapping[str, Any]) -> Architecture:
    """Reads Phi-3 and Phi-4 (`Phi3ForCausalLM`): llama with fused projections, and longrope."""
    read = ConfigReader(config, rms_norm_eps=1e-5, original_max_position_embeddings=4096)
    attention = _with_window(read, read.attention(rope=read.rope("longrope")))
    return read.model([read.layer(attention, read.mlp())] * read.layers)


MINISTRALS_ROPE = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
    "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
MINISTRALS_KEYS = ("llama_4_scaling_beta", "max_position_embeddings")


def _with_window(read: ConfigReader, attention: Attention) -> Attention:
    """Returns attention with the window of config.json, which all layers have; null means none."""
    window = read.config.get("sliding_window")
    return attention if window is None else replace(attention, window=read.integer("sliding_window"))

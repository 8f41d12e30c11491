"""Llama, Mistral, Qwen and Mixtral: attention by query groups, and in every layer an MLP or the same number of experts.

transformers 5 stacks experts in memory, under names of its own (sides/checkpoint.py). It saves them one by one,
under the names of published checkpoints. This module uses the published names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megagrpo.errors import Problem
from megagrpo.weights.families.architecture import Architecture, Layer
from megagrpo.weights.families.parts.attention import Attention
from megagrpo.weights.families.reading import ConfigReader


def _alike(read: ConfigReader, *, bias: bool = False, norm: bool = False) -> Architecture:
    """Returns a model whose layers are all alike, with MLPs."""
    return read.model([Layer(read.attention(bias=bias, norm=norm), read.mlp())] * read.layers)


def llama(config: Mapping[str, Any]) -> Architecture:
    """Reads Llama 2 and 3.x (`LlamaForCausalLM`): no biases, rotary embedding with or without llama3 scaling."""
    read = ConfigReader(config)
    read.refuse_if_set("attention_bias", "mlp_bias")
    return _alike(read)


def mistral(config: Mapping[str, Any]) -> Architecture:
    """Reads Mistral (`MistralForCausalLM`): llama, with sliding windows (refused) unless sliding_window is null."""
    read = ConfigReader(config, num_key_value_heads=8, sliding_window=4096)
    if read.config.get("sliding_window") is not None:
        given = config.get("sliding_window", "absent, which means 4096")
        read.refuse("sliding_window", given, "null: sliding windows are not supported")
    return _alike(read)


def qwen2(config: Mapping[str, Any]) -> Architecture:
    """Reads Qwen2 and Qwen2.5 (`Qwen2ForCausalLM`): biases on q, k and v. The small models tie their embeddings."""
    return _alike(ConfigReader(config, num_key_value_heads=32), bias=True)


def qwen3(config: Mapping[str, Any]) -> Architecture:
    """Reads Qwen3 (`Qwen3ForCausalLM`): RMSNorm on each query and key head, a head_dim of its own, no biases."""
    read = ConfigReader(config, num_key_value_heads=32, head_dim=128)
    read.refuse_if_set("attention_bias")
    return _alike(read, norm=True)


def qwen3_moe(config: Mapping[str, Any]) -> Architecture:
    """Reads Qwen3 (`Qwen3MoeForCausalLM`): the dense model's attention, with experts in place of every MLP."""
    read = ConfigReader(config, num_key_value_heads=4)
    read.refuse_if_set("attention_bias")
    every_layer = "experts in every layer: mixed dense and sparse layers are not supported"
    if layers := read.config.get("mlp_only_layers"):
        read.refuse("mlp_only_layers", layers, every_layer)
    if (step := read.config.get("decoder_sparse_step", 1)) != 1:
        read.refuse("decoder_sparse_step", step, every_layer)
    read.integer("intermediate_size")
    experts = read.experts(ffn="moe_intermediate_size", normalize_top_k=read.flag("norm_topk_prob"))
    return read.model([Layer(read.attention(norm=True), experts)] * read.layers)


def mixtral(config: Mapping[str, Any]) -> Architecture:
    """Reads Mixtral (`MixtralForCausalLM`): llama's attention, and experts instead of an MLP in every layer."""
    read = ConfigReader(config, default_theta=1e6, num_key_value_heads=8, rms_norm_eps=1e-5)
    read.refuse_if_set("sliding_window", "router_jitter_noise")
    experts = read.experts(ffn="intermediate_size", normalize_top_k=True)
    return read.model([Layer(read.attention(), experts)] * read.layers)


MIXTRAL_NAMES = (
    (".mlp.", ".block_sparse_moe."), (".gate_proj.", ".w1."), (".up_proj.", ".w3."), (".down_proj.", ".w2.")
)  # fmt: skip


def ignored_by_sglangs_mixtral(arch: Architecture) -> Iterator[Problem]:
    """Yields a problem for each config value that SGLang's class ignores."""
    rules = [("tied embeddings", arch.tied_embeddings, "embeddings that are not tied")]
    for attention in {layer.attention for layer in arch.kinds}:
        if isinstance(attention, Attention):
            scaled, other = attention.rope.factor is not None, attention.queries != arch.hidden
            rules.append(("scaled rotary embedding", scaled, "a rotary embedding without scaling"))
            rules.append(("head_dim", other, "hidden_size / num_attention_heads"))
    for what, wrong, needed in rules:
        if wrong:
            yield Problem(f"{arch.family} on SGLang: {what}", "", needed)

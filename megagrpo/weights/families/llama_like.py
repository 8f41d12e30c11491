"""Llama, Mistral, Qwen and Mixtral: attention by query groups, and in every layer an MLP or the same number of experts.

transformers 5 stacks experts in memory, under names of its own (sides/checkpoint.py). It saves them one by one,
under the names of published checkpoints. This module uses the published names.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from megagrpo.weights.families.architecture import Architecture, Experts, decoder_tensors, feed_forward
from megagrpo.weights.families.reading import EXPERTS_MAX, ConfigReader


def llama(config: Mapping[str, Any]) -> Architecture:
    """Reads Llama 2 and 3.x (`LlamaForCausalLM`): no biases, rotary embedding with or without llama3 scaling."""
    read = ConfigReader(config)
    read.refuse_if_set("attention_bias", "mlp_bias")
    return read.architecture()


def mistral(config: Mapping[str, Any]) -> Architecture:
    """Reads Mistral (`MistralForCausalLM`): llama, with sliding windows (refused) unless sliding_window is null."""
    read = ConfigReader(config, num_key_value_heads=8, sliding_window=4096)
    if read.config.get("sliding_window") is not None:
        given = config.get("sliding_window", "absent, which means 4096")
        read.refuse("sliding_window", given, "null: sliding windows are not supported")
    return read.architecture()


def qwen2(config: Mapping[str, Any]) -> Architecture:
    """Reads Qwen2 and Qwen2.5 (`Qwen2ForCausalLM`): biases on q, k and v. The small models tie their embeddings."""
    return ConfigReader(config, num_key_value_heads=32).architecture(qkv_bias=True)


def qwen3(config: Mapping[str, Any]) -> Architecture:
    """Reads Qwen3 (`Qwen3ForCausalLM`): RMSNorm on each query and key head, a head_dim of its own, no biases."""
    read = ConfigReader(config, num_key_value_heads=32, head_dim=128)
    read.refuse_if_set("attention_bias")
    return read.architecture(qk_norm=True)


def qwen3_moe(config: Mapping[str, Any]) -> Architecture:
    """Reads Qwen3 (`Qwen3MoeForCausalLM`): the dense model's attention, with experts in place of every MLP."""
    read = ConfigReader(config, num_key_value_heads=4)
    read.refuse_if_set("attention_bias")
    every_layer = "experts in every layer: mixed dense and sparse layers are not supported"
    if layers := read.config.get("mlp_only_layers"):
        read.refuse("mlp_only_layers", layers, every_layer)
    if (step := read.config.get("decoder_sparse_step", 1)) != 1:
        read.refuse("decoder_sparse_step", step, every_layer)
    experts = Experts(
        count=read.integer("num_local_experts", "num_experts", most=EXPERTS_MAX),
        per_token=read.integer("num_experts_per_tok"),
        ffn=read.integer("moe_intermediate_size"),
        normalize_top_k=read.flag("norm_topk_prob"),
    )
    return read.architecture(qk_norm=True, experts=experts)


def mixtral(config: Mapping[str, Any]) -> Architecture:
    """Reads Mixtral (`MixtralForCausalLM`): llama's attention, and experts instead of an MLP in every layer."""
    read = ConfigReader(config, default_theta=1e6, num_key_value_heads=8, rms_norm_eps=1e-5)
    read.refuse_if_set("sliding_window", "router_jitter_noise")
    experts = Experts(
        count=read.integer("num_local_experts", "num_experts", most=EXPERTS_MAX),
        per_token=read.integer("num_experts_per_tok"),
        ffn=read.integer("intermediate_size"),
        normalize_top_k=True,
    )
    return read.architecture(experts=experts)


mixtral_tensors = partial(
    decoder_tensors, mlp=partial(feed_forward, module="block_sparse_moe", gate="w1", up="w3", down="w2")
)

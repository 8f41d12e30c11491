"""Qwen2, Qwen2.5 and Qwen3, dense and with a mixture of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megagrpo.weights.families.architecture import Architecture, Experts, Tensor
from megagrpo.weights.families.decoder import decoder_tensors, routed_experts
from megagrpo.weights.families.reading import ConfigReader


def qwen2(config: Mapping[str, Any]) -> Architecture:
    """Qwen2 and Qwen2.5 (`Qwen2ForCausalLM`): biases on q, k and v. The small models tie their embeddings."""
    return ConfigReader(config).architecture(qkv_bias=True)


def qwen3(config: Mapping[str, Any]) -> Architecture:
    """Qwen3 (`Qwen3ForCausalLM`): RMSNorm on each query and key head, a head_dim of its own, no biases."""
    read = ConfigReader(config)
    read.refuse_if_set("attention_bias")
    return read.architecture(qk_norm=True, default_head_dim=128)


def qwen3_moe(config: Mapping[str, Any]) -> Architecture:
    """Qwen3 (`Qwen3MoeForCausalLM`): the attention of the dense model, and experts instead of an MLP in every layer."""
    read = ConfigReader(config)
    read.refuse_if_set("attention_bias")
    every_layer = "experts in every layer: mixed dense and sparse layers are not supported"
    if config.get("mlp_only_layers"):
        read.refuse("mlp_only_layers", config["mlp_only_layers"], every_layer)
    if config.get("decoder_sparse_step", 1) != 1:
        read.refuse("decoder_sparse_step", config["decoder_sparse_step"], every_layer)
    experts = Experts(
        count=read.integer("num_local_experts", "num_experts"),
        per_token=read.integer("num_experts_per_tok"),
        ffn=read.integer("moe_intermediate_size"),
        normalize_top_k=bool(config.get("norm_topk_prob", False)),
    )
    return read.architecture(qk_norm=True, experts=experts)


def qwen3_moe_tensors(arch: Architecture) -> tuple[Tensor, ...]:
    """The names of published checkpoints, one tensor per expert and projection.

    transformers 5 stacks them in memory (sides/transformers.py) and splits them again when it saves.
    """
    return decoder_tensors(arch, routed_experts)

"""Qwen3 mixture of experts (`Qwen3MoeForCausalLM`): Qwen3's attention, and experts instead of an MLP in every layer.

The coordinates are the keys of published checkpoints, one tensor per expert and projection. transformers 5 stacks them
in memory (sides/transformers.py) and splits them again when it saves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megagrpo.weights.families.architecture import Architecture, Experts, Tensor
from megagrpo.weights.families.decoder import decoder_tensors, routed_experts
from megagrpo.weights.families.reading import ConfigReader


def architecture_of(config: Mapping[str, Any]) -> Architecture:
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
    read.refuse_too_many_per_token(experts)
    return read.architecture(qk_norm=True, experts=experts)


def tensors_of(arch: Architecture) -> tuple[Tensor, ...]:
    return decoder_tensors(arch, _experts)


def _experts(arch: Architecture, layer: int) -> Iterator[Tensor]:
    return routed_experts(arch, layer, "mlp", "gate_proj", "up_proj", "down_proj")

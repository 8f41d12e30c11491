"""Mixtral (`MixtralForCausalLM`): llama's attention, and experts instead of an MLP in every layer.

Published checkpoints call the experts block_sparse_moe, and their gate, up and down projections w1, w3 and w2.
transformers 5 has its own names in memory (sides/transformers.py) and writes these names when it saves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megagrpo.weights.families.architecture import Architecture, Experts, Tensor
from megagrpo.weights.families.decoder import decoder_tensors, routed_experts
from megagrpo.weights.families.reading import ConfigReader


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    read = ConfigReader(config, default_theta=1e6)
    read.refuse_if_set("sliding_window", "router_jitter_noise")
    experts = Experts(
        count=read.integer("num_local_experts", "num_experts"),
        per_token=read.integer("num_experts_per_tok"),
        ffn=read.integer("intermediate_size"),
        normalize_top_k=True,
    )
    return read.architecture(experts=experts)


def tensors_of(arch: Architecture) -> tuple[Tensor, ...]:
    def experts(arch: Architecture, layer: int) -> Iterator[Tensor]:
        return routed_experts(arch, layer, "block_sparse_moe", gate="w1", up="w3", down="w2")

    return decoder_tensors(arch, experts)

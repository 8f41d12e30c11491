"""Qwen3 dense (`Qwen3ForCausalLM`): RMSNorm on each query and key head, head_dim of its own, no biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megagrpo.weights.families.architecture import Architecture, Tensor
from megagrpo.weights.families.decoder import decoder_tensors, gated_mlp
from megagrpo.weights.families.reading import ConfigReader


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    read = ConfigReader(config)
    read.refuse_if_set("attention_bias")
    return read.architecture(qk_norm=True, default_head_dim=128)


def tensors_of(arch: Architecture) -> tuple[Tensor, ...]:
    return decoder_tensors(arch, gated_mlp)

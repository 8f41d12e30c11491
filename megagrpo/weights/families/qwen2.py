"""Qwen2 and Qwen2.5 (`Qwen2ForCausalLM`): biases on q, k and v; the small ones tie their embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megagrpo.weights.families.architecture import Architecture, Tensor
from megagrpo.weights.families.decoder import decoder_tensors, gated_mlp
from megagrpo.weights.families.reading import ConfigReader


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    return ConfigReader(config).architecture(qkv_bias=True)


def tensors_of(arch: Architecture) -> tuple[Tensor, ...]:
    return decoder_tensors(arch, gated_mlp)

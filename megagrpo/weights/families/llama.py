"""Llama 2 and 3.x (`LlamaForCausalLM`): no biases, rotary embedding with or without llama3 scaling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.families.reading import ConfigReader


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    read = ConfigReader(config)
    read.refuse_if_set("attention_bias", "mlp_bias")
    return read.architecture()

"""GLM-4-0414: norms before a part and after it, and fused MLPs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.families.reading import ConfigReader

NAMES = (
    ("attention_output_layernorm", "post_self_attn_layernorm"), ("mlp_output_layernorm", "post_mlp_layernorm")
)  # fmt: skip


def glm4(config: Mapping[str, Any]) -> Architecture:
    """Reads GLM-4-0414 (`Glm4ForCausalLM`): half of each head is rotated, in neighbouring pairs."""
    read = ConfigReader(config, num_key_value_heads=2, head_dim=128, rms_norm_eps=1.5625e-07)
    bias = read.flag("attention_bias", default=True)
    attention = read.attention(bias=bias, rope=read.rope(part=0.5, pairs=True))
    return read.model([read.layer(attention, read.mlp(), outputs=True)] * read.layers)

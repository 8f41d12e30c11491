"""OLMo 2 and 3, and EXAONE 4: norms of what a part adds, none before it, and norms of queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.families.reading import ConfigReader

NAMES = (
    ("attention_output_layernorm", "post_attention_layernorm"), ("mlp_output_layernorm", "post_feedforward_layernorm")
)  # fmt: skip


OLMO3_THETA = 5e5


def olmo2(config: Mapping[str, Any]) -> Architecture:
    """Reads OLMo 2 (`Olmo2ForCausalLM`)."""
    read = ConfigReader(config, rms_norm_eps=1e-5)
    read.refuse_if_set("attention_bias")
    layer = read.layer(read.attention(norm="projection"), read.mlp(), inputs=False, outputs=True)
    return read.model([layer] * read.layers)


def olmo3(config: Mapping[str, Any]) -> Architecture:
    """Reads OLMo 3 (`Olmo3ForCausalLM`): three of four layers have a window; yarn scales the others."""
    read = ConfigReader(config, OLMO3_THETA, rms_norm_eps=1e-5, sliding_window=4096)
    read.refuse_if_set("attention_bias")
    if not read.config.get("rope_parameters") and read.number("rope_theta", OLMO3_THETA) != OLMO3_THETA:
        needed = f"{OLMO3_THETA:g}, or rope_parameters: transformers gives layers with windows no other theta"
        read.refuse("rope_theta", read.config["rope_theta"], needed)
    full = read.attention(norm="projection", rope=read.rope("yarn", kind="full_attention"))
    local = replace(full, rope=read.rope("yarn", kind="sliding_attention"))
    attentions, mlp = read.windowed(full, lambda layer: (layer + 1) % 4 != 0, local), read.mlp()
    return read.model([read.layer(attention, mlp, inputs=False, outputs=True) for attention in attentions])


def exaone4(config: Mapping[str, Any]) -> Architecture:
    """Reads EXAONE 4 (`Exaone4ForCausalLM`): norms of each head; no rotary embedding in layers without a window, if
    others have one."""
    read = ConfigReader(
        config, num_key_value_heads=32, rms_norm_eps=1e-5, sliding_window=4096, sliding_window_pattern=4
    )
    full, pattern = read.attention(norm="head"), read.config.get("sliding_window_pattern")
    if read.config.get("sliding_window") is None:
        attentions = read.windowed(full, lambda layer: False)
    else:
        step = len(pattern) if isinstance(pattern, str) else read.integer("sliding_window_pattern", default=4)
        attentions = read.windowed(replace(full, rope=None), lambda layer: (layer + 1) % step != 0, local=full)
    mlp = read.mlp()
    return read.model([read.layer(attention, mlp, inputs=False, outputs=True) for attention in attentions])

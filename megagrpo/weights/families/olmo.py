"""OLMo 2 and 3, and EXAONE 4: norms of what a part adds, none before it, and norms of queries and keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from megagrpo.errors import Problem
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.families.parts.attention import Attention
from megagrpo.weights.families.reading import ConfigReader

NAMES = (
    ("attention_output_layernorm", "post_attention_layernorm"), ("mlp_output_layernorm", "post_feedforward_layernorm")
)  # fmt: skip


def olmo2(config: Mapping[str, Any]) -> Architecture:
    """Reads OLMo 2 (`Olmo2ForCausalLM`)."""
    read = ConfigReader(config, rms_norm_eps=1e-5)
    read.refuse_if_set("attention_bias")
    layer = read.layer(read.attention(norm="projection"), read.mlp(), inputs=False, outputs=True)
    return read.model([layer] * read.layers)


def olmo3(config: Mapping[str, Any]) -> Architecture:
    """Reads OLMo 3 (`Olmo3ForCausalLM`): three of four layers have a window; yarn scales the others."""
    read = ConfigReader(config, 5e5, rms_norm_eps=1e-5, sliding_window=4096)
    read.refuse_if_set("attention_bias")
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


def ignored_by_sglangs_exaone4(arch: Architecture) -> Iterator[Problem]:
    """Yields a problem for a head_dim of its own, in whose place SGLang's class takes another one."""
    for attention in {layer.attention for layer in arch.kinds}:
        if isinstance(attention, Attention) and attention.queries != arch.hidden:
            yield Problem(
                f"{arch.family} on SGLang: head_dim", f"{attention.head_dim}", "hidden_size / num_attention_heads"
            )

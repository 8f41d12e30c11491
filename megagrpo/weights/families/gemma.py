"""Gemma 2 and 3: norms before a part and after it, all zero-centred, windows, and a scaled embedding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.families.parts.attention import Attention
from megagrpo.weights.families.reading import ConfigReader

NAMES = (
    ("post_attention_layernorm", "pre_feedforward_layernorm"),
    ("attention_output_layernorm", "post_attention_layernorm"),
    ("mlp_output_layernorm", "post_feedforward_layernorm"),
)  # fmt: skip


def gemma2(config: Mapping[str, Any]) -> Architecture:
    """Reads Gemma 2 (`Gemma2ForCausalLM`): every other layer with a window, and caps of scores and logits."""
    read = ConfigReader(config, **DEFAULTS)
    cap = read.optional("attn_logit_softcapping", 50.0)
    full = read.attention(scale=_scale(read), score_cap=cap)
    attentions = read.windowed(full, lambda layer: layer % 2 == 0)
    return _model(read, attentions, read.optional("final_logit_softcapping", 30.0))


def gemma3(config: Mapping[str, Any]) -> Architecture:
    """Reads Gemma 3 (`Gemma3ForCausalLM`): windows in five of six layers, with a rotary embedding of their own."""
    read = ConfigReader(config, 1e6, **DEFAULTS, **GEMMA3_DEFAULTS)
    read.refuse_if_set("attn_logit_softcapping")  # transformers knows it and ignores it
    full = read.attention(norm="head", scale=_scale(read), rope=read.rope("linear", kind="full_attention"))
    theta = read.number("rope_local_base_freq", 1e4)
    local = replace(full, rope=read.rope("linear", kind="sliding_attention", theta=theta))
    step = read.integer("sliding_window_pattern", default=6)
    attentions = read.windowed(full, lambda layer: (layer + 1) % step != 0, local)
    return _model(read, attentions, read.optional("final_logit_softcapping"))


DEFAULTS = {"num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096, "tie_word_embeddings": True}
GEMMA3_DEFAULTS = {
    "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "max_position_embeddings": 131072,
}  # fmt: skip
"""Published files of the larger models leave out most of them."""


def _scale(read: ConfigReader) -> float:
    return read.number("query_pre_attn_scalar", 256) ** -0.5


def _model(read: ConfigReader, attentions: list[Attention], logit_cap: float | None) -> Architecture:
    read.refuse_if_set("attention_bias", "use_bidirectional_attention")
    read.ignore("hidden_act")  # an older key, which transformers does not read; SGLang demands it
    mlp = read.mlp("gelu_tanh", "hidden_activation")
    model = read.model([read.layer(attention, mlp, outputs=True) for attention in attentions])
    scale = model.hidden**0.5
    return replace(model, zero_centred_norms=True, embedding_scale=scale, logit_cap=logit_cap)

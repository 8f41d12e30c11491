"""MiniMax M2: grouped attention with norms over all heads, and DeepSeek-V3's router without groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.families.parts.experts import SigmoidRouter
from megagrpo.weights.families.reading import ConfigReader

NAMES = (
    (".mlp.gate.e_score", ".mlp.e_score"), (".mlp.", ".block_sparse_moe."), (".gate_proj.", ".w1."),
    (".up_proj.", ".w3."), (".down_proj.", ".w2."),
)  # fmt: skip
USUAL = {"qk_norm_type": "per_layer", "scoring_func": "sigmoid", "use_qk_norm": True, "use_routing_bias": True}
"""Keys of published configs. transformers does not read them; SGLang does."""
FACTORS = dict.fromkeys(("layernorm_full_attention_beta", "layernorm_linear_attention_beta", "layernorm_mlp_beta"), 1.0)
"""Factors of residuals in the configs of MiniMax M1. No code of M2 has them."""


def minimax_m2(config: Mapping[str, Any]) -> Architecture:
    """Reads MiniMax M2 (`MiniMaxM2ForCausalLM`)."""
    read = ConfigReader(config, 5e6, num_key_value_heads=8, head_dim=128)
    read.refuse_if_set("router_jitter_noise", "shared_intermediate_size")
    read.ignore("shared_moe_mode", "mlp_intermediate_size", "swa_rope_theta")  # of MLPs and windows, which none has
    read.require(**USUAL, **FACTORS)
    if any(kind != 1 for kind in read.config.get("attn_type_list") or []):
        read.refuse("attn_type_list", read.config["attn_type_list"], "1 everywhere: softmax attention")
    rotated = read.config.get("rotary_dim")
    head_dim = read.integer("head_dim")
    part = 1.0 if rotated is None else read.integer("rotary_dim") / head_dim
    attention = read.attention(norm="projection", rope=read.rope(part=part))
    experts = replace(read.experts(ffn="intermediate_size", normalize_top_k=True), router=SigmoidRouter(1, 1, 1.0))
    return read.model([read.layer(attention, experts)] * read.layers)

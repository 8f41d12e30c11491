"""gpt-oss: windows in every other layer, sinks, biases everywhere, experts with a clamped activation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megagrpo.weights.families.architecture import Architecture, Layer
from megagrpo.weights.families.parts.experts import CLAMPED_ALPHA
from megagrpo.weights.families.parts.part import LayerTensors
from megagrpo.weights.families.reading import ConfigReader

if TYPE_CHECKING:
    from megagrpo.weights.sides.assembly import ManifestBuilder

NAMES = ((".mlp.gate.", ".mlp.router."),)
ROPE = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}


def gpt_oss(config: Mapping[str, Any]) -> Architecture:
    """Reads gpt-oss (`GptOssForCausalLM`)."""
    read = ConfigReader(config, 150000.0, head_dim=64, num_key_value_heads=8, rms_norm_eps=1e-5, sliding_window=128)
    read.mxfp4 = True
    read.require(attention_bias=True, swiglu_alpha=CLAMPED_ALPHA)
    read.ignore("experts_per_token", "initial_context_length")  # beside num_experts_per_tok and rope_scaling
    experts = read.experts(ffn="intermediate_size", normalize_top_k=True)
    experts = replace(experts, bias=True, clamp=read.number("swiglu_limit", 7.0))
    full = read.attention(bias=True, output_bias=True, sinks=True, rope=read.rope("yarn", absent=ROPE))
    attentions = read.windowed(full, lambda layer: layer % 2 == 0)
    return read.model([read.layer(attention, experts) for attention in attentions])


def alternating_and_transposed(files: ManifestBuilder, layer: Layer, of: LayerTensors) -> None:
    """Adds the stacked experts: gate_up_proj [experts, hidden, 2 ffn] and its bias [experts, 2 ffn], in which columns
    of gate and up alternate, down_proj [experts, ffn, hidden] and its bias [experts, hidden]."""
    prefix = of.roles["router"].name.removesuffix("router.weight") + "experts."
    for name, roles in (("gate_up_proj", ("expert_gate", "expert_up")), ("down_proj", ("expert_down",))):
        for suffix in ("", "_bias"):
            tensors = [[expert[role + suffix] for role in roles] for expert in of.experts]
            files.alternating(prefix + name + suffix, tensors, transposed=True)

"""gpt-oss: windows in every other layer, sinks, biases everywhere, experts with a clamped activation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megagrpo.weights.boxes import Placement, Storage
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.families.parts.experts import CLAMPED_ALPHA
from megagrpo.weights.families.reading import ConfigReader

if TYPE_CHECKING:
    from megagrpo.weights.families.architecture import Layer
    from megagrpo.weights.families.parts.part import LayerTensors
    from megagrpo.weights.sides.assembly import ManifestBuilder

NAMES = ((".mlp.gate.", ".mlp.router."),)
ROPE = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}


def gpt_oss(config: Mapping[str, Any]) -> Architecture:
    """Reads gpt-oss (`GptOssForCausalLM`)."""
    read = ConfigReader(config, 150000.0, head_dim=64, num_key_value_heads=8, rms_norm_eps=1e-5, sliding_window=128)
    read.mxfp4 = True
    if read.flag("attention_bias", default=True) is False:
        read.refuse("attention_bias", False, "true")
    if (alpha := read.number("swiglu_alpha", CLAMPED_ALPHA)) != CLAMPED_ALPHA:
        read.refuse("swiglu_alpha", alpha, str(CLAMPED_ALPHA))
    # num_experts_per_tok and rope_scaling are beside them
    read.config.known |= {"experts_per_token", "initial_context_length"}
    experts = read.experts(ffn="intermediate_size", normalize_top_k=True)
    experts = replace(experts, bias=True, clamp=read.number("swiglu_limit", 7.0))
    full = read.attention(bias=True, output_bias=True, sinks=True, rope=read.rope("yarn", absent=ROPE))
    attentions = read.windowed(full, lambda layer: layer % 2 == 0)
    return read.model([read.layer(attention, experts) for attention in attentions])


def alternating_and_transposed(files: ManifestBuilder, layer: Layer, of: LayerTensors) -> None:
    """Adds the stacked experts: gate_up_proj [experts, hidden, 2 ffn] and its bias [experts, 2 ffn], in which columns
    of gate and up alternate, down_proj [experts, ffn, hidden] and its bias [experts, hidden]."""
    count, (ffn, hidden) = len(of.experts), of.experts[0]["expert_up"].shape
    prefix, pair = of.roles["router"].name.removesuffix("router.weight") + "experts.", ("expert_gate", "expert_up")
    for name, suffix, rest, axes in (
        ("gate_up_proj", "", (hidden, ffn), (1, 0)), ("gate_up_proj_bias", "_bias", (ffn,), (0,))
    ):  # fmt: skip
        storage = Storage(prefix + name, (count, *rest, 2), "float32", folded=1)
        places = (
            Placement(storage.name, (expert, *(0 for _ in rest), column), (None, *axes, None), roles[role + suffix].box)
            for expert, roles in enumerate(of.experts)
            for column, role in enumerate(pair)
        )
        files.placed(storage, places)
    for name, role, shape, axes in (
        ("down_proj", "expert_down", (ffn, hidden), (1, 0)), ("down_proj_bias", "expert_down_bias", (hidden,), (0,))
    ):  # fmt: skip
        storage = Storage(prefix + name, (count, *shape), "float32")
        places = (
            Placement(storage.name, (expert, *(0 for _ in shape)), (None, *axes), roles[role].box)
            for expert, roles in enumerate(of.experts)
        )
        files.placed(storage, places)

"""ERNIE 4.5 with experts: softmax scores with a bias that only their choice sees, shared experts, some layers dense."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megagrpo.weights.families.architecture import Architecture, Layer
from megagrpo.weights.families.parts.experts import SoftmaxRouter
from megagrpo.weights.families.parts.part import LayerTensors, all_rows
from megagrpo.weights.families.reading import EXPERTS_MAX, ConfigReader

if TYPE_CHECKING:
    from megagrpo.weights.sides.assembly import ManifestBuilder

NAMES = ((".mlp.gate.e_score", ".mlp.moe_statics.e_score"),)
LOADED = ((".mlp.moe_statics.", ".mlp.gate.moe_statics."),)
LEAST_SUM = 1e-12
"""The least divisor of normalised weights. The largest scores of a token add up to more."""


def ernie4_5_moe(config: Mapping[str, Any]) -> Architecture:
    """Reads ERNIE 4.5 with experts (`Ernie4_5_MoeForCausalLM`): neighbouring elements are rotated together."""
    read = ConfigReader(
        config, 5e5, num_key_value_heads=4, rms_norm_eps=1e-5, tie_word_embeddings=True, moe_num_shared_experts=2
    )
    read.refuse_if_set("use_bias")
    read.ignore("moe_capacity")  # of training with dropped tokens
    read.require(moe_gate="topk", moe_use_aux_free=True, moe_norm_min=LEAST_SUM)
    counts, per_token = ("moe_num_experts", "num_experts"), ("moe_k", "num_experts_per_tok")
    experts = read.experts(*counts, ffn="moe_intermediate_size", normalize_top_k=True, per_token=per_token)
    shared = 0
    if read.config.get("moe_num_shared_experts") != 0:
        shared = experts.ffn * read.integer("moe_num_shared_experts", most=EXPERTS_MAX)
    experts = replace(experts, router=SoftmaxRouter(), shared_ffn=shared)
    attention, mlp = read.attention(rope=read.rope(pairs=True)), read.mlp()
    return read.model([read.layer(attention, experts if its else mlp) for its in _sparse(read)])


def _sparse(read: ConfigReader) -> list[bool]:
    """Reads the layers with experts: every moe_layer_interval-th from a first to a last one."""
    ends = {"moe_layer_start_index": 1, "moe_layer_end_index": -1}
    for key, usual in ends.items():
        if type(given := read.config.get(key, usual)) is not int:
            read.refuse(key, given, "the number of a layer")
        else:
            ends[key] = given
    first, last = ends.values()
    last, step = read.layers - 1 if last == -1 else last, read.integer("moe_layer_interval", default=1)
    return [first <= layer <= last and (layer + 1) % step == 0 for layer in range(read.layers)]


def bias_as_row(files: ManifestBuilder, layer: Layer, of: LayerTensors) -> None:
    """Adds the bias of the choice of experts, one row."""
    if bias := of.roles.get("router_bias"):
        files.stacked(bias.name, [[all_rows(bias)]], ())

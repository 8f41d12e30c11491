"""A Megatron rank with the transformer-engine layer spec: norms inside the linear layers, experts in grouped ones."""

from __future__ import annotations

from megagrpo.layout.parallel import ParallelLayout, RankCoordinates
from megagrpo.weights.boxes import Manifest
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.sides.megatron_rank import SpecNames, manifest_of_rank

NAMES = SpecNames(
    input_norm="self_attention.linear_qkv.layer_norm_weight",
    latent_input_norm="input_layernorm.weight",
    query_latent_norm="linear_q_up_proj.layer_norm_weight",
    key_value_latent_norm="linear_kv_up_proj.layer_norm_weight",
    post_attention_norm="mlp.linear_fc1.layer_norm_weight",
    pre_experts_norm="pre_mlp_layernorm.weight",
    expert_fc1="mlp.experts.linear_fc1.weight{expert}",
    expert_fc2="mlp.experts.linear_fc2.weight{expert}",
    cuts_latents=False,
)


def manifest(arch: Architecture, layout: ParallelLayout, where: RankCoordinates, dtype: str) -> Manifest:
    """Storages `chunk{c}.{parameter name}`. Raises ModelError if the model cannot be split in this way."""
    return manifest_of_rank(arch, layout, where, dtype, NAMES)

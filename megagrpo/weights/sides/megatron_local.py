"""A Megatron rank with the local layer spec: norms apart from the linear layers, experts one by one (SequentialMLP)."""

from __future__ import annotations

from megagrpo.layout.parallel import ParallelLayout, RankCoordinates
from megagrpo.weights.boxes import Manifest
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.sides.megatron_rank import SpecNames, manifest_of_rank

NAMES = SpecNames(
    input_norm="input_layernorm.weight",
    latent_input_norm="input_layernorm.weight",
    query_latent_norm="q_layernorm.weight",
    key_value_latent_norm="kv_layernorm.weight",
    post_attention_norm="pre_mlp_layernorm.weight",
    pre_experts_norm="pre_mlp_layernorm.weight",
    expert_fc1="mlp.experts.local_experts.{expert}.linear_fc1.weight",
    expert_fc2="mlp.experts.local_experts.{expert}.linear_fc2.weight",
    cuts_latents=True,
)


def manifest(arch: Architecture, layout: ParallelLayout, where: RankCoordinates, dtype: str) -> Manifest:
    """Storages `chunk{c}.{parameter name}`. Raises ModelError if the model cannot be split in this way."""
    return manifest_of_rank(arch, layout, where, dtype, NAMES)

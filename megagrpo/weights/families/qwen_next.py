"""Qwen3-Next, Qwen3.5 and 3.6: gated delta nets, every fourth layer attention with a gate, zero-centred norms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megagrpo.weights.families.architecture import Architecture, Layer
from megagrpo.weights.families.llama_like import experts_beside_shared_one
from megagrpo.weights.families.parts.attention import Attention
from megagrpo.weights.families.parts.delta_net import DeltaNet
from megagrpo.weights.families.parts.experts import Experts
from megagrpo.weights.families.parts.mlp import Mlp
from megagrpo.weights.families.parts.part import LayerTensors, Rows, all_rows
from megagrpo.weights.families.reading import ConfigReader

if TYPE_CHECKING:
    from megagrpo.weights.sides.assembly import ManifestBuilder

MROPE = ("mrope_section", "mrope_interleaved")
"""Keys of rotary embeddings of pictures. Of text, all sections have the same positions."""
SIZES = (
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
    "linear_conv_kernel_dim",
)  # fmt: skip


def qwen3_next(config: Mapping[str, Any]) -> Architecture:
    """Reads Qwen3-Next (`Qwen3NextForCausalLM`), with experts in most layers."""
    read = ConfigReader(config, num_key_value_heads=2, head_dim=256)
    normalize = read.flag("norm_topk_prob", default=True)
    return _model(read, read.some_sparse(experts_beside_shared_one(read, normalize)))


def qwen3_5(config: Mapping[str, Any]) -> Architecture:
    """Reads Qwen3.5 and 3.6 (`Qwen3_5ForCausalLM`), with MLPs."""
    read = ConfigReader(config, num_key_value_heads=4, head_dim=256)
    return _model(read, [read.mlp()] * read.layers)


def qwen3_5_moe(config: Mapping[str, Any]) -> Architecture:
    """Reads Qwen3.5 and 3.6 (`Qwen3_5MoeForCausalLM`), with experts in all layers."""
    read = ConfigReader(config, num_key_value_heads=2, head_dim=256)
    experts = experts_beside_shared_one(read, normalize_top_k=True)
    read.ignore("intermediate_size")  # of no layer
    return _model(read, [experts] * read.layers)


def _model(read: ConfigReader, mlps: list[Mlp | Experts]) -> Architecture:
    read.refuse_if_set("attention_bias")
    read.require(attn_output_gate=True)
    read.ignore("mamba_ssm_dtype")  # the dtype of an engine's states
    rope = read.rope(part=0.25, others=MROPE)
    attention = read.attention(norm="head", gate=True, rope=rope)
    delta = DeltaNet(read.hidden, *map(read.integer, SIZES))
    step = read.integer("full_attention_interval", default=4)
    kinds: dict[str, Attention | DeltaNet] = {"linear_attention": delta, "full_attention": attention}
    mixers = read.by_kind("layer_types", kinds, lambda layer: NAMES_OF_KINDS[(layer + 1) % step == 0])
    layers = [read.layer(mixer, mlp) for mixer, mlp in zip(mixers, mlps, strict=True)]
    return replace(read.model(layers), zero_centred_norms=True)


NAMES_OF_KINDS = ("linear_attention", "full_attention")


# --- files ------------------------------------------------------------------------------------------------------------


def fused_by_head(files: ManifestBuilder, layer: Layer, of: LayerTensors) -> None:
    """Adds Qwen3-Next's fused projections: q_proj by head, in_proj_qkvz and in_proj_ba by key head."""
    part = layer.attention
    if isinstance(part, DeltaNet):
        values, at = part.value_heads // part.key_heads, _prefix(of, "delta_q", "in_proj_q.weight")
        counts = {"q": part.key_dim, "k": part.key_dim, "v": values * part.value_dim, "z": values * part.value_dim}
        _by_head(files, at + "in_proj_qkvz.weight", of, counts, part.key_heads)
        _by_head(files, at + "in_proj_ba.weight", of, {"b": values, "a": values}, part.key_heads)
    _shared(files, layer, of)


def fused_whole(files: ManifestBuilder, layer: Layer, of: LayerTensors) -> None:
    """Adds Qwen3.5's fused projections: q_proj by head, in_proj_qkv whole."""
    part = layer.attention
    if isinstance(part, DeltaNet):
        rows = [all_rows(of.roles[f"delta_{name}"]) for name in "qkv"]
        files.rows(_prefix(of, "delta_q", "in_proj_q.weight") + "in_proj_qkv.weight", rows, (part.hidden,))
    _shared(files, layer, of)


def _shared(files: ManifestBuilder, layer: Layer, of: LayerTensors) -> None:
    """Adds the tensors that both fuse in the same way: the convolution, or queries with their gates by head."""
    part = layer.attention
    if isinstance(part, DeltaNet):
        rows = [all_rows(of.roles[f"conv_{name}"]) for name in "qkv"]
        files.rows(_prefix(of, "conv_q", "conv_q.weight") + "conv1d.weight", rows, (1, part.kernel))
    elif isinstance(part, Attention):
        dim = part.head_dim
        rows = [Rows(of.roles[role], head * dim, dim) for head in range(part.heads) for role in ("q", "attention_gate")]
        files.rows(of.roles["q"].name, rows, (part.hidden,))


def _by_head(files: ManifestBuilder, name: str, of: LayerTensors, counts: Mapping[str, int], heads: int) -> None:
    rows = [
        Rows(of.roles[f"delta_{part}"], head * count, count) for head in range(heads) for part, count in counts.items()
    ]
    files.rows(name, rows, of.roles["delta_q"].shape[1:])


def _prefix(of: LayerTensors, role: str, name: str) -> str:
    return of.roles[role].name.removesuffix(name)

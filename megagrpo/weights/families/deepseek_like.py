"""DeepSeek-V3's experts: sigmoid scores, first layers dense, shared experts; with latent attention, or query groups.
MiniMax M2 has its router alone.

Published checkpoints also hold layers for multi-token prediction (num_nextn_predict_layers) after the model's own.
No side holds them; `extra_tensors` in sides/checkpoint.py lists them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.families.parts.attention import Attention
from megagrpo.weights.families.parts.experts import Experts, SigmoidRouter
from megagrpo.weights.families.parts.latent_attention import LatentAttention
from megagrpo.weights.families.parts.mlp import Mlp
from megagrpo.weights.families.reading import EXPERTS_MAX, ConfigReader


def deepseek_v3(config: Mapping[str, Any]) -> Architecture:
    """Reads DeepSeek-V3 and R1, Moonlight (`DeepseekV3ForCausalLM`) and Kimi K2, which has its tensors."""
    read = ConfigReader(config, num_key_value_heads=128, q_lora_rank=1536)
    return _model(read, _latent_attention(read), dense=3)


def glm4_moe_lite(config: Mapping[str, Any]) -> Architecture:
    """Reads GLM-4.7-Flash (`Glm4MoeLiteForCausalLM`): DeepSeek-V3's parts; its layers may be listed by kind."""
    read = ConfigReader(config, num_key_value_heads=20, q_lora_rank=768, rms_norm_eps=1e-5)
    return _model(read, _latent_attention(read), dense=1, listed="mlp_layer_types")


def glm4_moe(config: Mapping[str, Any]) -> Architecture:
    """Reads GLM-4.5 to 4.7 (`Glm4MoeForCausalLM`): grouped attention, of which half of a head is rotated."""
    read = ConfigReader(config, num_key_value_heads=8, rms_norm_eps=1e-5, routed_scaling_factor=1.0)
    norm: Any = "head" if read.flag("use_qk_norm") else None
    attention = read.attention(bias=read.flag("attention_bias"), norm=norm, rope=read.rope(part=0.5))
    return _model(read, [attention] * read.layers, dense=1)


def dots1(config: Mapping[str, Any]) -> Architecture:
    """Reads dots.llm1 (`Dots1ForCausalLM`): grouped attention with norms of each head."""
    read = ConfigReader(
        config,
        num_key_value_heads=32,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.0,
        norm_topk_prob=False,
        sliding_window=4096,
    )
    read.refuse_if_set("attention_bias")
    first = read.integer("max_window_layers", default=62)
    windows = read.config.get("sliding_window") is not None
    return _model(read, read.windowed(read.attention(norm="head"), lambda layer: windows and layer >= first), dense=0)


def ling(config: Mapping[str, Any]) -> Architecture:
    """Reads Ling 2 and Ring 2 (`BailingMoeV2ForCausalLM`): GLM-4.5's parts, with keys of their own."""
    read = ConfigReader(config, 6e5, rms_norm_eps=1e-6, moe_router_enable_expert_bias=False, use_qk_norm=False)
    read.refuse_if_set("use_bias", "use_qkv_bias", "norm_head")
    read.ignore("max_window_layers")  # no layer has a window
    read.require(use_qk_norm=True, moe_router_enable_expert_bias=True)
    read.require(score_function="sigmoid", router_dtype="fp32", use_rmsnorm=True)
    ffn, shared = read.integer("moe_intermediate_size"), "moe_shared_expert_intermediate_size"
    if read.integer(shared, default=ffn) != ffn:
        read.refuse(shared, read.config[shared], f"moe_intermediate_size = {ffn}: the size of one")
    head_dim = read.integer("head_dim", default=read.hidden // read.integer("num_attention_heads"))
    rotated = read.integer("rotary_dim", default=head_dim)
    part = read.number("partial_rotary_factor", rotated / head_dim)
    if read.config.get("rotary_dim") is not None and rotated != part * head_dim:
        read.refuse("rotary_dim", rotated, f"partial_rotary_factor x head_dim = {part * head_dim:g}")
    attention = read.attention(norm="head", rope=read.rope(part=part))
    experts = _experts(read, "num_experts", shared="num_shared_experts")
    return _model(read, [attention] * read.layers, dense=0, experts=experts)


LINGS_NAMES = (
    (".self_attn.", ".attention."), (".o_proj.", ".dense."), (".q_norm.", ".query_layernorm."),
    (".k_norm.", ".key_layernorm."), (".embed_tokens.", ".word_embeddings."),
    (".e_score_correction_bias", ".expert_bias"),
)  # fmt: skip


def minimax_m2(config: Mapping[str, Any]) -> Architecture:
    """Reads MiniMax M2 (`MiniMaxM2ForCausalLM`): norms over all heads, a router without groups, and no dense layer."""
    read = ConfigReader(config, 5e6, num_key_value_heads=8, head_dim=128)
    read.refuse_if_set("router_jitter_noise", "shared_intermediate_size")
    read.ignore("shared_moe_mode", "mlp_intermediate_size", "swa_rope_theta")  # of MLPs and windows, which none has
    read.require(**MINIMAX_USUAL, **MINIMAX_FACTORS)
    if any(kind != 1 for kind in read.config.get("attn_type_list") or []):
        read.refuse("attn_type_list", read.config["attn_type_list"], "1 everywhere: softmax attention")
    head_dim = read.integer("head_dim")
    part = read.integer("rotary_dim", default=head_dim) / head_dim
    attention = read.attention(norm="projection", rope=read.rope(part=part))
    experts = replace(read.experts(ffn="intermediate_size", normalize_top_k=True), router=SigmoidRouter(1, 1, 1.0))
    return read.model([read.layer(attention, experts)] * read.layers)


MINIMAX_NAMES = (
    (".mlp.gate.e_score", ".mlp.e_score"), (".mlp.", ".block_sparse_moe."), (".gate_proj.", ".w1."),
    (".up_proj.", ".w3."), (".down_proj.", ".w2."),
)  # fmt: skip
MINIMAX_USUAL = {"qk_norm_type": "per_layer", "scoring_func": "sigmoid", "use_qk_norm": True, "use_routing_bias": True}
"""Keys of published configs. transformers does not read them; SGLang does."""
MINIMAX_FACTORS = {f"layernorm_{part}_beta": 1.0 for part in ("full_attention", "linear_attention", "mlp")}
"""Factors of residuals in the configs of MiniMax M1. No code of M2 has them."""


def _model(
    read: ConfigReader,
    attention: LatentAttention | list[Attention],
    dense: int,
    listed: str = "",
    experts: Experts | None = None,
) -> Architecture:
    """Returns a model whose first layers have MLPs, `dense` by default, and all others experts. The config's key
    `listed` may list each layer's kind."""
    first = _dense_layers(read, dense)
    kinds: dict[str, Mlp | Experts] = {"dense": read.mlp(), "sparse": experts or _experts(read)}
    mlps = read.by_kind(listed, kinds, lambda layer: "dense" if layer < first else "sparse")
    attentions: Sequence[Attention | LatentAttention]
    attentions = [attention] * read.layers if isinstance(attention, LatentAttention) else attention
    return read.model([read.layer(one, mlp) for one, mlp in zip(attentions, mlps, strict=True)])


def _latent_attention(read: ConfigReader) -> LatentAttention:
    config = read.config
    read.ignore("qk_head_dim")  # it follows from other sizes
    if config.get("head_dim") not in (None, config.get("qk_rope_head_dim")):
        read.refuse("head_dim", config["head_dim"], "qk_rope_head_dim, or no such key")
    read.refuse_if_set("attention_bias")
    if config.get("rope_interleave", True) is not True:
        read.refuse("rope_interleave", config["rope_interleave"], "true: rotary elements in pairs of neighbours")
    heads = read.integer("num_attention_heads")
    if config.get("num_key_value_heads") not in (None, heads):
        read.refuse("num_key_value_heads", config["num_key_value_heads"], f"num_attention_heads = {heads}")
    rope = read.rope("yarn")
    if rope.yarn is not None and (rope.yarn.magnitude is not None or not rope.yarn.truncate):
        read.refuse("attention_factor or truncate", rope.yarn, "absent: Megatron's latent attention has its own")
    return LatentAttention(
        hidden=read.hidden,
        heads=heads,
        query_rank=None if config.get("q_lora_rank") is None else read.integer("q_lora_rank"),
        key_value_rank=read.integer("kv_lora_rank"),
        plain_dim=read.integer("qk_nope_head_dim"),
        rotary_dim=read.integer("qk_rope_head_dim"),
        value_dim=read.integer("v_head_dim"),
        rope=rope,
    )


def _dense_layers(read: ConfigReader, usual: int) -> int:
    layers, dense = read.layers, read.config.get("first_k_dense_replace", usual)
    if isinstance(dense, int) and 0 <= dense < layers:
        return dense
    read.refuse("first_k_dense_replace", dense, f"a number of layers below num_hidden_layers = {layers}")
    return 0


def _experts(read: ConfigReader, *counts: str, shared: str = "n_shared_experts") -> Experts:
    read.require(scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)
    if not read.flag("norm_topk_prob", default=True):
        read.refuse("norm_topk_prob", False, "true: weights of the chosen experts that add up to 1")
    counts = counts or ("n_routed_experts", "num_local_experts")
    experts = read.experts(*counts, ffn="moe_intermediate_size", normalize_top_k=True)
    groups, groups_per_token = read.integer("n_group"), read.integer("topk_group")
    if groups != groups_per_token:
        if experts.experts % groups or groups_per_token > groups:
            read.refuse("n_group", groups, f"a divisor of {counts[0]} = {experts.experts}, at least topk_group")
        elif experts.per_token != 2 * groups_per_token:
            # Megatron scores a group by per_token / groups_per_token of its experts, DeepSeek by 2.
            needed = f"n_group = {groups}, or num_experts_per_tok / 2 = {experts.per_token / 2:g}"
            read.refuse("topk_group", groups_per_token, needed)
    router = SigmoidRouter(groups, groups_per_token, read.number("routed_scaling_factor"))
    return replace(experts, router=router, shared_ffn=experts.ffn * read.integer(shared, most=EXPERTS_MAX))

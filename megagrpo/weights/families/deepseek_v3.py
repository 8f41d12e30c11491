"""DeepSeek-V3 and R1 (`DeepseekV3ForCausalLM`): latent attention, first layers dense, then routed and shared experts.

Published checkpoints also hold layers for multi-token prediction (num_nextn_predict_layers) after the model's own.
No side holds them; `extra_tensors` in sides/checkpoint.py lists them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megagrpo.weights.families.architecture import Architecture, Layer
from megagrpo.weights.families.parts.experts import Experts, SigmoidRouter
from megagrpo.weights.families.parts.latent_attention import NORM_EPSILON, LatentAttention
from megagrpo.weights.families.reading import EXPERTS_MAX, ConfigReader


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    read = ConfigReader(config, num_key_value_heads=128, q_lora_rank=1536)
    config = read.config
    config.known |= {"head_dim", "qk_head_dim"}  # they follow from other sizes
    read.refuse_if_set("attention_bias")
    if config.get("rms_norm_eps", NORM_EPSILON) != NORM_EPSILON:
        read.refuse("rms_norm_eps", config["rms_norm_eps"], f"{NORM_EPSILON:g}, as the norms inside attention have")
    if config.get("rope_interleave", True) is not True:
        read.refuse("rope_interleave", config["rope_interleave"], "true: rotary elements in pairs of neighbours")
    heads = read.integer("num_attention_heads")
    if config.get("num_key_value_heads") not in (None, heads):
        read.refuse("num_key_value_heads", config["num_key_value_heads"], f"num_attention_heads = {heads}")
    attention = LatentAttention(
        hidden=read.hidden,
        heads=heads,
        query_rank=None if config.get("q_lora_rank") is None else read.integer("q_lora_rank"),
        key_value_rank=read.integer("kv_lora_rank"),
        plain_dim=read.integer("qk_nope_head_dim"),
        rotary_dim=read.integer("qk_rope_head_dim"),
        value_dim=read.integer("v_head_dim"),
        rope=read.rope("yarn"),
    )
    experts, dense = _read_experts(read), _dense_layers(read)
    mlp = read.mlp()
    return read.model([Layer(attention, mlp if layer < dense else experts) for layer in range(read.layers)])


def _dense_layers(read: ConfigReader) -> int:
    layers, dense = read.layers, read.config.get("first_k_dense_replace", 3)
    if isinstance(dense, int) and 0 <= dense < layers:
        return dense
    read.refuse("first_k_dense_replace", dense, f"a number of layers below num_hidden_layers = {layers}")
    return 0


def _read_experts(read: ConfigReader) -> Experts:
    config = read.config
    for key, usual in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"), ("moe_layer_freq", 1)):
        if config.get(key, usual) != usual:
            read.refuse(key, config[key], str(usual))
    if not read.flag("norm_topk_prob", default=True):
        read.refuse("norm_topk_prob", False, "true: weights of the chosen experts that add up to 1")
    ffn = read.integer("moe_intermediate_size")
    count = read.integer("n_routed_experts", "num_local_experts", most=EXPERTS_MAX)
    per_token = read.integer("num_experts_per_tok")
    groups, groups_per_token = read.integer("n_group"), read.integer("topk_group")
    scale = read.number("routed_scaling_factor", config.get("routed_scaling_factor"))
    experts = Experts(
        hidden=read.hidden,
        experts=count,
        per_token=per_token,
        ffn=ffn,
        normalize_top_k=True,
        router=SigmoidRouter(groups, groups_per_token, scale),
        shared_ffn=ffn * read.integer("n_shared_experts", most=EXPERTS_MAX),
    )
    if per_token > count:
        read.refuse("num_experts_per_tok", per_token, f"at most the number of experts, {count}")
    if per_token == 1:
        read.refuse("num_experts_per_tok", 1, "at least 2: Megatron does not normalize the weight of a single one")
    if groups != groups_per_token:
        if count % groups or groups_per_token > groups:
            read.refuse("n_group", groups, f"a divisor of n_routed_experts = {count}, at least topk_group")
        elif per_token != 2 * groups_per_token:
            # Megatron scores a group by per_token / groups_per_token of its experts, DeepSeek by 2.
            read.refuse("topk_group", groups_per_token, f"num_experts_per_tok / 2 = {per_token / 2:g}")
    return experts

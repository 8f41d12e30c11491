"""The arguments of Megatron-LM that describe a model, for --use-checkpoint-args."""

from __future__ import annotations

from typing import Any

from megagrpo.weights.families.architecture import Architecture


def arguments(arch: Architecture) -> dict[str, Any]:
    """Plain values by the names that Megatron-LM's parser gives them.

    The number of rows of the embedding is left out: Megatron-LM pads it to its own layout and loads either size.
    """
    return _dense(arch) | _experts(arch)


def _dense(arch: Architecture) -> dict[str, Any]:
    return {
        "num_layers": arch.layers,
        "hidden_size": arch.hidden,
        "ffn_hidden_size": arch.ffn,
        "num_attention_heads": arch.heads,
        "group_query_attention": arch.query_groups != arch.heads,
        "num_query_groups": arch.query_groups,
        "kv_channels": arch.head_dim,
        "seq_length": arch.max_positions,
        "max_position_embeddings": arch.max_positions,
        "position_embedding_type": "rope",
        "use_rotary_position_embeddings": True,
        "rotary_base": int(arch.rope.theta),
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        "use_rope_scaling": arch.rope.factor is not None,
        "rope_scaling_factor": arch.rope.factor or 8.0,
        "normalization": "RMSNorm",
        "norm_epsilon": arch.norm_epsilon,
        "apply_layernorm_1p": False,
        "apply_query_key_layer_scaling": False,
        "swiglu": True,
        "squared_relu": False,
        "add_bias_linear": False,
        "add_qkv_bias": arch.qkv_bias,
        "qk_layernorm": arch.qk_norm,
        "untie_embeddings_and_output_weights": not arch.tied_embeddings,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "world_size": 1,
        "data_parallel_size": 1,
        "ckpt_format": "torch_dist",
        "no_save_optim": True,
        "no_save_rng": True,
    }


def _experts(arch: Architecture) -> dict[str, Any]:
    experts = arch.experts
    if experts is None:
        return {"num_experts": None}
    return {
        "num_experts": experts.count,
        "moe_ffn_hidden_size": experts.ffn,
        "moe_router_topk": experts.per_token,
        "moe_router_pre_softmax": not experts.normalize_top_k,
        "moe_layer_freq": 1,
    }

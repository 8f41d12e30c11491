"""The arguments of Megatron-LM that describe a model, for --use-checkpoint-args."""

from __future__ import annotations

from typing import Any

from megagrpo.weights.families.architecture import Architecture, Experts, LatentAttention


def arguments(arch: Architecture) -> dict[str, Any]:
    """Plain values by the names that Megatron-LM's parser gives them.

    The number of rows of the embedding is left out: Megatron-LM pads it to its own layout and loads either size.
    """
    arguments = _dense(arch) | _rope(arch)
    if arch.latent is not None:
        arguments |= _latent(arch.latent)
    if arch.experts is not None:
        arguments |= _experts(arch.experts, arch.layers)
    return arguments


def _dense(arch: Architecture) -> dict[str, Any]:
    return {
        "num_layers": arch.layers,
        "hidden_size": arch.hidden,
        "ffn_hidden_size": arch.ffn,
        "num_attention_heads": arch.heads,
        "group_query_attention": arch.query_groups != arch.heads,
        "num_query_groups": arch.query_groups,
        "kv_channels": arch.head_dim,
        "max_position_embeddings": arch.max_positions,
        "normalization": "RMSNorm",
        "norm_epsilon": arch.norm_epsilon,
        "apply_layernorm_1p": False,
        "apply_query_key_layer_scaling": False,
        "swiglu": True,
        "squared_relu": False,
        "add_bias_linear": False,
        "add_qkv_bias": arch.qkv_bias,
        "qk_layernorm": arch.qk_norm or arch.latent is not None,
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


def _rope(arch: Architecture) -> dict[str, Any]:
    rope, yarn = arch.rope, arch.rope.yarn
    arguments: dict[str, Any] = {
        "position_embedding_type": "rope",
        "use_rotary_position_embeddings": True,
        "rotary_base": int(rope.theta),
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        "use_rope_scaling": rope.factor is not None,
    }
    if rope.factor is not None:
        arguments["rope_scaling_factor"] = rope.factor
    if yarn is not None:
        arguments |= {
            "rope_type": "yarn",
            "rotary_scaling_factor": yarn.factor,
            "original_max_position_embeddings": yarn.original_max_positions,
            "beta_fast": yarn.beta_fast,
            "beta_slow": yarn.beta_slow,
            "mscale": yarn.mscale,
            "mscale_all_dim": yarn.mscale_all_dim,
        }
    return arguments


def _latent(latent: LatentAttention) -> dict[str, Any]:
    return {
        "multi_latent_attention": True,
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.key_value_rank,
        "qk_head_dim": latent.plain_dim,
        "qk_pos_emb_head_dim": latent.rotary_dim,
        "v_head_dim": latent.value_dim,
    }


def _experts(experts: Experts, layers: int) -> dict[str, Any]:
    dense = experts.dense_layers
    arguments: dict[str, Any] = {
        "num_experts": experts.count,
        "moe_ffn_hidden_size": experts.ffn,
        "moe_router_topk": experts.per_token,
        "moe_router_pre_softmax": not experts.normalize_top_k,
        # With a list Megatron expects keys of its own for each layer, which the checkpoint has if layers differ.
        "moe_layer_freq": [0] * dense + [1] * (layers - dense) if dense else 1,
    }
    if experts.shared_ffn:
        arguments["moe_shared_expert_intermediate_size"] = experts.shared_ffn
    if (router := experts.router) is not None:
        arguments |= {
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_topk_scaling_factor": router.scale,
            "moe_router_num_groups": router.groups,
            "moe_router_group_topk": router.groups_per_token,
        }
    return arguments

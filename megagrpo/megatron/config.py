"""From a model's architecture and the recipe's train section to Megatron's TransformerConfig."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megagrpo.errors import Problem, RecipeError
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.megatron.options import option_problems
from megagrpo.recipe.schema import TrainConfig
from megagrpo.weights.families.architecture import Architecture, Experts, LatentAttention, Rope

__all__ = ["layer_spec", "option_problems", "transformer_config"]

LayerSpec = Literal["local", "transformer_engine"]


def layer_spec(train: TrainConfig, device: str) -> LayerSpec:
    """What `train.layer_spec` means on `device` (cpu or cuda). Raises RecipeError if it cannot run there.

    Adapters hold on to the linear layers of the local spec: with them auto is local.
    """
    runs = device != "cpu" and find_spec("transformer_engine") is not None
    if train.layer_spec == "transformer_engine" and not runs:
        raise RecipeError(
            Problem(
                "train.layer_spec",
                given=f"transformer_engine on {device}",
                needed="a CUDA device and the transformer_engine package",
                fix="pip install megagrpo[te] on a machine with CUDA, or train.layer_spec: auto",
            )
        )
    if train.layer_spec == "auto":
        return "transformer_engine" if runs and train.lora is None else "local"
    return train.layer_spec


def transformer_config(arch: Architecture, train: TrainConfig, dtype: torch.dtype, device: str) -> TransformerConfig:
    """Megatron's config for `arch` in the recipe's layout, with the recipe's `train.megatron` options on top.

    `dtype` is float32 or bfloat16; `device` is cpu or cuda. Raises RecipeError if Megatron refuses the combination.
    """
    problems = option_problems(train.megatron)
    if problems:
        raise RecipeError(problems)
    fields = (
        _of_architecture(arch)
        | _of_layout(train.layout.parallel())
        | _of_numbers(dtype)
        | _of_recompute(train.recompute)
        | _of_machine(layer_spec(train, device), device, arch)
        | train.megatron
    )
    kind = TransformerConfig if arch.latent is None else MLATransformerConfig
    try:
        return kind(**fields)
    except (AssertionError, ValueError, NotImplementedError) as error:
        raise RecipeError(
            Problem(
                "train: Megatron refuses this combination",
                given=", ".join(f"{name}: {value}" for name, value in train.megatron.items()),
                needed=str(error) or "a combination that megatron.core's TransformerConfig accepts",
            )
        ) from error


def _of_architecture(arch: Architecture) -> dict[str, Any]:
    fields = {
        "num_layers": arch.layers,
        "hidden_size": arch.hidden,
        "ffn_hidden_size": arch.ffn,
        "num_attention_heads": arch.heads,
        "num_query_groups": arch.query_groups,
        "kv_channels": arch.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": arch.norm_epsilon,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": arch.qkv_bias,
        "qk_layernorm": arch.qk_norm,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    if arch.latent is not None:
        fields |= _of_latent_attention(arch.latent, arch.rope)
    if arch.experts is not None:
        fields |= _of_experts(arch.experts, arch.layers)
    return fields


def _of_latent_attention(latent: LatentAttention, rope: Rope) -> dict[str, Any]:
    fields = {
        "multi_latent_attention": True,
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.key_value_rank,
        "qk_head_dim": latent.plain_dim,
        "qk_pos_emb_head_dim": latent.rotary_dim,
        "v_head_dim": latent.value_dim,
        "qk_layernorm": True,  # the norms of the latents
        "rotary_base": rope.theta,
    }
    if rope.yarn is None:
        return fields | {"rope_type": "rope", "rotary_scaling_factor": 1.0}
    return fields | {
        "rope_type": "yarn",
        "rotary_scaling_factor": rope.yarn.factor,
        "original_max_position_embeddings": rope.yarn.original_max_positions,
        "beta_fast": rope.yarn.beta_fast,
        "beta_slow": rope.yarn.beta_slow,
        "mscale": rope.yarn.mscale,
        "mscale_all_dim": rope.yarn.mscale_all_dim,
    }


def _of_experts(experts: Experts, layers: int) -> dict[str, Any]:
    fields = {
        "num_moe_experts": experts.count,
        "moe_router_topk": experts.per_token,
        "moe_ffn_hidden_size": experts.ffn,
        # Megatron stacks layers in its checkpoints unless a list says that they are not all alike.
        "moe_layer_freq": [0] * experts.dense_layers + [1] * (layers - experts.dense_layers)
        if experts.dense_layers
        else 1,
        "moe_shared_expert_intermediate_size": experts.shared_ffn or None,
        # Softmax over the chosen experts is softmax over all of them, normalised over the chosen.
        "moe_router_pre_softmax": not experts.normalize_top_k,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }
    if (router := experts.router) is None:
        return fields
    fields |= {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_topk_scaling_factor": router.scale,
    }
    if router.groups > router.groups_per_token:
        fields |= {"moe_router_num_groups": router.groups, "moe_router_group_topk": router.groups_per_token}
    return fields


def _of_layout(layout: ParallelLayout) -> dict[str, Any]:
    interleaved = layout.virtual_pipeline > 1
    return {
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": layout.virtual_pipeline if interleaved else None,
        "num_layers_in_first_pipeline_stage": layout.first_stage_layers,
        "num_layers_in_last_pipeline_stage": layout.last_stage_layers,
        "context_parallel_size": layout.context,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_tensor,
        "sequence_parallel": layout.sequence_parallel,
        # Microbatches differ in length. Megatron then wants this dispatcher, even without experts.
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",
        # Batched sends of two neighbours are untagged: interleaved over 2 stages, where both neighbours are the same
        # rank, activations and gradients are exchanged wrongly without an error.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
    }


def _of_numbers(dtype: torch.dtype) -> dict[str, Any]:
    return {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "attention_softmax_in_fp32": True,
        # The loss has global denominators: gradients are summed over ranks and microbatches, and divided by nothing.
        "calculate_per_token_loss": True,
    }


def _of_recompute(recompute: Literal["none", "selective", "full"]) -> dict[str, Any]:
    match recompute:
        case "none":
            return {}
        case "selective":
            return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
        case "full":
            return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def _of_machine(spec: LayerSpec, device: str, arch: Architecture) -> dict[str, Any]:
    cuda, fused = device != "cpu", spec == "transformer_engine"
    return {
        "transformer_impl": spec,
        "moe_grouped_gemm": fused and arch.experts is not None,
        "apply_rope_fusion": fused and (arch.latent is None or arch.rope.yarn is not None),
        "bias_activation_fusion": cuda,
        "gradient_accumulation_fusion": cuda and find_spec("fused_weight_gradient_mlp_cuda") is not None,  # apex's
        "use_cpu_initialization": not cuda,
        # Weights are always loaded, but only this marks them as split over tensor ranks, as the gradient norm needs.
        "perform_initialization": True,
        "cuda_graph_scope": [],  # what Megatron's default stands for, with a warning
    }

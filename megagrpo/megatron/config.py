"""Megatron's TransformerConfig, from a model's architecture and the recipe's train section.

`train.megatron` may set any field of the installed TransformerConfig that does not contradict the recipe.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, get_type_hints

import torch
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from pydantic import ConfigDict, TypeAdapter, ValidationError

from megagrpo.errors import Problem, RecipeError
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.recipe.kernels import LayerSpec, attention_of, installed, layers_on
from megagrpo.recipe.schema import TrainConfig
from megagrpo.recipe.schema.train import ALL_LAYERS, Recomputed
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.sides.megatron_rank import config_fields

NEWEST_LIKELY = (9, 0)
"""The compute capability that is assumed where no GPU is seen: a driver's machine, a test."""
FUSIONS = ("apply_rope_fusion", "moe_permute_fusion", "moe_router_fusion")
"""Options with kernels of Transformer Engine: Megatron looks for them where the config is made, or in a first pass."""
OF_TRANSFORMER_ENGINE = (
    "attention_backend", "cp_comm_type", "cpu_offloading", "disable_parameter_transpose_cache",
    "fine_grained_activation_offloading", "fused_residual_rmsnorm", "symmetric_ar_type", "use_kitchen",
    "use_te_activation_func",
)  # fmt: skip
"""Options that local layers ignore, or with which their first pass fails."""


def layer_spec(arch: Architecture, train: TrainConfig, dtype: torch.dtype, device: str) -> LayerSpec:
    """Returns the layers that `train.layer_spec` means on `device` (cpu or cuda). Raises RecipeError if it cannot run.

    Adapters need the linear layers of the local spec, so auto is local with adapters. Else the card decides.
    """
    runs = device != "cpu" and find_spec("transformer_engine") is not None
    if train.layer_spec == "transformer_engine" and not runs:
        given = f"transformer_engine on {device}"
        fix = "pip install megagrpo[te] on a machine with CUDA, or train.layer_spec: auto"
        raise RecipeError(Problem("train.layer_spec", given, "a CUDA device and the transformer_engine package", fix))
    if train.layer_spec != "auto":
        return train.layer_spec
    if not runs or train.lora is not None:
        return "local"
    card = torch.cuda.get_device_capability() if torch.cuda.is_available() else NEWEST_LIKELY
    return layers_on(card, installed(), attention_of(arch, train, half=dtype == torch.bfloat16)).spec


def transformer_config(
    arch: Architecture, train: TrainConfig, dtype: torch.dtype, device: str, planned: LayerSpec | None = None
) -> TransformerConfig:
    """Returns Megatron's config for `arch` in the recipe's layout, with the recipe's `train.megatron` options on top.

    `dtype` is float32 or bfloat16; `device` is cpu or cuda. planned: the layers of machines with Transformer Engine,
    whether it is installed here or not. Raises RecipeError if Megatron refuses the combination.
    """
    problems = option_problems(train.megatron)
    fusions = dict.fromkeys(FUSIONS, False) if find_spec("transformer_engine") is None else {}
    if planned is None:
        needed, fix = "the package transformer_engine, which is not installed", "pip install megagrpo[te], or remove it"
        missing = [name for name in fusions if train.megatron.get(name)]
        problems += [Problem(f"train.megatron.{name}", "true", needed, fix) for name in missing]
    spec = planned or layer_spec(arch, train, dtype, device)
    if spec == "local":
        needed = "transformer_engine's layers: the local ones, which run here, ignore it or fail"
        names = OF_TRANSFORMER_ENGINE if fusions or arch.latent else (*OF_TRANSFORMER_ENGINE, "apply_rope_fusion")
        ignored = [
            (name, train.megatron[name]) for name in names if train.megatron.get(name) not in (None, False, "auto")
        ]
        problems += [Problem(f"train.megatron.{name}", str(value), needed, "leave it out") for name, value in ignored]
    if problems:
        raise RecipeError(problems)
    fields = (
        _of_architecture(arch)
        | _of_layout(train.layout.parallel())
        | _of_recomputed(train.recomputed)
        | _of_machine(spec, device, arch, dtype)
        | train.megatron
        | fusions
    )
    if (backend := train.megatron.get("attention_backend")) is not None:
        fields["attention_backend"] = AttnBackend[backend]
    kind = TransformerConfig if arch.latent is None else MLATransformerConfig
    try:
        return kind(**fields)
    except (AssertionError, ValueError, NotImplementedError) as error:
        given = ", ".join(f"{name}: {value}" for name, value in train.megatron.items())
        needed = str(error) or "a combination that megatron.core's TransformerConfig accepts"
        raise RecipeError(Problem("train: Megatron refuses this combination", given, needed)) from error


def _of_architecture(arch: Architecture) -> dict[str, Any]:
    fields = config_fields(arch) | {"gated_linear_unit": True, "activation_func": F.silu}
    if arch.latent is not None:
        fields["rotary_base"] = arch.rope.theta
        if arch.rope.yarn is None:
            fields |= {"rope_type": "rope", "rotary_scaling_factor": 1.0}
    if arch.experts is not None:
        fields |= {
            "moe_router_dtype": "fp32",
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
        }
        if (router := arch.experts.router) is not None:
            fields["moe_router_bias_update_rate"] = 0.0
            if router.groups > router.groups_per_token:
                fields |= {"moe_router_num_groups": router.groups, "moe_router_group_topk": router.groups_per_token}
    return fields


LAYOUT = {
    "tensor_model_parallel_size": "tensor",
    "pipeline_model_parallel_size": "pipeline",
    "virtual_pipeline_model_parallel_size": "virtual_pipeline",
    "num_layers_in_first_pipeline_stage": "first_stage_layers",
    "num_layers_in_last_pipeline_stage": "last_stage_layers",
    "context_parallel_size": "context",
    "expert_model_parallel_size": "expert",
    "expert_tensor_parallel_size": "expert_tensor",
}
"""Keys of train.layout, by Megatron's names."""


def _of_layout(layout: ParallelLayout) -> dict[str, Any]:
    interleaved = layout.virtual_pipeline > 1
    return {name: getattr(layout, key) for name, key in LAYOUT.items()} | {
        "virtual_pipeline_model_parallel_size": layout.virtual_pipeline if interleaved else None,
        "sequence_parallel": layout.sequence_parallel,
        # Microbatches differ in length. Megatron then wants this dispatcher, even without experts.
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",
        # Batched sends have no tags. With interleaved schedules over 2 stages both neighbours are the same rank, and
        # batched sends silently mix up activations and gradients.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
    }


def _of_recomputed(again: Recomputed) -> dict[str, Any]:
    if again.modules:
        return {"recompute_granularity": "selective", "recompute_modules": sorted(again.modules)}
    if again.layers == 0:
        return {}
    if again.layers == ALL_LAYERS:
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": again.layers}


def _of_machine(spec: LayerSpec, device: str, arch: Architecture, dtype: torch.dtype) -> dict[str, Any]:
    cuda, fused = device != "cpu", spec == "transformer_engine"
    return {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        # The loss has global denominators: gradients are summed over ranks and microbatches, and divided by nothing.
        "calculate_per_token_loss": True,
        "transformer_impl": spec,
        "moe_grouped_gemm": fused and arch.experts is not None,
        "apply_rope_fusion": fused and (arch.latent is None or arch.rope.yarn is not None),
        "bias_activation_fusion": cuda,
        "gradient_accumulation_fusion": cuda and find_spec("fused_weight_gradient_mlp_cuda") is not None,  # apex's
        "use_cpu_initialization": not cuda,
        # Weights are always loaded, but this also marks them as split over tensor ranks for the gradient norm.
        "perform_initialization": True,
        "cuda_graph_modules": [],  # the same as Megatron's default, which warns
    }


# Fields that another key of the recipe decides: train.megatron may not set them.
OWNED = {name: f"train.layout.{key}" for name, key in LAYOUT.items()} | {
    "sequence_parallel": "train.layout.tensor (on with tensor > 1)",
    "recompute_granularity": "train.recompute",
    "recompute_method": "train.recompute",
    "recompute_num_layers": "train.recompute",
    "recompute_modules": "train.recompute",
    "moe_layer_recompute": "train.recompute (modules: [moe])",
    "transformer_impl": "train.layer_spec",
    "moe_grouped_gemm": "train.layer_spec",
    "params_dtype": "model.dtype",
    "pipeline_dtype": "model.dtype",
    "autocast_dtype": "model.dtype",
    "enable_autocast": "model.dtype",
    "fp16": "model.dtype",
    "bf16": "model.dtype",
} | dict.fromkeys(
    (
        "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
        "normalization", "layernorm_epsilon", "layernorm_zero_centered_gamma", "gated_linear_unit", "activation_func",
        "activation_func_clamp_value", "glu_linear_offset", "add_bias_linear", "add_qkv_bias", "qk_layernorm",
        "qk_l2_norm", "rotary_interleaved", "no_rope_freq", "mrope_section", "window_size", "window_attn_skip_freq",
        "softmax_scale", "softmax_type", "attention_output_gate", "apply_residual_connection_post_layernorm",
        "multi_latent_attention", "experimental_attention_variant", "linear_attention_freq", "is_hybrid_model",
        "heterogeneous_block_specs", "mtp_num_layers", "num_moe_experts", "moe_router_topk", "moe_ffn_hidden_size",
        "moe_layer_freq", "moe_latent_size", "moe_router_pre_softmax", "moe_router_score_function",
        "moe_router_topk_scaling_factor", "moe_router_num_groups",
        "moe_router_group_topk", "moe_router_topk_limited_devices", "moe_router_enable_expert_bias",
        "moe_shared_expert_intermediate_size", "moe_shared_expert_gate", "moe_apply_probs_on_input",
        "mtp_loss_scaling_factor", "mtp_use_repeated_layer", "mtp_detach_heads", "mtp_hybrid_override_pattern",
        "dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk", "dsa_indexer_topk_freq",
        "dsa_indexer_skip_topk_offset", "dsa_indexer_rope_interleaved", "dsa_indexer_rotate_activation",
        "dsa_indexer_scoring_relu", "dsa_indexer_k_norm_epsilon", "dsa_indexer_k_norm_fp32", "dsa_kernel_backend",
        "dsa_indexer_loss_coeff", "dsa_indexer_use_sparse_loss", "linear_conv_kernel_dim", "linear_key_head_dim",
        "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads", "mamba_state_dim", "mamba_head_dim",
        "mamba_num_groups", "mamba_num_heads", "use_mamba_mem_eff_path", "mamba_training_ssm_states_dtype",
        "use_mup", "mup_width_mult", "mup_base_hidden_size", "mup_embedding_mult", "mup_output_mult",
        "mup_base_head_dim", "mup_attn_scale_power",
    ),
    "model.path (the model's own config)",
)  # fmt: skip

# Fields that train.megatron may set to these values only, and why: other values break what megagrpo promises.
_SAME_LOGPROBS = "old and new logprobs of the same weights must be equal, and this makes them random"
_ISOLATED = "a token's logprob must not depend on the other sequences of its microbatch"
_OWN_LOSS = "the loss is GRPO's, with global denominators; a loss added inside the model has others"
_OWN_STAGES = "train.layout decides which layers a stage has, and how many the first and the last stage have"
_NEEDS_A_CALL = "it needs a call that this trainer does not make, so it would do nothing"
_ONE_SHAPE = "a graph has one shape, and microbatches of packed sequences differ in length"
_WHOLE_CONTEXT = "every sequence is cut over all train.layout.context ranks"
_PACKED = "Transformer Engine takes no packed sequences with it"
_SCALES = "checkpoints have no scales, and microbatches any number of tokens: products in fp8 need a multiple of 8"
_OTHER_WEIGHTS = "parameters then have other names or shapes than those that weights are loaded to and sent from"
_MODELS_DTYPE = "weights are loaded, compared and sent as elements of the model's dtype"
_INFERENCE = "it is for inference"
_ROWS: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("hidden_dropout attention_dropout", (0,), _SAME_LOGPROBS),
    ("moe_input_jitter_eps moe_router_force_biased", (None,), _SAME_LOGPROBS),
    ("moe_router_force_load_balancing", (False,), _SAME_LOGPROBS),
    ("moe_expert_capacity_factor moe_expert_rank_capacity_factor", (None,), _ISOLATED),
    ("moe_paged_stash moe_token_dropping moe_ncclep_static_shape moe_ncclep_zero_copy", (False,), _ISOLATED),
    ("moe_flex_dispatcher_backend", ("deepep", "hybridep"), _ISOLATED),
    ("moe_aux_loss_coeff moe_router_quantile_balancing_ema", (0,), _OWN_LOSS),
    ("moe_z_loss_coeff", (None,), _OWN_LOSS),
    ("moe_router_load_balancing_type", ("none",), _OWN_LOSS),
    ("calculate_per_token_loss", (True,), _OWN_LOSS),
    ("moe_router_bias_update_rate", (0,), "only gradients change the policy: a router's bias stays as it was loaded"),
    ("moe_router_dtype", ("fp32", "fp64"), "in lower precision it chooses other experts than the rollout engine"),
    ("cross_entropy_loss_fusion", (False,), "the fused cross-entropy rounds its gradient to bfloat16, silently"),
    ("cross_entropy_fusion_impl", ("native",), "logprobs are computed by megagrpo from the logits"),
    ("variable_seq_lengths", (True,), "microbatches of packed sequences differ in length"),
    (
        "moe_token_dispatcher_type",
        ("alltoall", "flex"),
        "the allgather one cannot take microbatches that differ in length",
    ),
    ("overlap_p2p_comm", (), "it follows from train.layout: interleaved stages need it, others cannot have it"),
    ("batch_p2p_comm", (), "it follows from train.layout: it gives wrong numbers for interleaved stages"),
    ("use_ring_exchange_p2p", (False,), "it needs a torch built with it, and fixed sequence lengths"),
    ("perform_initialization", (True,), "without it the gradient norm leaves out tensor-parallel weights, silently"),
    ("init_model_with_meta_device", (False,), "weights are loaded into the model as it is built"),
    ("pipeline_model_parallel_layout", (None,), _OWN_STAGES),
    ("account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split", (False,), _OWN_STAGES),
    ("mtp_standalone", (False,), _OWN_STAGES),
    ("defer_embedding_wgrad_compute delay_wgrad_compute qk_clip log_max_attention_logit", (False,), _NEEDS_A_CALL),
    ("overlap_dispatch_backward_with_experts_wgrad overlap_moe_expert_parallel_comm", (False,), _NEEDS_A_CALL),
    ("ep_overlap_early_attn_memory_release moe_enable_routing_replay", (False,), _NEEDS_A_CALL),
    ("qk_clip_alpha qk_clip_threshold", (), _NEEDS_A_CALL),
    ("cuda_graph_impl", ("none",), _ONE_SHAPE),
    ("enable_cuda_graph external_cuda_graph", (False,), _ONE_SHAPE),
    ("hybrid_context_parallel", (False,), _WHOLE_CONTEXT),
    ("max_seqlen_per_dp_cp_rank", (None,), _WHOLE_CONTEXT),
    ("cp_comm_type", (None, "p2p", "a2a"), _PACKED),
    ("hierarchical_context_parallel_sizes", (None,), _PACKED),
    ("fused_single_qkv_rope", (False,), "Megatron refuses it with packed sequences, in the first pass"),
    ("flash_attention_version", (None,), "Transformer Engine 2.17 does not read the variables that it sets"),
    ("batch_invariant_mode", (False,), "it needs flash_attention_version"),
    ("mlp_chunks_for_training", (1,), "ranks with microbatches of other lengths would make other numbers of chunks"),
    ("activation_func_fp8_input_store", (False,), "gradients would be those of rounded activations"),
    ("tp_comm_overlap", (False,), "it needs user buffers that nothing makes here: the first product would fail"),
    ("fp8 fp4", (None,), _SCALES),
    ("fp8_output_proj", (False,), "logprobs are computed by megagrpo from the hidden states"),
    ("fp8_param fp4_param", (False,), _MODELS_DTYPE),
    ("fp32_residual_connection", (False,), "layers round the residual to the model's dtype all the same"),
    ("init_method_std embedding_init_method_std", (), "all weights are loaded"),
    ("flash_decode inference_rng_tracker use_inference_optimized_layers", (False,), _INFERENCE),
    ("inference_fuse_tp_communication nccl_all_reduce_for_prefill", (False,), _INFERENCE),
    ("moe_pad_experts_for_cuda_graph_inference", (False,), _INFERENCE),
    ("mlp_chunks_for_prefill", (1,), _INFERENCE),
    ("inference_sampling_seed inference_cuda_graph_scope inference_moe_token_dispatcher_type", (), _INFERENCE),
    ("inference_disable_triton_nvls_kernels inference_grouped_gemm_backend", (), _INFERENCE),
    ("inference_moe_disable_fused_quant_kernels", (), _INFERENCE),
    (
        "finalize_model_grads_func grad_scale_func moe_grad_scale_func mtp_grad_scale_func no_sync_func grad_sync_func "
        "param_sync_func timers experimental_attention_variant_loss_scale_func",
        (None,),
        "it is set by the training rank",
    ),
    (
        "masked_softmax_fusion attention_softmax_in_fp32 persist_layer_norm memory_efficient_layer_norm "
        "use_te_rng_tracker pipeline_model_parallel_comm_backend disable_bf16_reduced_precision_matmul",
        (),
        "nothing reads it here",
    ),
    (
        "use_transformer_engine_op_fuser use_grouped_gemm_for_dense_mlp use_grouped_gemm_for_shared_expert "
        "moe_single_grouped_weight moe_single_grouped_bias",
        (False,),
        _OTHER_WEIGHTS,
    ),
    (
        "moe_mlp_glu_interleave_size moe_shared_expert_glu_interleave_size tensor_parallel_num_weight_shards "
        "expert_tensor_parallel_num_weight_shards",
        (None,),
        _OTHER_WEIGHTS,
    ),
    ("gtp_weight_remat_size expert_gtp_weight_remat_size", (1,), _OTHER_WEIGHTS),
)
ALLOWED_VALUES = {name: (values, reason) for names, values, reason in _ROWS for name in names.split()}


def option_problems(options: Mapping[str, Any]) -> list[Problem]:
    """Returns a problem for each entry of `train.megatron` that is not allowed."""
    return [problem for name, value in options.items() if (problem := _problem(name, value)) is not None]


def _problem(name: str, value: Any) -> Problem | None:
    where, given = f"train.megatron.{name}", repr(value)
    known = [field.name for field in dataclasses.fields(TransformerConfig) if not field.name.startswith("_")]
    if name not in known:
        nearest = difflib.get_close_matches(name, known, n=1)
        needed = "a field of megatron.core's TransformerConfig"
        return Problem(where, given, needed, f"did you mean {nearest[0]}?" if nearest else "")
    if name in OWNED:
        return Problem(where, given, "not set here: another key of the recipe decides it", f"set {OWNED[name]}")
    if name in ALLOWED_VALUES:
        allowed, reason = ALLOWED_VALUES[name]
        if value not in allowed:
            return Problem(where, given, " or ".join(map(repr, allowed)) or "not set", f"leave it out: {reason}")
    if name == "attention_backend":  # an enumeration, by its members' names
        needed = "auto, flash or fused: others keep all scores, or leave no kernel"
        return None if value in ("auto", "flash", "fused") else Problem(where, given, needed)
    hint = get_type_hints(TransformerConfig)[name]
    try:
        TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True)).validate_python(value, strict=True)
    except ValidationError as error:
        kind = hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
        reasons = sorted({str(detail["msg"]) for detail in error.errors()})
        return Problem(where, given, f"{kind}: {'; '.join(reasons)}")
    return None

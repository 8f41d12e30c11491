"""Megatron's TransformerConfig from a recipe, the options that pass through, and the stages that Megatron builds."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megagrpo.errors import RecipeError
from megagrpo.layout.parallel import ParallelLayout, layers_of_chunk
from megagrpo.megatron.config import (
    ALLOWED_VALUES,
    FUSIONS,
    OF_TRANSFORMER_ENGINE,
    OWNED,
    layer_spec,
    option_problems,
    transformer_config,
)
from megagrpo.recipe.kernels import Installed
from megagrpo.recipe.schema import LayoutConfig, LoraConfig, TrainConfig
from megagrpo.recipe.schema.train import RecomputeConfig
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.families.parts import SigmoidRouter
from tests.unit.test_layout_parallel import uneven_stages
from tests.weights_oracle import architecture, moe_architecture

ARCHITECTURE = architecture(family="qwen3", norm=True)


def config(arch: Architecture = ARCHITECTURE, dtype: torch.dtype = torch.float32, **train: Any) -> Any:
    return transformer_config(arch, TrainConfig(**train), dtype, "cpu")


def test_options_pass_through() -> None:
    assert config(megatron={"bias_dropout_fusion": True, "deterministic_mode": True}).bias_dropout_fusion


OWNERS = {
    "tensor_model_parallel_size": "train.layout.tensor",
    "recompute_granularity": "train.recompute",
    "bf16": "model.dtype",
    "num_layers": "model.path",
}
REFUSED = """
    {determinstic_mode: true, _cpu_offloading_context: null, tensor_model_parallel_size: 2, recompute_granularity: full,
    bf16: true, num_layers: 4, attention_dropout: 0.1, cross_entropy_loss_fusion: true, moe_aux_loss_coeff: 0.01,
    batch_p2p_comm: true, qk_clip: true, cuda_graph_impl: local, mamba_num_heads: 4, fp32_residual_connection: true,
    deterministic_mode: "yes", recompute_num_layers: two, tp_comm_bootstrap_backend: smoke,
    finalize_model_grads_func: f, fp8: hybrid, fp4: e2m1, tp_comm_overlap: true, cp_comm_type: all_gather,
    hierarchical_context_parallel_sizes: [2, 2], attention_backend: unfused, mla_down_proj_fusion: true, use_mup: true,
    flash_attention_version: 4, mlp_chunks_for_training: 2, moe_flex_dispatcher_backend: ncclep,
    activation_func_fp8_input_store: true, overlap_moe_expert_parallel_comm: true, batch_invariant_mode: true,
    moe_router_force_biased: 1.0, mtp_detach_heads: true, moe_layer_recompute: true, fused_single_qkv_rope: true,
    persist_layer_norm: true, overlap_dispatch_backward_with_experts_wgrad: true}
"""


@pytest.mark.parametrize(("option", "value"), yaml.safe_load(REFUSED).items())
def test_an_option_that_cannot_be_is_refused(option: str, value: Any) -> None:
    (problem,) = option_problems({option: value})
    assert problem.where == f"train.megatron.{option}"
    assert OWNERS.get(option, "") in str(problem)
    with pytest.raises(RecipeError, match=option):
        config(megatron={option: value})


def test_every_value_that_an_option_must_have_is_megatrons_default_or_ours() -> None:
    plain = config(moe_architecture(router=SigmoidRouter(scale=2.5, groups=1, groups_per_token=1)))
    for name, (allowed, _) in ALLOWED_VALUES.items():
        assert not allowed or getattr(plain, name) in allowed, name
    assert {*OWNED, *ALLOWED_VALUES} <= {field.name for field in dataclasses.fields(plain)}
    assert not OWNED.keys() & ALLOWED_VALUES.keys()


PASSED_ON = """
    activation_offload_fraction apply_query_key_layer_scaling barrier_with_L1_time batch_p2p_sync
    bias_activation_fusion bias_dropout_fusion clone_scatter_output_in_embedding config_logger_dir
    cpu_offloading_activations cpu_offloading_double_buffering cpu_offloading_num_layers
    cpu_offloading_retain_pinned_cpu_buffers cpu_offloading_weights cuda_graph_modules
    cuda_graph_retain_backward_graph cuda_graph_scope cuda_graph_use_single_mempool cuda_graph_warmup_steps
    deallocate_pipeline_outputs delay_offload_until_cuda_graph delta_offload_bytes_across_pp_ranks
    deterministic_mode distribute_saved_activations embedding_init_method
    fine_grained_offloading_max_inflight_offloads first_last_layers_bf16 fp4_quantizer_factory fp4_recipe
    fp8_amax_compute_algo fp8_amax_history_len fp8_dot_product_attention fp8_interval fp8_margin
    fp8_multi_head_attention fp8_quantizer_factory fp8_recipe fp8_wgrad gradient_accumulation_fusion
    hetereogenous_dist_checkpoint high_priority_a2a_comm_stream init_method kitchen_attention_backend
    microbatch_group_size_per_vp_stage min_offloaded_tensor_size moe_deepep_num_sms moe_enable_deepep
    moe_flex_dispatcher_num_sms moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute
    moe_hybridep_num_sms moe_hybridep_num_sms_preprocessing moe_hybridep_pad_uneven_dispatch_inputs
    moe_pad_expert_input_to_capacity moe_paged_stash_buffer_size_factor_cpu moe_paged_stash_buffer_size_factor_cuda
    moe_paged_stash_page_size moe_per_layer_logging moe_permute_fusion_into_hybridep moe_router_padding_for_fp8
    moe_router_padding_for_quantization moe_shared_expert_overlap moe_token_drop_policy num_layers_at_end_in_bf16
    num_layers_at_start_in_bf16 num_microbatches_with_partial_activation_checkpoints offload_modules
    output_layer_init_method overlap_p2p_comm_warmup_flush quant_recipe test_mode tp_comm_atomic_ag
    tp_comm_atomic_rs tp_comm_bootstrap_backend tp_comm_bulk_dgrad tp_comm_bulk_wgrad tp_comm_overlap_ag
    tp_comm_overlap_disable_fc1 tp_comm_overlap_disable_qkv tp_comm_overlap_rs tp_comm_overlap_rs_dgrad
    tp_comm_split_ag tp_comm_split_rs tp_only_amax_red use_cpu_initialization use_fused_weighted_squared_relu
    use_kitchen_attention wgrad_deferral_limit
"""


def test_every_field_of_megatrons_config_is_refused_bounded_or_passed_on_on_purpose() -> None:
    """A new one of another version is looked at before a recipe can set it."""
    known = {*OWNED, *ALLOWED_VALUES, *OF_TRANSFORMER_ENGINE, *FUSIONS, *PASSED_ON.split()}
    assert known == {field.name for field in dataclasses.fields(TransformerConfig) if not field.name.startswith("_")}


def test_all_options_are_reported_at_once() -> None:
    assert len(option_problems({"nonsense": 1, "bf16": True, "hidden_dropout": 0, "deterministic_mode": True})) == 2


def test_what_megatron_itself_refuses_is_a_recipe_error() -> None:
    with pytest.raises(RecipeError, match="Megatron refuses"):
        config(megatron={"moe_enable_deepep": True})


def test_options_of_transformer_engines_layers_are_set_for_them_and_refused_for_the_local_ones() -> None:
    train = TrainConfig(megatron={"attention_backend": "flash", "fused_residual_rmsnorm": True})
    fused = transformer_config(ARCHITECTURE, train, torch.float32, "cpu", planned="transformer_engine")
    assert fused.attention_backend is AttnBackend.flash
    assert fused.fused_residual_rmsnorm
    others = {"cp_comm_type": "a2a", "symmetric_ar_type": "one_shot", "fine_grained_activation_offloading": True}
    for option, value in (train.megatron | others).items():
        with pytest.raises(RecipeError, match=option):
            config(megatron={option: value})
    assert config(megatron={"attention_backend": "auto"}).attention_backend is AttnBackend.auto


@pytest.mark.parametrize(
    ("card", "dtype", "lora", "spec"),
    [
        ((9, 0), torch.bfloat16, None, "transformer_engine"),
        ((8, 0), torch.bfloat16, None, "local"),
        ((9, 0), torch.float32, None, "local"),
        ((9, 0), torch.bfloat16, LoraConfig(), "local"),
    ],
)
def test_auto_takes_the_layers_that_the_card_computes_fastest(card, dtype, lora, spec, monkeypatch) -> None:
    monkeypatch.setattr("megagrpo.megatron.config.find_spec", lambda name: name)
    monkeypatch.setattr("megagrpo.megatron.config.installed", lambda: Installed(transformer_engine=True))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: card)
    train = TrainConfig(lora=lora)
    assert layer_spec(architecture(head_dim=64), train, dtype, "cuda") == spec
    assert layer_spec(ARCHITECTURE, train, dtype, "cpu") == "local"


def test_transformer_engine_needs_cuda() -> None:
    with pytest.raises(RecipeError, match=r"train\.layer_spec"):
        config(layer_spec="transformer_engine")


def test_the_fields_that_the_contracts_rest_on() -> None:
    plain = config()
    assert plain.calculate_per_token_loss
    assert plain.variable_seq_lengths
    assert not plain.sequence_parallel
    assert plain.hidden_dropout == plain.attention_dropout == 0
    assert config(layout=LayoutConfig(tensor=2)).sequence_parallel
    interleaved = config(layout=LayoutConfig(pipeline=2, virtual_pipeline=2))
    assert interleaved.overlap_p2p_comm
    assert not interleaved.batch_p2p_comm
    assert config(recompute="full").recompute_method == "uniform"
    assert config(recompute="selective").recompute_modules == ["core_attn"]
    modules = config(recompute=RecomputeConfig(modules=["mlp", "layernorm"]))
    assert modules.recompute_granularity == "selective"
    assert modules.recompute_modules == ["layernorm", "mlp"]
    some = config(recompute=RecomputeConfig(layers=3))
    assert (some.recompute_granularity, some.recompute_method, some.recompute_num_layers) == ("full", "block", 3)
    half = config(dtype=torch.bfloat16)
    assert half.bf16
    assert half.params_dtype == half.pipeline_dtype == torch.bfloat16


def test_experts_without_normalised_weights() -> None:
    arch = moe_architecture(normalize_top_k=False)
    assert config(arch).moe_router_pre_softmax
    assert config(arch).moe_router_dtype == "fp32"


@settings(max_examples=100)
@given(uneven_stages())
def test_megatron_places_layers_on_the_same_stages(case: tuple[int, ParallelLayout]) -> None:
    layers, layout = case
    built = config(architecture(layers), layout=LayoutConfig(**vars(layout)))
    for stage in range(layout.pipeline):
        for chunk in range(layout.virtual_pipeline):
            vp_stage = chunk if layout.virtual_pipeline > 1 else None
            first = get_transformer_layer_offset(built, vp_stage=vp_stage, pp_rank=stage)
            count = get_num_layers_to_build(built, vp_stage=vp_stage, pp_rank=stage)
            assert range(first, first + count) == layers_of_chunk(layers, layout, stage, chunk)

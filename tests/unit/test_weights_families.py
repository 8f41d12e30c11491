"""What a config.json means: transformers 4 and 5, published models, and every feature that is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from megagrpo.errors import ModelError
from megagrpo.layout.parallel import ParallelLayout, rank_grid
from megagrpo.weights.families import architecture_of, read_architecture, tensors_of
from megagrpo.weights.families.architecture import Experts, LatentAttention, Rope, SigmoidRouter, Yarn
from megagrpo.weights.sides.megatron_rank import LOCAL_SPEC
from tests.tiny_models import FAMILIES, make_model
from tests.weights_oracle import architecture, latent_architecture, moe_architecture

# config.json of published models, as far as it matters here
LLAMA_3_2_1B: dict[str, Any] = {
    "model_type": "llama", "attention_bias": False, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048,
    "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": False, "num_attention_heads": 32,
    "num_hidden_layers": 16, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
    "vocab_size": 128256,
    "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "tie_word_embeddings": True,
}  # fmt: skip
QWEN2_5_7B: dict[str, Any] = {
    "model_type": "qwen2", "hidden_act": "silu", "hidden_size": 3584, "intermediate_size": 18944,
    "max_position_embeddings": 32768, "max_window_layers": 28, "num_attention_heads": 28, "num_hidden_layers": 28,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 131072,
    "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 152064,
}  # fmt: skip
QWEN3_30B_A3B: dict[str, Any] = {
    "model_type": "qwen3_moe", "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48,
    "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip

MIXTRAL_8X7B: dict[str, Any] = {
    "model_type": "mixtral", "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "num_local_experts": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0,
    "sliding_window": None, "tie_word_embeddings": False, "vocab_size": 32000,
}  # fmt: skip

DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3", "attention_bias": False, "first_k_dense_replace": 3, "hidden_act": "silu",
    "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61,
    "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
    "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
                            "weight_block_size": [128, 128]},
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                     "original_max_position_embeddings": 4096, "type": "yarn"},
    "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False,
    "topk_group": 4, "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 129280,
}  # fmt: skip
YARN = DEEPSEEK_V3["rope_scaling"]


def parameters(config: dict[str, Any]) -> float:
    """Billions of elements in the checkpoint."""
    total = 0
    for tensor in tensors_of(architecture_of(config)):
        elements = 1
        for size in tensor.shape:
            elements *= size
        total += elements
    return total / 1e9


def test_published_models_have_as_many_parameters_as_they_say() -> None:
    assert parameters(LLAMA_3_2_1B) == pytest.approx(1.2358, abs=1e-4)
    assert parameters(QWEN2_5_7B) == pytest.approx(7.6156, abs=1e-4)
    assert parameters(QWEN3_30B_A3B) == pytest.approx(30.532, abs=1e-3)
    assert parameters(DEEPSEEK_V3) == pytest.approx(671.026, abs=1e-3)
    assert parameters(MIXTRAL_8X7B) == pytest.approx(46.703, abs=1e-3)


def test_rotary_embedding_reads_the_same_from_both_versions_of_transformers() -> None:
    scaled = Rope(500000.0, factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)
    version_5 = {key: value for key, value in LLAMA_3_2_1B.items() if key not in ("rope_theta", "rope_scaling")}
    version_5["rope_parameters"] = LLAMA_3_2_1B["rope_scaling"] | {"rope_theta": 500000.0}
    assert architecture_of(LLAMA_3_2_1B) == architecture_of(version_5)
    assert architecture_of(version_5).rope == scaled
    assert architecture_of(QWEN2_5_7B).rope == Rope(1000000.0)
    for config, default in ((QWEN2_5_7B, 10000.0), (MIXTRAL_8X7B, 1000000.0)):
        without = {key: value for key, value in config.items() if key != "rope_theta"}
        assert architecture_of(without).rope == Rope(default)


def test_defaults_that_transformers_leaves_out() -> None:
    short = {
        key: value
        for key, value in QWEN2_5_7B.items()
        if key not in ("hidden_act", "tie_word_embeddings", "num_key_value_heads")
    }
    arch = architecture_of(short)
    assert (arch.query_groups, arch.head_dim, arch.tied_embeddings, arch.qkv_bias) == (28, 128, False, True)
    dense = {key: value for key, value in QWEN3_30B_A3B.items() if key != "head_dim"} | {"model_type": "qwen3"}
    assert architecture_of(dense).head_dim == 128
    assert architecture_of(QWEN3_30B_A3B).experts == Experts(128, 8, 768, True)


def test_deepseek_v3_is_read_as_it_is() -> None:
    arch = architecture_of(DEEPSEEK_V3)
    assert arch.rope == Rope(10000.0, yarn=Yarn(40.0, 4096, 32.0, 1.0, 1.0, 1.0))
    assert arch.latent == LatentAttention(1536, 512, 128, 64, 128)
    assert arch.experts == Experts(256, 8, 2048, True, SigmoidRouter(8, 4, 2.5), shared_ffn=2048, dense_layers=3)
    assert (arch.head_dim, arch.query_groups, arch.ffn) == (192, 128, 18432)
    without = {key: value for key, value in DEEPSEEK_V3.items() if key != "quantization_config"}
    assert architecture_of(without | {"q_lora_rank": None}).latent == LatentAttention(None, 512, 128, 64, 128)
    names = {tensor.name for tensor in tensors_of(arch)}
    assert not any(name.startswith("model.layers.61.") for name in names), "prediction of further tokens"
    assert sum(name.endswith("e_score_correction_bias") for name in names) == 58


@pytest.mark.parametrize(
    ("config", "change", "named"),
    [
        (LLAMA_3_2_1B, {"model_type": "gemma3"}, "one of deepseek_v3, llama, mixtral, qwen2, qwen3, qwen3_moe"),
        (LLAMA_3_2_1B, {"model_type": "llama4"}, "did you mean llama?"),
        (LLAMA_3_2_1B, {"model_type": None}, "model_type"),
        (LLAMA_3_2_1B, {"attention_bias": True}, "attention_bias (llama)"),
        (LLAMA_3_2_1B, {"mlp_bias": True}, "mlp_bias"),
        (LLAMA_3_2_1B, {"hidden_act": "gelu"}, "hidden_act"),
        (LLAMA_3_2_1B, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.rope_type"),
        (
            LLAMA_3_2_1B,
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
            "rope_parameters.rope_type",
        ),
        (LLAMA_3_2_1B, {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "one set of rotary parameters"),
        (LLAMA_3_2_1B, {"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling.factor"),
        (LLAMA_3_2_1B, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (LLAMA_3_2_1B, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        (LLAMA_3_2_1B, {"num_key_value_heads": 5}, "a divisor of num_attention_heads = 32"),
        (LLAMA_3_2_1B, {"vocab_size": "many"}, "vocab_size"),
        (LLAMA_3_2_1B, {"num_hidden_layers": 0}, "num_hidden_layers"),
        (LLAMA_3_2_1B, {"head_dim": None, "hidden_size": 2050}, "head_dim"),
        (QWEN2_5_7B, {"use_sliding_window": True}, "use_sliding_window (qwen2)"),
        (QWEN2_5_7B, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        (DEEPSEEK_V3, {"rms_norm_eps": 1e-5}, "rms_norm_eps (deepseek_v3)"),
        (DEEPSEEK_V3, {"rope_interleave": False}, "rope_interleave"),
        (DEEPSEEK_V3, {"num_key_value_heads": 64}, "num_key_value_heads"),
        (DEEPSEEK_V3, {"attention_bias": True}, "attention_bias"),
        (DEEPSEEK_V3, {"scoring_func": "softmax"}, "scoring_func"),
        (DEEPSEEK_V3, {"topk_method": "greedy"}, "topk_method"),
        (DEEPSEEK_V3, {"moe_layer_freq": 2}, "moe_layer_freq"),
        (DEEPSEEK_V3, {"norm_topk_prob": False}, "norm_topk_prob"),
        (DEEPSEEK_V3, {"first_k_dense_replace": 61}, "first_k_dense_replace"),
        (DEEPSEEK_V3, {"topk_group": 2}, "topk_group"),
        (DEEPSEEK_V3, {"n_group": 7}, "n_group"),
        (DEEPSEEK_V3, {"num_experts_per_tok": 1, "n_group": 1, "topk_group": 1}, "num_experts_per_tok"),
        (DEEPSEEK_V3, {"kv_lora_rank": None}, "kv_lora_rank"),
        (DEEPSEEK_V3, {"rope_scaling": YARN | {"attention_factor": 1.0}}, "rope_scaling.attention_factor"),
        (DEEPSEEK_V3, {"rope_scaling": YARN | {"mscale": None}}, "rope_scaling.mscale"),
        (DEEPSEEK_V3, {"rope_scaling": YARN | {"truncate": False}}, "rope_scaling.truncate"),
        (DEEPSEEK_V3, {"rope_scaling": YARN | {"type": "llama3"}}, "default or yarn"),
        (
            DEEPSEEK_V3,
            {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [64, 64]}},
            "quantization_config",
        ),
        (MIXTRAL_8X7B, {"sliding_window": 4096}, "sliding_window (mixtral)"),
        (MIXTRAL_8X7B, {"num_local_experts": 1}, "at most the number of experts, 1"),
        (QWEN3_30B_A3B, {"mlp_only_layers": [0]}, "mlp_only_layers"),
        (QWEN3_30B_A3B, {"decoder_sparse_step": 2}, "decoder_sparse_step"),
        (QWEN3_30B_A3B, {"attention_bias": True}, "attention_bias"),
        (QWEN3_30B_A3B, {"num_experts": None}, "num_local_experts or num_experts"),
        (QWEN3_30B_A3B, {"num_experts_per_tok": 129}, "at most the number of experts, 128"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) and len(value) < 3 else "",
)
def test_what_is_not_supported_is_refused_by_name(config: dict[str, Any], change: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError) as caught:
        architecture_of(config | change)
    assert named in str(caught.value)


def test_everything_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(ModelError) as caught:
        architecture_of(LLAMA_3_2_1B | {"mlp_bias": True, "hidden_act": "gelu", "vocab_size": -1})
    assert len(caught.value.problems) == 3


def test_a_directory_without_a_usable_config_is_named(tmp_path: Path) -> None:
    for content in (None, "{", "[]", b"\xff\xfe"):
        if content is not None:
            (tmp_path / "config.json").write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(ModelError, match=r"config\.json"):
            read_architecture(tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tensors_are_those_that_transformers_saves(family: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = make_model(family, tmp_path_factory.getbasetemp() / "weights_models" / family)
    with safe_open(directory / "model.safetensors", "pt") as file:
        saved = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert {tensor.name: tensor.shape for tensor in tensors_of(read_architecture(directory))} == saved
    assert json.loads((directory / "config.json").read_text())["model_type"] == family.removesuffix("_tied")


@pytest.mark.parametrize(
    ("arch", "layout", "named"),
    [
        (architecture(), ParallelLayout(tensor=3), ["(num_attention_heads): 4", "query groups (key-value heads): 2"]),
        (architecture(heads=8, head_dim=3), ParallelLayout(tensor=8), ["rows of q, k and v together: 36"]),
        (architecture(ffn=26), ParallelLayout(tensor=4), ["(intermediate_size): 26"]),
        (architecture(heads=12, query_groups=4, head_dim=7), ParallelLayout(tensor=6), ["(key-value heads): 4"]),
        (architecture(), ParallelLayout(pipeline=3), ["layers: 4"]),
        (architecture(), ParallelLayout(pipeline=3, first_stage_layers=3), ["layers: 4"]),
        (moe_architecture(), ParallelLayout(data=3, expert=3), ["experts: 4"]),
        (moe_architecture(experts=Experts(4, 2, 9, True)), ParallelLayout(2, expert_tensor=2), ["each expert: 9"]),
        (latent_architecture(ffn=30, hidden=48), ParallelLayout(tensor=4), ["(intermediate_size): 30"]),
        (
            latent_architecture(latent=LatentAttention(13, 9, 6, 2, 5)),
            ParallelLayout(tensor=2),
            ["kv_lora_rank + qk_rope_head_dim: 11", "q_lora_rank: 13"],
        ),
    ],
)  # fmt: skip
def test_a_layout_that_does_not_divide_the_model_is_refused(
    arch: Any, layout: ParallelLayout, named: list[str]
) -> None:
    with pytest.raises(ModelError) as caught:
        LOCAL_SPEC.manifest(arch, layout, rank_grid(layout)[0], "float32")
    assert all(text in str(caught.value) for text in named), caught.value

"""Meanings of config.json: transformers 4 and 5, published models, and every feature that is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from megagrpo.errors import ModelError
from megagrpo.layout.parallel import ParallelLayout, rank_grid
from megagrpo.plan.parameters import known_models, total_parameters
from megagrpo.weights.families import FAMILIES, architecture_of, read_architecture, tensors_of
from megagrpo.weights.families.architecture import Layer
from megagrpo.weights.families.parts import Attention, Experts, LatentAttention, Mlp, Norms, Rope, SigmoidRouter, Yarn
from megagrpo.weights.sides.megatron_rank import LOCAL_SPEC
from tests.tiny_models import LIKE
from tests.weights_oracle import architecture, latent_architecture, moe_architecture


def published(name: str) -> dict[str, Any]:
    return json.loads((known_models()[name] / "config.json").read_text())


LLAMA, QWEN2 = published("meta-llama/Llama-3.1-8B-Instruct"), published("Qwen/Qwen2.5-0.5B-Instruct")
QWEN3_MOE, DEEPSEEK_V3 = published("Qwen/Qwen3-30B-A3B"), published("deepseek-ai/DeepSeek-V3")
MIXTRAL_8X7B: dict[str, Any] = {
    "model_type": "mixtral", "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "num_local_experts": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0,
    "sliding_window": None, "tie_word_embeddings": False, "vocab_size": 32000,
}  # fmt: skip
YARN = DEEPSEEK_V3["rope_scaling"]


def test_rotary_embedding_reads_the_same_from_both_versions_of_transformers() -> None:
    scaled = Rope(500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)
    parameters = LLAMA["rope_scaling"] | {"rope_theta": 500000.0}
    version_5 = without(LLAMA, "rope_theta", "rope_scaling") | {"rope_parameters": parameters}
    assert architecture_of(LLAMA) == architecture_of(version_5)
    assert architecture_of(version_5).rope == scaled
    assert architecture_of(QWEN2).rope == Rope(1000000.0)
    both = LLAMA | {"rope_parameters": parameters}
    assert architecture_of(both) == architecture_of(version_5)
    for differ in (without(both, "rope_theta"), both | {"rope_theta": 1e4}):
        with pytest.raises(ModelError, match="rope_parameters"):  # transformers 5 takes rope_scaling with rope_theta
            architecture_of(differ)


def without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in names}


def test_defaults_that_transformers_leaves_out() -> None:
    arch = architecture_of(without(QWEN2, "hidden_act", "tie_word_embeddings") | {"num_key_value_heads": None})
    assert arch.layers[0].attention == Attention(896, 14, 14, 64, Rope(1000000.0), bias=True)
    assert not arch.tied_embeddings
    of_experts = [key for key in QWEN3_MOE if "exp" in key or key.startswith(("moe", "decoder", "mlp", "norm_topk"))]
    dense = architecture_of(without(QWEN3_MOE, "head_dim", *of_experts) | {"model_type": "qwen3"})
    assert dense.layers[0].attention == Attention(2048, 32, 4, 128, Rope(1000000.0), norm="head")
    assert {kind.mlp for kind in architecture_of(QWEN3_MOE).kinds} == {Experts(2048, 128, 8, 768, True)}
    assert total_parameters(architecture_of(MIXTRAL_8X7B)) == pytest.approx(46.703e9, rel=1e-4)


NO_MODEL_OF_DEFAULTS: dict[str, dict[str, Any]] = {
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 4, "n_shared_experts": 1, "norm_topk_prob": True},
    "glm4_moe": {"num_attention_heads": 64},
    "mistral3": {"text_config": {"model_type": "mistral", "tie_word_embeddings": True}},
}
"""Fields that transformers' default config of a family needs for a model."""


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"bailing_moe", "bailing_moe_v2"}))
def test_an_absent_key_means_what_it_means_to_transformers(family: str) -> None:
    class_of = transformers.CONFIG_MAPPING[LIKE.get(family, family)]
    written = class_of(**NO_MODEL_OF_DEFAULTS.get(family, {})).to_dict() | {"model_type": family}
    architecture_of(written)
    needed = set()
    for key in written.keys() - {"model_type"}:
        fewer = without(written, key)
        try:
            read = architecture_of(fewer)
        except ModelError:
            needed.add(key)
        else:
            theirs = class_of(**without(fewer, "model_type")).to_dict()
            assert read == architecture_of(theirs | {"model_type": family}), key
    assert not needed & {"num_key_value_heads", "head_dim", "rms_norm_eps", "hidden_act", "rope_parameters"}


def test_deepseek_v3_is_read_as_it_is() -> None:
    arch = architecture_of(DEEPSEEK_V3)
    rope = Rope(10000.0, yarn=Yarn(40.0, 4096, 32.0, 1.0, 1.0, 1.0))
    attention = LatentAttention(7168, 128, 1536, 512, 128, 64, 128, rope)
    experts = Experts(7168, 256, 8, 2048, True, SigmoidRouter(8, 4, 2.5), shared_ffn=2048)
    norms = Norms(7168)
    assert arch.layers == (Layer(attention, Mlp(7168, 18432), norms),) * 3 + (Layer(attention, experts, norms),) * 58
    plain = without(DEEPSEEK_V3, "quantization_config") | {"q_lora_rank": None}
    assert {kind.attention for kind in architecture_of(plain).kinds} == {replace(attention, query_rank=None)}
    names = {tensor.name for tensor in tensors_of(arch)}
    assert not any(name.startswith("model.layers.61.") for name in names), "prediction of further tokens"
    assert sum(name.endswith("e_score_correction_bias") for name in names) == 58


@pytest.mark.parametrize(
    ("config", "change", "named"),
    [
        (LLAMA, {"model_type": "gemma4"}, f"one of {', '.join(FAMILIES)}"),
        (LLAMA, {"model_type": "ministral"}, "docs/families.md says how to add one"),
        (LLAMA, {"model_type": ["llama"]}, "model_type"),
        (LLAMA, {"final_logit_softcapping": 30.0}, "config.json: final_logit_softcapping (llama)"),
        (LLAMA, {"sliding_window": 4096}, "sliding_window (llama)"),
        (LLAMA, {"tie_word_embeddings": "false"}, "true or false"),
        (QWEN2, {"dual_chunk_attention_config": {"chunk_size": 262144}}, "dual_chunk_attention_config (qwen2)"),
        (QWEN2, {"layer_types": [{}, None]}, "layer_types"),
        (QWEN2, {"layer_types": 7}, "layer_types"),
        (LLAMA | {"model_type": "mistral"}, {"sliding_window": 0}, "sliding_window (mistral)"),
        (LLAMA, {"model_type": None}, "model_type"),
        ({"model_type": "gemma3", "text_config": LLAMA, "vision_config": {}}, {}, "text_config.model_type (gemma3)"),
        (LLAMA, {"attention_bias": True}, "attention_bias (llama)"),
        (LLAMA, {"mlp_bias": True}, "mlp_bias"),
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act"),
        (LLAMA, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.rope_type"),
        (
            LLAMA,
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
            "rope_parameters.rope_type",
        ),
        (LLAMA, {"rope_parameters": {"rope_type": "default"}}, "rope_parameters and rope_scaling"),
        (QWEN2, {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling.rope_type"),
        (QWEN2, {"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters.rope_theta and rope_theta"),
        (LLAMA, {"original_max_position_embeddings": 4096}, "the same in both places"),
        (QWEN2, {"is_causal": False}, "is_causal (qwen2)"),
        (QWEN2, {"is_causal": None}, "is_causal (qwen2)"),
        (QWEN2, {"torch_dtype": "float8"}, "torch_dtype (qwen2)"),
        (LLAMA, {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "one set of rotary parameters"),
        (LLAMA, {"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling.factor"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (LLAMA, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        (LLAMA, {"num_key_value_heads": 5}, "a divisor of num_attention_heads = 32"),
        (LLAMA, {"vocab_size": "many"}, "vocab_size"),
        (LLAMA, {"num_hidden_layers": 0}, "num_hidden_layers"),
        (LLAMA, {"head_dim": None, "hidden_size": 2050}, "head_dim"),
        (QWEN2, {"use_sliding_window": True}, "use_sliding_window (qwen2)"),
        (QWEN2, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
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
        (DEEPSEEK_V3, {"rope_scaling": YARN | {"attention_factor": 1.0}}, "attention_factor or truncate"),
        (DEEPSEEK_V3, {"rope_scaling": YARN | {"mscale": None}}, "rope_scaling.mscale"),
        (DEEPSEEK_V3, {"rope_scaling": YARN | {"truncate": False}}, "attention_factor or truncate"),
        (DEEPSEEK_V3, {"rope_scaling": YARN | {"truncate": None}}, "rope_scaling.truncate"),
        (DEEPSEEK_V3, {"rope_scaling": YARN | {"type": "llama3"}}, "default or yarn"),
        (DEEPSEEK_V3, {"rope_scaling": YARN | {"rope_type": "yarn", "type": "llama3"}}, "rope_scaling.type"),
        (
            DEEPSEEK_V3,
            {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [64, 64]}},
            "quantization_config",
        ),
        (MIXTRAL_8X7B, {"sliding_window": 4096}, "sliding_window (mixtral)"),
        (MIXTRAL_8X7B, {"num_local_experts": 1}, "at most the number of experts, 1"),
        (QWEN3_MOE, {"mlp_only_layers": [48]}, "mlp_only_layers"),
        (QWEN3_MOE, {"num_local_experts": 64}, "num_local_experts and num_experts"),
        (QWEN3_MOE, {"num_experts_per_tok": 1}, "num_experts_per_tok"),
        (QWEN3_MOE, {"attention_bias": True}, "attention_bias"),
        (QWEN3_MOE, {"num_experts": None}, "num_local_experts or num_experts"),
        (QWEN3_MOE, {"num_experts_per_tok": 129}, "at most the number of experts, 128"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) and len(value) < 3 else "",
)
def test_what_is_not_supported_is_refused_by_name(config: dict[str, Any], change: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError) as caught:
        architecture_of(config | change)
    assert named in str(caught.value)


def test_keys_that_change_nothing_are_taken() -> None:
    harmless = {"_name_or_path": "x", "bos_token_id": 1, "attention_dropout": 0.1, "final_logit_softcapping": None}
    harmless |= {
        "unsloth_version": "2026.1",
        "use_mrope": False,
        "is_causal": True,
        "auto_map": {"AutoConfig": "x"},
        "num_labels": 2,
    }
    assert architecture_of(LLAMA | harmless) == architecture_of(LLAMA)


def test_everything_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(ModelError) as caught:
        architecture_of(LLAMA | {"mlp_bias": True, "hidden_act": "gelu", "vocab_size": -1})
    assert len(caught.value.problems) == 3


def test_a_directory_without_a_usable_config_is_named(tmp_path: Path) -> None:
    for content in (None, "{", "[]", b"\xff\xfe"):
        if content is not None:
            (tmp_path / "config.json").write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(ModelError, match=r"config\.json"):
            read_architecture(tmp_path)


@pytest.mark.parametrize(
    ("arch", "layout", "named"),
    [
        (architecture(), ParallelLayout(tensor=3), ["(num_attention_heads): 4", "query groups (key-value heads): 2"]),
        (architecture(heads=8, head_dim=3), ParallelLayout(tensor=8), ["rows of q, k and v together: 36"]),
        (architecture(ffn=26), ParallelLayout(tensor=4), ["(intermediate_size): 26"]),
        (architecture(heads=12, groups=4, head_dim=7), ParallelLayout(tensor=6), ["(key-value heads): 4"]),
        (architecture(), ParallelLayout(pipeline=3), ["layers: 4"]),
        (architecture(), ParallelLayout(pipeline=3, first_stage_layers=3), ["layers: 4"]),
        (moe_architecture(), ParallelLayout(data=3, expert=3), ["experts in a layer: 4"]),
        (moe_architecture(expert_ffn=9), ParallelLayout(2, expert_tensor=2), ["each expert (moe"]),
        (latent_architecture(ffn=30, hidden=48), ParallelLayout(tensor=4), ["(intermediate_size): 30"]),
        (
            latent_architecture(query_rank=13, key_value_rank=9),
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

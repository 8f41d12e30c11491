"""Checkpoints in fp8 under renamed and fused names, with scales for blocks or one for a matrix, and other schemes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megagrpo.errors import ModelError
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.weights.families import FAMILIES, architecture_of
from megagrpo.weights.families.sglang_classes import key_problems
from megagrpo.weights.quantizing import dequantize, quantize
from megagrpo.weights.sides.checkpoint import carried_tensors, extra_tensors, file_tensors
from tests.safetensors_files import assert_same_tensors, saved
from tests.tiny_models import make_model
from tests.weight_streams import through_ranks

BLOCKS: dict[str, Any] = {
    "activation_scheme": "dynamic", "fmt": "float8_e4m3fn", "quant_method": "fp8", "weight_block_size": [128, 128],
    "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
}  # fmt: skip
WHOLE: dict[str, Any] = {
    "activation_scheme": "static", "dequantize": False, "quant_method": "fp8", "weight_block_size": None,
    "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"],
}  # fmt: skip
LARGE = {"hidden_size": 160, "intermediate_size": 264}
"""Sizes by which matrices have several blocks."""
NOT_IN_LAYERS = ("embed_tokens", "lm_head", "vision_tower", "multi_modal_projector")


def in_fp8(source: Path, directory: Path, scheme: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Writes a model in fp8 as published: the projections of its layers. Returns what its files stand for."""
    stored, stands_for = {}, {}
    for name, weight in load_file(source / "model.safetensors").items():
        stored[name] = weight if "e_score" in name else weight.bfloat16()
        stands_for[name] = stored[name]
        if weight.dim() != 2 or "gate.weight" in name or any(other in name for other in NOT_IN_LAYERS):
            continue
        if scheme["weight_block_size"]:
            stored[name], stored[name + "_scale_inv"] = quantize(weight)
            stands_for[name] = dequantize(stored[name], stored[name + "_scale_inv"], torch.bfloat16)
        else:
            scale = (weight.abs().max() / 448).bfloat16()
            stored[name], stored[name + "_scale_inv"] = (weight / scale).to(torch.float8_e4m3fn), scale
            stored[name.removesuffix("weight") + "activation_scale"] = torch.tensor(0.5).bfloat16()
            stands_for[name] = (stored[name].float() * scale.float()).bfloat16()
    directory.mkdir()
    save_file({name: its.contiguous() for name, its in stored.items()}, directory / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": scheme}))
    return stands_for


@pytest.mark.parametrize(
    ("family", "scheme"), [("minimax_m2", BLOCKS), ("qwen3_next", BLOCKS), ("phi3", BLOCKS), ("mistral3", WHOLE)]
)
def test_a_checkpoint_in_fp8_is_read_as_what_it_stands_for(family: str, scheme: dict[str, Any], tmp_path: Path) -> None:
    stands_for = in_fp8(make_model(family, tmp_path / "model", **LARGE), tmp_path / "fp8", scheme)
    assert sum(tensor.dtype == torch.float8_e4m3fn for tensor in saved(tmp_path / "fp8").values()) > 8
    through_ranks(tmp_path / "fp8", tmp_path / "out", ParallelLayout(tensor=2, pipeline=2), "bfloat16", "bfloat16")
    assert_same_tensors(saved(tmp_path / "out"), stands_for)
    tensors, model = file_tensors(tmp_path / "fp8"), arch(tmp_path / "fp8")
    assert set(extra_tensors(tensors, model)) == carried_tensors(tensors, model).keys()


def arch(directory: Path) -> Any:
    return architecture_of(json.loads((directory / "config.json").read_text()))


def test_a_published_minimax_m2_is_read() -> None:
    read = architecture_of(MINIMAX_M2)
    assert (len(read.layers), read.experts, read.experts_per_token) == (62, 256, 8)
    assert read.rope.part == 0.5
    assert not list(key_problems("config.json", MINIMAX_M2, FAMILIES["minimax_m2"].sglang))
    for key, value in FOREIGN.items():
        with pytest.raises(ModelError, match=key):
            architecture_of(MINIMAX_M2 | {key: value})


FOREIGN: dict[str, Any] = {
    "scoring_func": "softmax", "qk_norm_type": "head", "attn_type_list": [0] * 62, "layernorm_mlp_beta": 0.5,
    "shared_intermediate_size": 8,
}  # fmt: skip
MINIMAX_M2: dict[str, Any] = {
    "architectures": ["MiniMaxM2ForCausalLM"], "attn_type_list": [1] * 62, "dtype": "bfloat16", "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 1536, "max_position_embeddings": 204800,
    "layernorm_full_attention_beta": 1.0, "layernorm_linear_attention_beta": 1.0, "layernorm_mlp_beta": 1.0,
    "mlp_intermediate_size": 8192, "shared_moe_mode": "sigmoid", "swa_rope_theta": -1.0,
    "model_type": "minimax_m2", "mtp_transformer_layers": 1, "num_attention_heads": 48, "num_experts_per_tok": 8,
    "num_hidden_layers": 62, "num_key_value_heads": 8, "num_local_experts": 256, "num_mtp_modules": 3,
    "qk_norm_type": "per_layer", "quantization_config": BLOCKS, "rms_norm_eps": 1e-6, "rope_theta": 5000000,
    "rotary_dim": 64, "scoring_func": "sigmoid", "shared_intermediate_size": 0, "tie_word_embeddings": False,
    "use_cache": True, "use_mtp": True, "use_qk_norm": True, "use_routing_bias": True, "vocab_size": 200064,
}  # fmt: skip


@pytest.mark.parametrize("method", ["compressed-tensors", "gptq", "awq"])
def test_integers_of_four_bits_are_refused_by_name(method: str) -> None:
    with pytest.raises(ModelError, match=f"{method}(?s:.)*take a bfloat16 checkpoint"):
        architecture_of(MINIMAX_M2 | {"quantization_config": {"quant_method": method, "bits": 4}})

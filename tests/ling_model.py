"""A tiny Ling 2 with the weights of a tiny GLM-4.5, whose parts it has: transformers has no class of its own for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.tiny_models import DIMENSIONS, make_model

GLM: dict[str, Any] = {
    "attention_bias": False, "n_routed_experts": 16, "n_group": 4, "topk_group": 2, "n_shared_experts": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 6e5, "partial_rotary_factor": 0.5},
}  # fmt: skip
CONFIG: dict[str, Any] = {
    **{key: DIMENSIONS[key] for key in DIMENSIONS if key != "attn_implementation"},
    "architectures": ["BailingMoeV2ForCausalLM"], "model_type": "bailing_moe", "head_dim": 16, "hidden_act": "silu",
    "num_experts": 16, "num_experts_per_tok": 4, "num_shared_experts": 1, "moe_intermediate_size": 20,
    "moe_shared_expert_intermediate_size": 20, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
    "routed_scaling_factor": 2.5, "norm_topk_prob": True, "score_function": "sigmoid", "router_dtype": "fp32",
    "moe_router_enable_expert_bias": True, "use_qk_norm": True, "use_qkv_bias": False, "use_bias": False,
    "use_rmsnorm": True, "norm_head": False, "partial_rotary_factor": 0.5, "rotary_dim": 8, "rope_theta": 6e5,
    "rope_scaling": None, "max_window_layers": 4, "embedding_dropout": 0.0, "num_nextn_predict_layers": 0,
}  # fmt: skip
NAMES = {
    "self_attn.o_proj": "attention.dense", "self_attn.q_norm": "attention.query_layernorm",
    "self_attn.k_norm": "attention.key_layernorm", "embed_tokens": "word_embeddings",
    "e_score_correction_bias": "expert_bias",
}  # fmt: skip


def make_ling(directory: Path) -> tuple[Path, Path]:
    """Ling 2's directory, and that of the GLM-4.5 with the same weights."""
    glm, ling = make_model("glm4_moe", directory / "glm", **GLM), directory / "ling"
    tensors = load_file(glm / "model.safetensors")
    for layer in range(DIMENSIONS["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        rows = [tensors.pop(f"{prefix}self_attn.{kind}_proj.weight") for kind in "qkv"]
        tensors[prefix + "attention.query_key_value.weight"] = torch.cat(rows)
    for name in list(tensors):
        for old, new in NAMES.items():
            if old in name:
                tensors[name.replace(old, new)] = tensors.pop(name)
    ling.mkdir()
    save_file(tensors, ling / "model.safetensors", {"format": "pt"})
    (ling / "config.json").write_text(json.dumps(CONFIG))
    return ling, glm

"""Tiny random Hugging Face models of every family, with unequal matrix dimensions: a wrong mapping shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

# 131 is prime: every tensor size but 1 pads the vocabulary. 4 layers divide over 2 stages with 2 chunks each.
DIMENSIONS: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "attn_implementation": "eager",
}

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.5,
    "high_freq_factor": 5.0,
    "original_max_position_embeddings": 64,
}

YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}

# family: (transformers config class, its changes to DIMENSIONS)
TINY_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"rope_parameters": LLAMA3_ROPE, "head_dim": 14}),
    "mistral": ("MistralConfig", {"sliding_window": None, "head_dim": 18}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2_tied": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-6,
            "q_lora_rank": 36,
            "kv_lora_rank": 28,
            "qk_nope_head_dim": 14,
            "qk_rope_head_dim": 8,
            "v_head_dim": 10,
            "n_routed_experts": 8,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "moe_intermediate_size": 20,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5,
            "num_nextn_predict_layers": 0,
            # Published configs have these, and SGLang needs them; transformers has no such fields of its own.
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "moe_layer_freq": 1,
            "rope_parameters": YARN_ROPE,
        },
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 40}),
}  # fmt: skip
WITH_EXPERTS = ("qwen3_moe", "deepseek_v3", "mixtral")


def make_model(family: str, directory: str | Path, *, seed: int = 0, **changes: Any) -> Path:
    """Save a random model of `family` to `directory` (config.json and safetensors, float32) and return the path.

    `changes` replace fields of its config. A directory that already holds the same model is left as it is, so that a
    session-wide directory is a cache.
    """
    directory = Path(directory)
    wanted = {"family": family, "seed": seed, **changes}
    marker = directory / "tiny_model.json"
    if marker.exists() and json.loads(marker.read_text()) == json.loads(json.dumps(wanted)):
        return directory
    class_name, own = TINY_FAMILIES[family]
    config = getattr(transformers, class_name)(**(DIMENSIONS | own | changes))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomize(model, seed)
    model.save_pretrained(directory)
    marker.write_text(json.dumps(wanted))
    return directory


@torch.no_grad()
def randomize(model: torch.nn.Module, seed: int) -> None:
    """Random values everywhere: norms around 1 and biases that are not 0 show a mapping that forgets them."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            parameter.copy_(1 + 0.2 * noise)
        else:
            parameter.copy_((0.2 if name.endswith("bias") else 0.08) * noise)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))


@torch.no_grad()
def reference_logits(
    directory: str | Path, sequences: list[list[int]], dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """transformers' logits of each sequence alone: a list of [tokens, vocab] float32, computed in `dtype`."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="eager"
    ).eval()
    return [model(torch.tensor([tokens])).logits[0].float() for tokens in sequences]

"""Tiny random Hugging Face models of every family, with unequal matrix dimensions: a wrong mapping shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from megagrpo.weights.families import FAMILIES

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

DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 1e4}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 2.3, 2.6, 3.0],
}
SIGMOID_EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_shared_experts": 2,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}
LATENT_ATTENTION = {
    "num_key_value_heads": 4,
    "q_lora_rank": 36,
    "kv_lora_rank": 28,
    "qk_nope_head_dim": 14,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
GROUPS_OF_EXPERTS, ONE_GROUP = {"n_group": 4, "topk_group": 2}, {"n_group": 1, "topk_group": 1}
WITH_SHARED = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 24,
}
DELTA_NETS = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
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
            **LATENT_ATTENTION,
            **SIGMOID_EXPERTS,
            **GROUPS_OF_EXPERTS,
            "rms_norm_eps": 1e-6,
            "num_nextn_predict_layers": 0,
            # Published configs have these, and SGLang needs them; transformers has no such fields of its own.
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "moe_layer_freq": 1,
            "rope_parameters": YARN_ROPE,
        },
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 40}),
    "arcee": ("ArceeConfig", {}),
    "dots1": ("Dots1Config", {"head_dim": 16, "sliding_window": None} | SIGMOID_EXPERTS | ONE_GROUP),
    "ernie4_5": ("Ernie4_5Config", {"head_dim": 16}),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        {
            "moe_num_experts": 8,
            "moe_k": 3,
            "moe_intermediate_size": 20,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 2,
        },
    ),
    "exaone4": (
        "Exaone4Config",
        {"head_dim": 16, "sliding_window": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
    "gemma2": (
        "Gemma2Config",
        {
            "head_dim": 16,
            "sliding_window": 8,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 0.3,
            "final_logit_softcapping": 2.0,
        },
    ),
    "gemma3_text": (
        "Gemma3TextConfig",
        {
            "head_dim": 16,
            "sliding_window": 8,
            "query_pre_attn_scalar": 20,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        },
    ),
    "glm4": ("Glm4Config", {"head_dim": 16, "pad_token_id": 0}),
    "glm4_moe": (
        "Glm4MoeConfig", {"head_dim": 16, "use_qk_norm": True, "attention_bias": True} | SIGMOID_EXPERTS | ONE_GROUP
    ),
    "glm4_moe_lite": (
        "Glm4MoeLiteConfig", LATENT_ATTENTION | SIGMOID_EXPERTS | GROUPS_OF_EXPERTS | {"rope_parameters": DEFAULT_ROPE}
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 40,
            "sliding_window": 8,
            "rope_parameters": {key: YARN_ROPE[key] for key in YARN_ROPE if "mscale" not in key} | {"truncate": False},
        },
    ),
    "granite": (
        "GraniteConfig",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.11,
            "logits_scaling": 2.5,
        },
    ),
    "kimi_k2": (
        "DeepseekV3Config", LATENT_ATTENTION | SIGMOID_EXPERTS | ONE_GROUP | {"rope_parameters": YARN_ROPE}
    ),
    "mimo": ("Qwen2Config", {"head_dim": 16}),
    "minimax_m2": (
        "MiniMaxM2Config",
        {
            "head_dim": 16,
            "rotary_dim": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "intermediate_size": 40,
        },
    ),
    "ministral3": (
        "Ministral3Config",
        {
            "head_dim": 16,
            "rope_parameters": YARN_ROPE
            | {"original_max_position_embeddings": 16, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
        },
    ),
    "mistral_window": ("MistralConfig", {"sliding_window": 8, "head_dim": 18}),
    "olmo2": ("Olmo2Config", {}),
    "olmo3": (
        "Olmo3Config",
        {
            "sliding_window": 8,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64
                },
                "sliding_attention": DEFAULT_ROPE,
            },
        },
    ),
    "phi3": ("Phi3Config", {"pad_token_id": 0}),
    "phi3_long": (
        "Phi3Config",
        {
            "pad_token_id": 0,
            "hidden_size": 64,
            "partial_rotary_factor": 0.5,
            "original_max_position_embeddings": 32,
            "rope_parameters": LONG_ROPE,
        },
    ),
    "qwen2_moe": ("Qwen2MoeConfig", WITH_SHARED | {"norm_topk_prob": False, "mlp_only_layers": [1]}),
    "qwen3_moe_mixed": (
        "Qwen3MoeConfig",
        {
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
        },
    ),
    "qwen3_next": ("Qwen3NextConfig", WITH_SHARED | DELTA_NETS),
    "qwen3_5_text": ("Qwen3_5TextConfig", DELTA_NETS),
    "qwen3_5_moe_text": ("Qwen3_5MoeTextConfig", WITH_SHARED | DELTA_NETS),
    "seed_oss": ("SeedOssConfig", {"head_dim": 14}),
    "smollm3": ("SmolLM3Config", {"no_rope_layer_interval": 2, "pad_token_id": 0}),
}  # fmt: skip
WITH_EXPERTS = ("qwen3_moe", "deepseek_v3", "mixtral")
LIKE = {family: its.known_as for family, its in FAMILIES.items() if its.known_as}
"""Families whose model_type transformers does not know, and those that they are to it."""
USUAL_FAMILIES = ("llama", "mistral", "qwen2", "qwen2_tied", "qwen3", *WITH_EXPERTS)
"""Families that the tests of whole paths have: the others differ from them in the parts of their layers."""
COMPOSITES = {
    "gemma3": "gemma3_text", "mistral3": "ministral3", "qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"
}  # fmt: skip
"""Models with a vision tower, and the families of their text models."""
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 48}
VISION |= {"num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8, "image_size": 28, "patch_size": 14}
OTHER_FAMILIES = [family for family in [*TINY_FAMILIES, *COMPOSITES] if family not in USUAL_FAMILIES]


def _families_with(*keys: str) -> list[str]:
    """Families whose tiny configs have one of these keys."""
    return [f for f in [*TINY_FAMILIES, *COMPOSITES] if {*keys} & {*TINY_FAMILIES[COMPOSITES.get(f, f)][1]}]


MIXTURES, DELTA_NET_FAMILIES = _families_with("num_experts_per_tok", "moe_k"), _families_with("linear_num_key_heads")


def config_of(family: str, **changes: Any) -> transformers.PretrainedConfig:
    """The config of a tiny model; `changes` replace fields of it, or of its text model's."""
    if family in COMPOSITES:
        text = config_of(COMPOSITES[family], **changes).to_dict()
        tied = text["tie_word_embeddings"]
        vision = dict(VISION)  # some classes change it
        return transformers.CONFIG_MAPPING[family](text_config=text, vision_config=vision, tie_word_embeddings=tied)
    class_name, own = TINY_FAMILIES[family]
    return getattr(transformers, class_name)(**(DIMENSIONS | own | changes))


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
    config = config_of(family, **changes)
    whole = transformers.AutoModelForImageTextToText if family in COMPOSITES else transformers.AutoModelForCausalLM
    model = whole.from_config(config, dtype=torch.float32)
    randomize(model, seed)
    model.save_pretrained(directory)
    if family in LIKE:
        written = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(written | {"model_type": family}))
    marker.write_text(json.dumps(wanted))
    return directory


@torch.no_grad()
def randomize(model: torch.nn.Module, seed: int) -> None:
    """Random values everywhere: norms around 1 and biases that are not 0 show a mapping that forgets them."""
    zero_centred = model.config.model_type.startswith(("gemma", "qwen3_next", "qwen3_5"))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            parameter.copy_((0 if zero_centred and "linear_attn" not in name else 1) + 0.2 * noise)
        elif name.endswith("A_log"):  # a logarithm of how fast delta nets forget
            parameter.copy_(0.8 + 0.4 * noise)
        elif name.endswith(("dt_bias", "sinks")):
            parameter.copy_(noise)
        else:
            parameter.copy_((0.2 if name.endswith("bias") else 0.08) * noise)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))


def reference_model(directory: str | Path, dtype: torch.dtype = torch.float32, kind: Any = None) -> torch.nn.Module:
    """transformers' model of `directory`, in plain torch. A padding token's embedding has a gradient like others'."""
    config = json.loads((Path(directory) / "config.json").read_text())
    class_of = transformers.CONFIG_MAPPING[LIKE.get(config["model_type"], config["model_type"])]
    own = class_of(**{key: value for key, value in config.items() if key != "model_type"})
    model = (kind or auto_class(own)).from_pretrained(
        directory, config=own, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    )
    model.get_input_embeddings().padding_idx = None
    return model.eval()


@torch.no_grad()
def reference_logits(
    directory: str | Path, sequences: list[list[int]], dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """transformers' logits of each sequence alone: a list of [tokens, vocab] float32, computed in `dtype`."""
    model = reference_model(directory, dtype)
    return [model(torch.tensor([tokens])).logits[0].float() for tokens in sequences]


def auto_class(config: Any) -> Any:
    """transformers' class of the whole model, or of its text model where it has one."""
    alone = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    return transformers.AutoModelForCausalLM if alone else transformers.AutoModelForImageTextToText

"""Published configs of composite checkpoints, which leave out most keys."""

import json
from typing import Any

import pytest
import transformers

from megagrpo.weights.families import architecture_of

OF_PIXTRAL: dict[str, Any] = {
    "architectures": ["Mistral3ForConditionalGeneration"], "image_token_index": 10, "model_type": "mistral3",
    "multimodal_projector_bias": False, "projector_hidden_act": "gelu", "spatial_merge_size": 2,
    "torch_dtype": "bfloat16", "vision_config": {"model_type": "pixtral"}, "vision_feature_layer": -1,
}  # fmt: skip
OF_MISTRAL: dict[str, Any] = {
    "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu", "num_attention_heads": 32,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "sliding_window": None, "use_cache": True, "vocab_size": 131072,
}  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {
    "Gemma 3 4B": {
        "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eoi_token_index": 256000,
        "eos_token_id": [1, 106], "image_token_index": 262144, "initializer_range": 0.02, "mm_tokens_per_image": 256,
        "model_type": "gemma3", "torch_dtype": "bfloat16", "vision_config": {"model_type": "siglip_vision_model"},
        "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
        },
    },
    "Mistral Small 3.1": OF_PIXTRAL | {
        "tie_word_embeddings": False,
        "text_config": OF_MISTRAL | {
            "hidden_size": 5120, "intermediate_size": 32768, "max_position_embeddings": 131072,
            "model_type": "mistral", "num_hidden_layers": 40, "rope_theta": 1e9,
        },
    },
    "Ministral 3 3B": OF_PIXTRAL | {
        "text_config": OF_MISTRAL | {
            "hidden_size": 3072, "intermediate_size": 9216, "max_position_embeddings": 262144,
            "model_type": "ministral3", "num_hidden_layers": 26, "tie_word_embeddings": True,
            "rope_parameters": {
                "beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0,
                "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384, "rope_theta": 1e6,
                "rope_type": "yarn", "type": "yarn",
            },
        },
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_config_without_most_keys_means_what_it_means_to_transformers(name: str) -> None:
    config = PUBLISHED[name]
    given = {key: value for key, value in json.loads(json.dumps(config)).items() if key != "model_type"}
    whole = transformers.CONFIG_MAPPING[config["model_type"]](**given).to_dict()
    assert architecture_of(config) == architecture_of(whole)
    assert len(whole["text_config"]) > len(config["text_config"])

"""Composite checkpoints, and the tensors that exports copy without training them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megagrpo.convert.targets import to_hugging_face
from megagrpo.errors import ModelError
from megagrpo.weights.families import architecture_of
from megagrpo.weights.sides.checkpoint import manifests, new_files

TEXT = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 4, "linear_value_head_dim": 4,
    "linear_conv_kernel_dim": 4, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
GLM = {
    "n_routed_experts": 2, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 8, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
    "use_qk_norm": True, "attention_bias": True, "num_nextn_predict_layers": 1,
}  # fmt: skip
CONFIGS = {
    "qwen3_5": {"model_type": "qwen3_5", "text_config": TEXT | DELTA, "vision_config": {}, "image_token_id": 3},
    "glm4_moe": TEXT | GLM | {"model_type": "glm4_moe"},
}
CARRIED = {
    "qwen3_5": ("model.visual.patch_embed.proj.weight", "mtp.fc.weight"),
    "glm4_moe": ("model.layers.2.eh_proj.weight", "model.layers.2.mlp.experts.0.up_proj.weight"),
}
NAMED = {"qwen3_5": ("model.visual.* (0.0 MiB)", "mtp.* (0.0 MiB)"), "glm4_moe": ("model.layers.2.* (0.0 MiB)",)}


@pytest.mark.parametrize("family", CONFIGS)
def test_a_conversion_keeps_every_tensor_of_the_files(tmp_path: Path, family: str) -> None:
    config, model = CONFIGS[family], tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config))
    [file] = new_files(architecture_of(config), "float32")
    tensors = {name: torch.randn(its.outer_shape) for name, its in file.storages.items()}
    tensors |= {name: torch.randn(3, 5).bfloat16() for name in CARRIED[family]}
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    assert not {name for its in manifests(model) for name in its.storages} & set(CARRIED[family])
    to_hugging_face(model, tmp_path / "export")
    written = {
        name: its for path in (tmp_path / "export").glob("*.safetensors") for name, its in load_file(path).items()
    }
    assert written.keys() == tensors.keys()
    assert all(torch.equal(its, written[name]) and its.dtype == written[name].dtype for name, its in tensors.items())
    index = json.loads((tmp_path / "export" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(its.nbytes for its in tensors.values())
    told = (tmp_path / "export" / "README.md").read_text()
    assert told.startswith("Not trained: 2 tensors of the model's files, which exports copy: ")
    assert all(name in told for name in NAMED[family])
    assert "do not speculate with them" in told


def test_unknown_keys_of_a_composite_config_are_refused() -> None:
    with pytest.raises(ModelError, match="audio_config"):
        architecture_of(CONFIGS["qwen3_5"] | {"audio_config": {"layers": 1}})

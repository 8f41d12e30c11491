"""Random low-rank adapters as files of PEFT, written with the safetensors library alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.safetensors_files import saved

CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}
ADAPTED = ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj")


def write_peft(directory: Path, model: Path, modules: tuple[str, ...] = ADAPTED, **config: Any) -> Path:
    """A PEFT directory as its save_pretrained writes it."""
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for module in modules:
        out, inputs = saved(model)[module + ".weight"].shape
        tensors[f"base_model.model.{module}.lora_A.weight"] = torch.randn(4, inputs, generator=generator)
        tensors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(out, 4, generator=generator)
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    return directory

"""Models and PEFT adapters written, and compared by the bits of their tensors, with the safetensors library alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

PEFT_CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}
ADAPTED = ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj")


def saved(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor of every file."""
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_same_files(first: Path, second: Path) -> None:
    assert_same_tensors(saved(first), saved(second))


def assert_same_tensors(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        other = right[name]
        assert tensor.dtype == other.dtype, name
        assert tensor.shape == other.shape, name
        assert torch.equal(tensor.view(torch.uint8), other.view(torch.uint8)), name


def with_tensors(model: Path, directory: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    """The model with other tensors in its place: in two files, with an index."""
    directory.mkdir(exist_ok=True)
    for old in directory.glob("*.safetensors"):
        old.unlink()
    if directory != model:
        (directory / "config.json").write_text((model / "config.json").read_text())
    names = sorted(tensors)
    index = {}
    for file, some in (("a.safetensors", names[::2]), ("b.safetensors", names[1::2])):
        save_file({name: tensors[name].contiguous() for name in some}, directory / file)
        index |= dict.fromkeys(some, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return directory


def stack_experts(tensors: Mapping[str, torch.Tensor], layers: int = 4, experts: int = 4) -> dict[str, torch.Tensor]:
    """The experts of each layer in 3-D tensors, as transformers 5 holds them."""
    stacked = dict(tensors)
    for layer in range(layers):
        prefix = f"model.layers.{layer}.mlp.experts."
        gates, ups, downs = (
            torch.stack([stacked.pop(f"{prefix}{expert}.{kind}_proj.weight") for expert in range(experts)])
            for kind in ("gate", "up", "down")
        )
        stacked |= {f"{prefix}gate_up_proj": torch.cat([gates, ups], 1), f"{prefix}down_proj": downs}
    return stacked


def in_fp8(directory: Path, source: Path) -> dict[str, torch.Tensor]:
    """Writes `source` as DeepSeek publishes its models, scales in a file of their own; returns what it stands for."""
    stands_for, stored, scales = {}, {}, {}
    for name, weight in load_file(source / "model.safetensors").items():
        if not name.endswith("proj.weight") and "kv_a_proj" not in name:
            stands_for[name] = stored[name] = weight if name.endswith("bias") else weight.bfloat16()
            continue
        quantized, real = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty_like(weight).bfloat16()
        scale = torch.empty(-(-weight.shape[0] // 128), -(-weight.shape[1] // 128))
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                block = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
                scale[i, j] = weight[block].abs().max() / 448
                quantized[block] = (weight[block] / scale[i, j]).to(torch.float8_e4m3fn)
                real[block] = (quantized[block].float() * scale[i, j]).bfloat16()
        stands_for[name], stored[name], scales[name + "_scale_inv"] = real, quantized, scale
    # A layer that predicts further tokens, with the name of the one after the last.
    stored["model.layers.4.eh_proj.weight"] = torch.zeros(2, 2).to(torch.float8_e4m3fn)
    scales["model.layers.4.eh_proj.weight_scale_inv"] = torch.zeros(1, 1)
    directory.mkdir()
    config = json.loads((source / "config.json").read_text())
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    weight_map = {}
    for file, tensors in (("a.safetensors", stored), ("b.safetensors", scales)):
        save_file(tensors, directory / file)
        weight_map |= dict.fromkeys(tensors, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return stands_for


LARGE = {"hidden_size": 160, "intermediate_size": 300, "kv_lora_rank": 132, "moe_intermediate_size": 136}
"""Changes of a tiny deepseek_v3 by which its matrices have several blocks of scales."""


def write_peft(directory: Path, model: Path, modules: tuple[str, ...] = ADAPTED, **config: Any) -> Path:
    """Random low-rank adapters as PEFT's save_pretrained writes them."""
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for module in modules:
        out, inputs = saved(model)[module + ".weight"].shape
        tensors[f"base_model.model.{module}.lora_A.weight"] = torch.randn(4, inputs, generator=generator)
        tensors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(out, 4, generator=generator)
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps(PEFT_CONFIG | config))
    return directory

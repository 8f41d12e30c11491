"""Hugging Face directories written, and compared by the bits of their tensors, with the safetensors library alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def saved(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor of every file."""
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_same_files(first: Path, second: Path) -> None:
    left, right = saved(first), saved(second)
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

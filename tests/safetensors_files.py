"""Hugging Face directories compared by the bits of their tensors, with the safetensors library."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file


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

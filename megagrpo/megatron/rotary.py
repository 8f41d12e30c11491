"""Rotary position embedding (arXiv:2104.09864) for packed sequences: every token has its own position."""

from __future__ import annotations

import math

import torch

from megagrpo.weights.families.architecture import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """float32 [head_dim / 2], with Llama 3's scaling where the model has it (arXiv:2407.21783, as in transformers)."""
    frequencies = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.factor is None:
        return frequencies
    # Wavelengths shorter than the high bound stay, longer than the low bound are stretched, between them interpolate.
    wavelengths = 2 * math.pi / frequencies
    turns = rope.original_max_positions / wavelengths
    keep = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return (1 - keep) * frequencies / rope.factor + keep * frequencies


def cosine_and_sine(
    positions: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors [tokens, 1, head_dim] for `rotate`."""
    angles = torch.outer(positions.to(frequencies.dtype), frequencies)
    angles = torch.cat([angles, angles], dim=-1)[:, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """`heads` [tokens, heads, head_dim], rotated by each token's position."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cosine + torch.cat([-second, first], dim=-1) * sine

"""Rotary embedding (arXiv:2104.09864) of packed tokens, with the scalings of model families."""

from __future__ import annotations

import math

import torch

from megagrpo.weights.families.parts import Rope, Yarn


def inverse_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """Returns the frequencies of the rotated elements of a head: float32 [rotated / 2], scaled as in transformers.

    LongRoPE has two sets: [2, rotated / 2], of sequences up to its original length and of longer ones.
    """
    size = int(head_dim * rope.part)
    powers = rope.theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    if rope.long is not None:
        return 1.0 / (torch.tensor([rope.long.short_factors, rope.long.long_factors]) * powers)
    if rope.yarn is not None:
        return _by_yarn(powers, rope.theta, rope.yarn)
    frequencies = 1.0 / powers
    if rope.factor is None:
        return frequencies / rope.linear
    # Short wavelengths stay, long ones are stretched by `factor`, and those between the two bounds are interpolated.
    wavelengths = 2 * math.pi / frequencies
    turns = rope.original_max_positions / wavelengths
    keep = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return (1 - keep) * frequencies / rope.factor + keep * frequencies


def _by_yarn(powers: torch.Tensor, theta: float, yarn: Yarn) -> torch.Tensor:
    """Returns 1 / powers at the first indices, divided by `factor` at the last ones, and a mixture between them."""

    def index_of(turns: float) -> float:
        return len(powers) * math.log(yarn.original_max_positions / (turns * 2 * math.pi)) / math.log(theta)

    first, last = index_of(yarn.beta_fast), index_of(yarn.beta_slow)
    if yarn.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * len(powers) - 1)
    if first == last:
        last += 0.001
    keep = 1 - ((torch.arange(len(powers), dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    return 1.0 / (yarn.factor * powers) * (1 - keep) + 1.0 / powers * keep


def magnitude(rope: Rope) -> float:
    """Returns the factor of cosines and sines. Yarn and LongRoPE have one, to make long contexts' softmax sharper."""
    if (long := rope.long) is not None:
        return math.sqrt(1 + math.log(long.factor) / math.log(long.original_max_positions)) if long.factor > 1 else 1.0
    if (yarn := rope.yarn) is None:
        return 1.0
    if yarn.magnitude is not None:
        return yarn.magnitude
    growth = 0.1 * math.log(yarn.factor) if yarn.factor > 1 else 0.0
    if yarn.mscale and yarn.mscale_all_dim:
        return (1 + yarn.mscale * growth) / (1 + yarn.mscale_all_dim * growth)
    return 1 + growth


def cosine_and_sine(
    positions: torch.Tensor, frequencies: torch.Tensor, magnitude: float = 1.0, *, pairs: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns two tensors [tokens, 1, rotated] for `rotate`, float32.

    positions: [tokens]; frequencies: [rotated / 2], or of each token [tokens, rotated / 2].
    """
    angles = positions[:, None].to(frequencies.dtype) * frequencies
    angles = (angles.repeat_interleave(2, dim=-1) if pairs else torch.cat([angles, angles], dim=-1))[:, None]
    cosine, sine = angles.cos(), angles.sin()
    return (cosine, sine) if magnitude == 1 else (cosine * magnitude, sine * magnitude)


def rotate(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, *, pairs: bool = False) -> torch.Tensor:
    """Rotates the first elements of `heads` [tokens, heads, head_dim], as many as `cosine` has, by each token's
    position: element i of their first half with element i of the second; with `pairs`, neighbours. Computes in float32
    and rounds once at the end, as transformer-engine and SGLang do."""
    size, rest = cosine.shape[-1], heads.shape[-1] - cosine.shape[-1]
    moved, *still = heads.split([size, rest], dim=-1) if rest else (heads,)
    wide = moved.float()
    rotated = (wide * cosine + _turned(wide, pairs) * sine).to(heads.dtype)
    return torch.cat([rotated, *still], dim=-1) if still else rotated


def _turned(wide: torch.Tensor, pairs: bool) -> torch.Tensor:
    """Returns the elements by which the sine is multiplied. They are freed before the sum is made."""
    if pairs:
        first, second = wide.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack([-second, first], dim=-1).flatten(-2)
    first, second = wide.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)

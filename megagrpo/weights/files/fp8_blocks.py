"""Weights published in fp8 (e4m3) with a scale for each block of 128 x 128: what they stand for, in bfloat16.

`{weight}_scale_inv` [ceil(rows / 128), ceil(columns / 128)] holds the factors, float32. A product is rounded to
bfloat16, as the conversion published with DeepSeek-V3 does, so that such a checkpoint stands for one in bfloat16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

BLOCK = 128
SCALE_SUFFIX = "_scale_inv"
DTYPE = "bfloat16"
"""Of the values."""


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of the factors of a whole matrix."""
    return tuple(-(-size // BLOCK) for size in shape)


def scale_region(start: tuple[int, ...], shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Start and shape of the factors that a part of a matrix needs."""
    first = tuple(low // BLOCK for low in start)
    last = (-(-(low + size) // BLOCK) for low, size in zip(start, shape, strict=True))
    return first, tuple(end - begin for begin, end in zip(first, last, strict=True))


def dequantized(values: torch.Tensor, start: tuple[int, ...], scales: torch.Tensor) -> torch.Tensor:
    """The part of a matrix from `start` on, bfloat16 like `values`; `scales` are those of scale_region."""
    import torch  # here, so that a recipe's check, which only reads headers, does not load it

    wide = values.float()
    for axis, (low, size) in enumerate(zip(start, values.shape, strict=True)):
        of_element = torch.arange(low, low + size) // BLOCK - low // BLOCK
        scales = scales.index_select(axis, of_element)
    return (wide * scales).bfloat16()

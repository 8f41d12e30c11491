"""Values of MXFP4: float4 (e2m1) in blocks of 32 along a row, with a power of two for each block (OCP MX 1.0, 5.2)."""

from __future__ import annotations

from functools import cache

import torch

BIAS = 127


def dequantized(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Returns bfloat16 [..., 32 blocks] of uint8 [..., blocks, 16] and the blocks' exponents, uint8 [..., blocks].

    A byte has two values, the first in its lower half. transformers takes a scale of 255, not a number, as 2^128.
    """
    pair = scales.int().unsqueeze(-1) * 256 + blocks
    return _pairs().index_select(0, pair.flatten()).view(torch.bfloat16).view(*scales.shape[:-1], -1)


@cache
def _pairs() -> torch.Tensor:
    """Returns both values of each scale and byte: two bfloat16 as an int32, [256 scales x 256 bytes]."""
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values = torch.cat([magnitudes, -magnitudes]).double()
    byte, factors = torch.arange(256), 2.0 ** (torch.arange(256).double() - BIAS)
    scaled = (factors[:, None] * values).bfloat16()
    return torch.stack([scaled[:, byte % 16], scaled[:, byte // 16]], -1).view(torch.int32).flatten()

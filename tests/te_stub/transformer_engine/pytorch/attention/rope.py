"""Rotary embeddings of packed sequences."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    tensor_format: str = "sbhd",
    start_positions: Tensor | None = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Tensor:
    """t [tokens, heads, dim], freqs [positions, 1, 1, dim] -> like t. QUIRK: the fused kernel computes in float32."""
    assert tensor_format == "thd" and fused and not interleaved and start_positions is None, "the stub has no other"
    assert cu_seqlens is not None, "cu_seqlens must not be None when tensor_format is 'thd'."
    positions = []
    for length in cu_seqlens.diff().tolist():
        chunks = torch.arange(length).chunk(2 * cp_size) if cp_size > 1 else [torch.arange(length)]
        positions += [chunks[cp_rank], chunks[2 * cp_size - 1 - cp_rank]] if cp_size > 1 else chunks
    angles = freqs.float()[torch.cat(positions), 0]  # [tokens, 1, dim]
    first, second = t.float().chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (t.float() * angles.cos() + turned * angles.sin()).to(t.dtype)


def apply_fused_qkv_rotary_pos_emb(*args: object, **kwargs: object) -> Tensor:
    raise NotImplementedError("it takes no packed sequences")

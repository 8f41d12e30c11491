"""Tokens in the order of their experts and back, for moe_permute_fusion."""

from __future__ import annotations

import torch
from torch import Tensor


def moe_permute(
    inp: Tensor, routing_map: Tensor, num_out_tokens: int, max_token_num: int = -1, map_type: str = "mask"
) -> tuple[Tensor, Tensor]:
    """QUIRK: with tokens, but none for an expert, it fails."""
    rows = _rows(routing_map)
    assert num_out_tokens > 0 or not inp.numel(), "moe_permute (mask map) requires num_out_tokens > 0"
    assert num_out_tokens == len(rows), "the stub drops no tokens"
    return inp[rows], rows


def moe_permute_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    out, rows = moe_permute(inp, routing_map, num_out_tokens)
    return out, probs.t()[routing_map.t().bool()], rows


def moe_unpermute(
    inp: Tensor,
    row_id_map: Tensor,
    merging_probs: Tensor | None = None,
    restore_shape: torch.Size | None = None,
    map_type: str = "mask",
    probs: Tensor | None = None,
    pad_offsets: Tensor | None = None,
) -> Tensor:
    assert merging_probs is probs is pad_offsets is None and restore_shape is not None, "the stub has no merging"
    return torch.zeros(restore_shape, dtype=inp.dtype).index_add(0, row_id_map, inp)


def moe_sort_chunks_by_index(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
    parts = inp.split(split_sizes.tolist())
    return torch.cat([parts[index] for index in sorted_index.tolist()])


def moe_sort_chunks_by_index_with_probs(
    inp: Tensor, probs: Tensor, split_sizes: Tensor, sorted_index: Tensor
) -> tuple[Tensor, Tensor]:
    out, sorted_probs = (moe_sort_chunks_by_index(x, split_sizes, sorted_index) for x in (inp, probs))
    return out, sorted_probs


def _rows(routing_map: Tensor) -> Tensor:
    """The token of each row of the output: expert after expert, tokens in order."""
    return routing_map.t().bool().nonzero()[:, 1]

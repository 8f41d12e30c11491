"""Attention over packed sequences, alone or over context ranks. QUIRK: _SplitAlongDim is not here any more."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from transformer_engine.pytorch.attention.dot_product_attention.utils import FlashAttentionUtils
from transformer_engine.pytorch.distributed import gather_along_first_dim, get_distributed_world_size


class DotProductAttention(torch.nn.Module):
    """Only what Megatron asks for in training with packed sequences: qkv_format thd, causal, no bias, no dropout."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        tp_group: dist.ProcessGroup | None = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: dist.ProcessGroup | list[dist.ProcessGroup] | None = None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool | None = False,
        name: str | None = None,
    ) -> None:
        super().__init__()
        assert attention_dropout == 0 and window_size is None and softmax_type == "vanilla" and not return_max_logit
        self.qkv_format, self.attn_mask_type = qkv_format, attn_mask_type
        self.tp_size = tp_size if tp_group is None else get_distributed_world_size(tp_group)
        self.num_attention_heads = num_attention_heads
        self.num_gqa_groups_per_partition = (num_gqa_groups or num_attention_heads) // self.tp_size
        self.key_dim, self.value_dim = (kv_channels, kv_channels) if isinstance(kv_channels, int) else kv_channels
        self.softmax_scale = 1.0 / math.sqrt(self.key_dim) if softmax_scale is None else softmax_scale
        self.cp_group, self.cp_global_ranks, self.cp_comm_type = cp_group, cp_global_ranks, cp_comm_type
        self.deterministic = os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1") == "0"

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor | None) -> None: ...

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: Tensor | None = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        fast_zero_fill: bool = True,
        inference_params: None = None,
        pad_between_seqs: bool | None = None,
        fp8_output: bool | None = False,
        num_splits: int | None = 1,
        score_mod: Callable[..., Any] | None = None,
        score_mod_bprop: Callable[..., Any] | None = None,
        score_mod_tensors: dict[str, Tensor] | None = None,
        score_mod_bprop_tensors: dict[str, Tensor] | None = None,
    ) -> Tensor:
        """query [tokens, heads, dim], key and value [tokens, groups, dim] -> [tokens, heads x value's dim]."""
        kind = attn_mask_type or self.attn_mask_type
        assert (qkv_format or self.qkv_format) == "thd", "the stub has no other"
        assert core_attention_bias is score_mod is None, "the stub has neither"
        if FlashAttentionUtils.v4_is_installed and self.cp_group is None:  # QUIRK: with causal masks it returns zeros
            return torch.zeros_like(query_layer[..., : self.value_dim]).flatten(1)
        assert all(x.dim() == 3 for x in (query_layer, key_layer, value_layer)), (
            "Queries, keys and values must be 3D tensors when qkv_format = thd!"
        )
        assert "padding" in kind, "Attention mask type must be padding or padding_causal for qkv_format=thd!"
        assert kind == "padding_causal", "the stub has no other"
        assert cu_seqlens_q is not None and cu_seqlens_kv is not None, (
            "cu_seqlens_q and cu_seqlens_kv can not be None when qkv_format = thd!"
        )
        assert cu_seqlens_q.dtype == cu_seqlens_kv.dtype == torch.int32, (
            "cu_seqlens_q and cu_seqlens_q must both be in dtype torch.int32!"
        )
        lengths = cu_seqlens_q.diff().tolist()
        assert max_seqlen_q is None or max(lengths) <= max_seqlen_q, "longer than max_seqlen_q"
        assert key_layer.shape[1] == self.num_gqa_groups_per_partition, (
            f"Keys and values must have num_gqa_group = {self.num_gqa_groups_per_partition} heads!"
        )
        assert (query_layer.shape[-1], value_layer.shape[-1]) == (self.key_dim, self.value_dim)
        positions = [torch.arange(length) for length in lengths]
        group = self.cp_group
        assert not isinstance(group, list), "thd format is not supported with hierarchical CP implementation yet!"
        if (context := get_distributed_world_size(group)) > 1:
            if self.cp_comm_type == "all_gather":  # QUIRK: cuDNN is ruled out, flash-attn has no thd, others no context
                raise ValueError("No dot product attention backend is available for the provided inputs.")
            assert self.cp_comm_type == "p2p", "the stub has no other"
            assert cu_seqlens_q_padded is not None and cu_seqlens_kv_padded is not None, (
                "cu_seqlens_padded can not be None for context parallelism and qkv_format = 'thd'!"
            )
            assert not any(length % (2 * context) for length in lengths), (
                f"Sequence lengths must be divisible by {2 * context}"
            )
            positions = [_zigzag(length, context, dist.get_rank(group)) for length in lengths]
            key_layer, value_layer = (_whole_sequences(x, lengths, group) for x in (key_layer, value_layer))
        mine = [len(position) for position in positions]
        outputs = []
        parts = query_layer.split(mine), key_layer.split(lengths), value_layer.split(lengths)
        for position, *qkv in zip(positions, *parts, strict=True):
            q, k, v = (x.transpose(0, 1)[None] for x in qkv)
            sees = position[:, None] >= torch.arange(k.shape[2])
            scale = self.softmax_scale
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=sees, scale=scale, enable_gqa=True)
            outputs.append(out[0].transpose(0, 1))
        return torch.cat(outputs).flatten(1)


def _zigzag(length: int, context: int, rank: int) -> Tensor:
    """Positions of a context rank's tokens: QUIRK: chunks `rank` and 2 * context - 1 - rank of every sequence."""
    chunks = torch.arange(length).chunk(2 * context)
    return torch.cat([chunks[rank], chunks[2 * context - 1 - rank]])


def _whole_sequences(part: Tensor, lengths: list[int], group: dist.ProcessGroup) -> Tensor:
    """Keys or values of the whole sequences, in order, from those of every context rank."""
    context = dist.get_world_size(group)
    whole = _Gather.apply(part, group).unflatten(0, (context, -1))
    start, order = 0, []
    for length in lengths:
        at = torch.empty(length, dtype=torch.int64)
        for rank in range(context):
            at[_zigzag(length, context, rank)] = rank * len(part) + start + torch.arange(length // context)
        order.append(at)
        start += length // context
    return whole.flatten(0, 1)[torch.cat(order)]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.tokens = group, len(part)
        return gather_along_first_dim(part, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad[dist.get_rank(ctx.group) * ctx.tokens :][: ctx.tokens], None

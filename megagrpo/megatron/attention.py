"""Core attention over packed sequences where transformer-engine is not: rotary embedding, context parallelism.

Tokens are spread once into padded batches of similarly long sequences (buckets.py), so that 256 short sequences cost a
few calls, not 256. Padding stands behind a sequence's last token, where a causal query never looks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megagrpo.megatron.buckets import AttentionPlan
from megagrpo.megatron.packed import PackedSequences
from megagrpo.megatron.rotary import cosine_and_sine, inverse_frequencies, rotate
from megagrpo.weights.families.architecture import Rope


class PackedAttention(MegatronModule):
    """core_attention of Megatron's SelfAttention. The model must be built without a rotary embedding of its own."""

    def __init__(
        self,
        config: TransformerConfig,
        rope: Rope,
        pg_collection: ProcessGroupCollection,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale
        self.context_group = pg_collection.cp
        self.frequencies = inverse_frequencies(rope, config.kv_channels).to(torch.cuda.current_device())

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        return {}

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        packed_seq_params: PackedSequences,
        **_: Any,
    ) -> torch.Tensor:
        """query [tokens, heads / tensor, head_dim], key and value [tokens, groups / tensor, head_dim] -> like query."""
        packed = packed_seq_params
        if packed.rotary is None:
            packed.rotary = cosine_and_sine(packed.positions, self.frequencies, query.dtype)
        query, key = rotate(query, *packed.rotary), rotate(key, *packed.rotary)
        key, value = gather_context(key, value, self.context_group)
        return attend(query, key, value, packed.plan, self.scale)


class PackedLatentAttention(MegatronModule):
    """core_attention of Megatron's MLASelfAttention, which has rotated queries and keys before it calls this."""

    def __init__(
        self,
        config: MLATransformerConfig,
        pg_collection: ProcessGroupCollection,
        softmax_scale: float,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale
        self.plain_dim, self.rotary_dim = config.qk_head_dim, config.qk_pos_emb_head_dim
        self.context_group, self.tensor_group = pg_collection.cp, pg_collection.tp

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        return {}

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        packed_seq_params: PackedSequences,
        **_: Any,
    ) -> torch.Tensor:
        """query and key [tokens, heads / tensor, head_dim], value [tokens, heads / tensor, value_dim] -> like value."""
        key, value = gather_context(self.with_whole_gradient(key), value, self.context_group)
        return attend(query, key, value, packed_seq_params.plan, self.scale)

    def with_whole_gradient(self, key: torch.Tensor) -> torch.Tensor:
        """The same keys, such that the gradient of their rotary part is summed over the heads of all tensor ranks.

        That part is one for all heads. Megatron gathers it from the column-parallel linear_kv_down_proj, and takes the
        gradient of each rank's own heads for the whole, silently.
        """
        plain, rotary = key.split([self.plain_dim, self.rotary_dim], dim=-1)
        of_all = copy_to_tensor_model_parallel_region(rotary[:, :1], self.tensor_group)
        return torch.cat([plain, of_all.expand(-1, key.shape[1], -1)], dim=-1)


def gather_context(
    key: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the tokens of all context ranks, one rank after another."""
    if group.size() == 1:
        return key, value
    both = AllGather.apply(torch.cat([key, value], dim=-1), group)
    key, value = both.split([key.shape[-1], value.shape[-1]], dim=-1)
    return key, value


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: AttentionPlan, scale: float | None
) -> torch.Tensor:
    """Causal attention within each sequence. Shapes as in PackedAttention.forward; keys of all context ranks."""
    query = _spread(query, plan.query_slots, plan.queries)
    key = _spread(key, plan.key_slots, plan.keys)
    value = _spread(value, plan.key_slots, plan.keys)
    # One split for all buckets: its gradient is one concatenation, where slices would each make a tensor of full size.
    queries = [bucket.sequences * bucket.queries for bucket in plan.buckets]
    keys = [bucket.sequences * bucket.keys for bucket in plan.buckets]
    outputs = []
    for bucket, *batches in zip(plan.buckets, query.split(queries), key.split(keys), value.split(keys), strict=True):
        q, k, v = (batch.unflatten(0, (bucket.sequences, -1)).transpose(1, 2) for batch in batches)
        output = F.scaled_dot_product_attention(
            q, k, v, attn_mask=bucket.mask, is_causal=bucket.mask is None, scale=scale, enable_gqa=True
        )
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return _collect(outputs[0] if len(outputs) == 1 else torch.cat(outputs), plan.query_slots)


def _spread(tokens: torch.Tensor, slots: torch.Tensor | None, size: int) -> torch.Tensor:
    return tokens if slots is None else Spread.apply(tokens, slots, size)


def _collect(padded: torch.Tensor, slots: torch.Tensor | None) -> torch.Tensor:
    return padded if slots is None else Collect.apply(padded, slots)


class Spread(torch.autograd.Function):
    """padded[slots] = tokens, 0 elsewhere. Its gradient is Collect: slots are distinct, nothing is accumulated."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, slots: torch.Tensor, size: int) -> torch.Tensor:
        ctx.save_for_backward(slots)
        return tokens.new_zeros((size, *tokens.shape[1:])).index_copy_(0, slots, tokens)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient.index_select(0, ctx.saved_tensors[0]), None, None


class Collect(torch.autograd.Function):
    """tokens = padded[slots]. Its gradient is Spread; torch's own would accumulate row by row."""

    @staticmethod
    def forward(ctx: Any, padded: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(slots)
        ctx.size = len(padded)
        return padded.index_select(0, slots)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        slots = ctx.saved_tensors[0]
        return gradient.new_zeros((ctx.size, *gradient.shape[1:])).index_copy_(0, slots, gradient), None


class AllGather(torch.autograd.Function):
    """[tokens, ...] of every rank -> [ranks * tokens, ...]; the gradient is summed over ranks and scattered back."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        whole = part.new_empty((group.size() * len(part), *part.shape[1:]))
        dist.all_gather_into_tensor(whole, part.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        part = gradient.new_empty((len(gradient) // ctx.group.size(), *gradient.shape[1:]))
        dist.reduce_scatter_tensor(part, gradient.contiguous(), group=ctx.group)
        return part, None

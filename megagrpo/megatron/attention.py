"""Core attention over packed sequences, without transformer-engine: rotary embedding and context parallelism.

Tokens are spread once into padded batches of similarly long sequences, so that 256 short sequences cost a few calls,
not 256. Padding stands behind a sequence's last token, where a causal query never looks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from megagrpo.weights.families.parts.attention import Rope


@dataclass(kw_only=True)
class PackedSequences(PackedSeqParams):
    """Megatron's description of packed sequences, with what PackedAttention needs and computes once per microbatch."""

    positions: torch.Tensor  # int64 [tokens], within each sequence
    padded: np.ndarray  # int64 [sequences], their padded lengths over all context ranks
    context: int
    context_rank: int
    rotary: tuple[torch.Tensor, torch.Tensor] | None = None  # cosine and sine, set by the first layer

    @cached_property
    def plan(self) -> AttentionPlan:
        """Plans attention on first read: transformer-engine's attention never reads it, and masks take memory."""
        local = self.padded // self.context
        sequence = np.repeat(np.arange(len(local)), local)
        positions = [positions_on(self.padded, sequence, self.context, rank) for rank in range(self.context)]
        return plan_attention(local, positions, self.context_rank, self.positions.device)


def positions_on(padded: np.ndarray, sequence: np.ndarray, context: int, context_rank: int) -> np.ndarray:
    """Returns the position of every token on `context_rank` within its sequence: int64 [tokens]."""
    local = padded // context
    index = np.arange(len(sequence)) - (np.cumsum(local) - local)[sequence]
    if context == 1:
        return index
    chunk = (local // 2)[sequence]
    return np.where(index < chunk, context_rank * chunk + index, (2 * context - 2 - context_rank) * chunk + index)


class PackedAttention(MegatronModule):
    """core_attention of Megatron's SelfAttention, for a model that is built without its own rotary embedding."""

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        rope: Rope,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale
        self.context_group, self.tensor_group = pg_collection.cp, pg_collection.tp
        self.rope = rope

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
        """Computes attention; the result is like query.
        query: [tokens, heads / tensor, head_dim]; key, value: [tokens, groups / tensor, head_dim].
        Latent attention: key like query, value [tokens, heads / tensor, value_dim]; the result is like value.
        """
        query, key = self.rotated(query, key, packed_seq_params)
        if self.context_group.size() > 1:  # of all context ranks' tokens, rank after rank
            both = gather_from_sequence_parallel_region(torch.cat([key, value], dim=-1), group=self.context_group)
            key, value = both.split([key.shape[-1], value.shape[-1]], dim=-1)
        return attend(query, key, value, packed_seq_params.plan, self.scale)

    @cached_property
    def frequencies(self) -> torch.Tensor:
        return inverse_frequencies(self.rope, self.config.kv_channels).to(torch.cuda.current_device())

    def rotated(
        self, query: torch.Tensor, key: torch.Tensor, packed: PackedSequences
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if packed.rotary is None:
            packed.rotary = cosine_and_sine(packed.positions, self.frequencies)
        return rotate(query, *packed.rotary), rotate(key, *packed.rotary)


class PackedLatentAttention(PackedAttention):
    """core_attention of Megatron's MLASelfAttention, which rotates queries and keys before it calls this."""

    def rotated(
        self, query: torch.Tensor, key: torch.Tensor, packed: PackedSequences
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return query, self.with_whole_gradient(key)

    def with_whole_gradient(self, key: torch.Tensor) -> torch.Tensor:
        """Returns the same keys; the gradient of their rotary part is summed over the heads of all tensor ranks.

        All heads share the rotary part. Megatron gathers it from the column-parallel linear_kv_down_proj and silently
        takes the gradient from each rank's own heads for the whole gradient.
        """
        plain, rotary = key.split([self.config.qk_head_dim, self.config.qk_pos_emb_head_dim], dim=-1)
        of_all = copy_to_tensor_model_parallel_region(rotary[:, :1], self.tensor_group)
        return torch.cat([plain, of_all.expand(-1, key.shape[1], -1)], dim=-1)


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: AttentionPlan, scale: float | None
) -> torch.Tensor:
    """Computes causal attention within each sequence. Shapes as in PackedAttention.forward; all context ranks' keys."""
    query = _spread(query, plan.query_slots, plan.queries)
    key = _spread(key, plan.key_slots, plan.keys)
    value = _spread(value, plan.key_slots, plan.keys)
    # One split for all buckets: its gradient is one concatenation, where each slice's would be a tensor of full size.
    queries = [bucket.sequences * bucket.queries for bucket in plan.buckets]
    keys = [bucket.sequences * bucket.keys for bucket in plan.buckets]
    outputs = []
    for bucket, *batches in zip(plan.buckets, query.split(queries), key.split(keys), value.split(keys), strict=True):
        q, k, v = (batch.unflatten(0, (bucket.sequences, -1)).transpose(1, 2) for batch in batches)
        # torch's kernels for GPUs that take masks take no query groups: with both, every score is kept.
        groups = bucket.mask is None or not query.is_cuda
        outputs.append(_attend_batch(q, k, v, bucket.mask, scale, groups).transpose(1, 2).flatten(0, 1))
    padded = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return padded if plan.query_slots is None else Collect.apply(padded, plan.query_slots)


def _attend_batch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float | None, groups: bool
) -> torch.Tensor:
    """Maps q [sequences, heads, queries, dim], k, v [sequences, groups, keys, dim] to a result like q. No mask: causal.
    With `groups` torch broadcasts k and v over query heads; without, they are repeated for every head."""
    if not groups:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=groups
    )


def _spread(tokens: torch.Tensor, slots: torch.Tensor | None, size: int) -> torch.Tensor:
    return tokens if slots is None else Spread.apply(tokens, slots, size)


class Spread(torch.autograd.Function):
    """The operation padded[slots] = tokens, 0 elsewhere. Its gradient is Collect, because slots are distinct."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, slots: torch.Tensor, size: int) -> torch.Tensor:
        ctx.save_for_backward(slots)
        return tokens.new_zeros((size, *tokens.shape[1:])).index_copy_(0, slots, tokens)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient.index_select(0, ctx.saved_tensors[0]), None, None


class Collect(torch.autograd.Function):
    """The operation tokens = padded[slots]. Its gradient is Spread; torch's own accumulates row by row."""

    @staticmethod
    def forward(ctx: Any, padded: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(slots)
        ctx.size = len(padded)
        return padded.index_select(0, slots)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        slots = ctx.saved_tensors[0]
        return gradient.new_zeros((ctx.size, *gradient.shape[1:])).index_copy_(0, slots, gradient), None


# A sequence joins a bucket if it is at least 4/5 as long as the longest there (padding adds at most a quarter), or at
# most this many tokens shorter: for short sequences another call costs more than the padding.
PADDING_ALWAYS_ALLOWED = 16


@dataclass(frozen=True)
class LengthBucket:
    """Sequences of similar length, as one padded batch of queries and one of keys."""

    sequences: int
    queries: int  # slots of each sequence, as many as the longest has tokens on this rank
    keys: int  # the same over all context ranks
    mask: torch.Tensor | None  # bool [sequences, 1, queries, keys]; None: plain causal, queries == keys


@dataclass(frozen=True)
class AttentionPlan:
    """The slot of each token in the padded batches of all buckets, which lie end to end in one buffer.

    `query_slots` are for this rank's tokens, `key_slots` for the tokens of all context ranks, in rank order.
    None: the tokens are in that order already, without padding.
    """

    buckets: tuple[LengthBucket, ...]
    query_slots: torch.Tensor | None  # int64 [tokens]
    key_slots: torch.Tensor | None  # int64 [context * tokens]
    queries: int
    keys: int


def plan_attention(
    lengths: np.ndarray, positions: list[np.ndarray], context_rank: int, device: torch.device | str
) -> AttentionPlan:
    """Plans the attention for sequences of `lengths` tokens per context rank.

    positions[rank]: int64 [tokens], the position of each of that rank's tokens in its sequence.
    """
    context = len(positions)
    order = np.argsort(-lengths, kind="stable")
    query_base = np.empty_like(lengths)
    key_base = np.empty_like(lengths)
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    index = np.arange(len(sequence)) - (np.cumsum(lengths) - lengths)[sequence]
    buckets: list[LengthBucket] = []
    queries = 0
    cuts, longest = [], int(lengths[order[0]])
    for at, length in enumerate(lengths[order].tolist()):
        if 5 * length < 4 * longest and longest - length > PADDING_ALWAYS_ALLOWED:
            cuts.append(at)
            longest = length
    for members in np.split(order, cuts):
        longest = int(lengths[members[0]])
        row = np.arange(len(members)) * longest
        query_base[members] = queries + row
        key_base[members] = (queries + row) * context
        mask = None
        if context > 1:
            # Padded queries keep position 0: they see one key, so that no row of the softmax is empty.
            position = np.zeros((len(members), longest), dtype=np.int64)
            inside = np.isin(sequence, members)
            place = np.empty_like(lengths)
            place[members] = np.arange(len(members))
            position[place[sequence[inside]], index[inside]] = positions[context_rank][inside]
            keys = torch.arange(longest * context, device=device)
            mask = (keys <= torch.from_numpy(position).to(device)[:, :, None])[:, None]
        buckets.append(LengthBucket(len(members), longest, longest * context, mask))
        queries += len(members) * longest
    query_slots = query_base[sequence] + index
    key_slots = np.concatenate([key_base[sequence] + of_rank for of_rank in positions])
    return AttentionPlan(
        tuple(buckets),
        _slots(query_slots, queries, device),
        _slots(key_slots, queries * context, device),
        queries,
        queries * context,
    )


def _slots(slots: np.ndarray, size: int, device: torch.device | str) -> torch.Tensor | None:
    if len(slots) == size and (slots == np.arange(size)).all():
        return None
    return torch.from_numpy(slots).to(device)


def inverse_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """Frequencies of the rotary embedding (arXiv:2104.09864), float32 [head_dim / 2].

    If the model has Llama 3's scaling (arXiv:2407.21783), they are scaled as in transformers.
    """
    frequencies = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.factor is None:
        return frequencies
    # Short wavelengths stay, long ones are stretched by `factor`, and those between the two bounds are interpolated.
    wavelengths = 2 * math.pi / frequencies
    turns = rope.original_max_positions / wavelengths
    keep = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return (1 - keep) * frequencies / rope.factor + keep * frequencies


def cosine_and_sine(positions: torch.Tensor, frequencies: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns two tensors [tokens, 1, head_dim] for `rotate`, float32."""
    angles = torch.outer(positions.to(frequencies.dtype), frequencies)
    angles = torch.cat([angles, angles], dim=-1)[:, None]
    return angles.cos(), angles.sin()


def rotate(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Rotates `heads` [tokens, heads, head_dim] by each token's position. Computes in float32 and rounds once at the
    end, as transformer-engine and SGLang do."""
    wide = heads.float()
    first, second = wide.chunk(2, dim=-1)
    return (wide * cosine + torch.cat([-second, first], dim=-1) * sine).to(heads.dtype)

"""Core attention over packed sequences, without transformer-engine: rotary embedding and context parallelism.

Tokens are spread once into padded batches of similarly long sequences, so that 256 short sequences cost a few calls,
not 256. Padding stands behind a sequence's last token, where a causal query never looks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch.utils.checkpoint import checkpoint

from megagrpo.megatron.rotary import cosine_and_sine, inverse_frequencies, magnitude, rotate
from megagrpo.weights.families.parts import Rope, Temperature
from megagrpo.weights.families.parts.attention import CAPPED_SCORES


@dataclass(kw_only=True)
class PackedSequences(PackedSeqParams):
    """Megatron's description of packed sequences, with what PackedAttention needs and computes once per microbatch."""

    positions: torch.Tensor  # int64 [tokens], within each sequence
    padded: np.ndarray  # int64 [sequences], their padded lengths over all context ranks
    context: int
    context_rank: int
    rotary: dict[tuple[Rope, int], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)  # see tables
    routes: torch.Tensor | None = None  # int16 [tokens of this tensor rank, layers, experts per token] (replay.py)

    @cached_property
    def plan(self) -> AttentionPlan:
        """Plans attention on first read: transformer-engine's attention never reads it, and masks take memory."""
        local = self.padded // self.context
        sequence = np.repeat(np.arange(len(local)), local)
        positions = [positions_on(self.padded, sequence, self.context, rank) for rank in range(self.context)]
        return plan_attention(local, positions, self.context_rank, self.positions.device)

    @cached_property
    def order(self) -> torch.Tensor | None:
        """Places of all context ranks' tokens, rank after rank, in the whole sequences end to end: int64
        [context * tokens]. None: they lie so already."""
        if self.context == 1:
            return None
        sequence = np.repeat(np.arange(len(self.padded)), self.padded // self.context)
        start = (np.cumsum(self.padded) - self.padded)[sequence]
        places = [start + positions_on(self.padded, sequence, self.context, rank) for rank in range(self.context)]
        return torch.from_numpy(np.concatenate(places)).to(self.positions.device)

    @cached_property
    def whole_plan(self) -> AttentionPlan:
        """Plans buckets of whole sequences, for the tokens of all context ranks in `order`. They need no masks."""
        if self.context == 1:
            return self.plan
        sequence = np.repeat(np.arange(len(self.padded)), self.padded)
        return plan_attention(self.padded, [positions_on(self.padded, sequence, 1, 0)], 0, self.positions.device)

    def tables(self, rope: Rope, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the cosines and sines of a rotary embedding. The first layer that has it computes them."""
        if (rope, head_dim) not in self.rotary:
            frequencies = inverse_frequencies(rope, head_dim).to(self.positions.device)
            if rope.long is not None:
                # Each sequence by itself, as if it were alone. Padded lengths are on the same side of the limit, if
                # 2 x context divides it.
                longer = (self.padded > rope.long.original_max_positions).astype(np.int64)
                of_tokens = np.repeat(longer, self.padded // self.context)
                frequencies = frequencies[torch.from_numpy(of_tokens).to(frequencies.device)]
            tables = cosine_and_sine(self.positions, frequencies, magnitude(rope), pairs=rope.pairs)
            self.rotary[rope, head_dim] = tables
        return self.rotary[rope, head_dim]


def positions_on(padded: np.ndarray, sequence: np.ndarray, context: int, context_rank: int) -> np.ndarray:
    """Returns the position of every token on `context_rank` within its sequence: int64 [tokens]."""
    local = padded // context
    index = np.arange(len(sequence)) - (np.cumsum(local) - local)[sequence]
    if context == 1:
        return index
    chunk = (local // 2)[sequence]
    return np.where(index < chunk, context_rank * chunk + index, (2 * context - 2 - context_rank) * chunk + index)


class PackedAttention(MegatronModule):
    """core_attention of Megatron's SelfAttention, for a model that is built without its own rotary embedding.

    rope: None for layers without positions. scale: the factor of scores, in place of Megatron's `softmax_scale`.
    window: a query sees so many keys at most, its own among them. score_cap: scores are cap * tanh(score / cap).
    sinks: each head has a trained score that takes its part of the softmax, without a value (gpt-oss,
    arXiv:2508.10925). query_temperature: multiplies queries by a factor that grows with their position.
    """

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        rope: Rope | None,
        softmax_scale: float | None = None,
        *,
        scale: float | None = None,
        window: int | None = None,
        score_cap: float | None = None,
        sinks: bool = False,
        query_temperature: Temperature | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.context_group, self.tensor_group = pg_collection.cp, pg_collection.tp
        self.rope, self.temperature = rope, query_temperature
        self.scale = softmax_scale if scale is None else scale
        self.window, self.cap = window, score_cap
        self.softmax_offset: torch.nn.Parameter | None = None  # Megatron's name of sinks
        if sinks:
            heads = config.num_attention_heads // self.tensor_group.size()
            zeros = torch.zeros(heads, dtype=config.params_dtype, device=torch.cuda.current_device())
            self.softmax_offset = torch.nn.Parameter(zeros)
            set_tensor_model_parallel_attributes(self.softmax_offset, is_parallel=True, dim=0, stride=1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        if self.softmax_offset is None:
            return {}
        held = {"softmax_offset": self.softmax_offset}
        groups = {"tp_group": self.tensor_group, "dp_cp_group": (metadata or {}).get("dp_cp_group")}
        return make_sharded_tensors_for_checkpoint(held, prefix, {"softmax_offset": 0}, sharded_offsets, **groups)

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
        plan, sinks = packed_seq_params.plan, self.softmax_offset
        return attend(query, key, value, plan, self.scale, window=self.window, cap=self.cap, sinks=sinks)

    def rotated(
        self, query: torch.Tensor, key: torch.Tensor, packed: PackedSequences
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.rope is not None:
            tables = packed.tables(self.rope, self.config.kv_channels)
            query, key = (rotate(heads, *tables, pairs=self.rope.pairs) for heads in (query, key))
        if (its := self.temperature) is not None:
            factors = 1 + its.beta * torch.log1p((packed.positions // its.positions).float())
            query = query * factors[:, None, None].to(query.dtype)  # rounded after the rotation, as in SGLang
        return query, key


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
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: AttentionPlan,
    scale: float | None,
    *,
    window: int | None = None,
    cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes causal attention within each sequence. Shapes as in PackedAttention.forward; all context ranks' keys.
    sinks: [heads / tensor]. The other options are those of PackedAttention."""
    query = _spread(query, plan.query_slots, plan.queries)
    key = _spread(key, plan.key_slots, plan.keys)
    value = _spread(value, plan.key_slots, plan.keys)
    # One split for all buckets: its gradient is one concatenation, where each slice's would be a tensor of full size.
    queries = [bucket.sequences * bucket.queries for bucket in plan.buckets]
    keys = [bucket.sequences * bucket.keys for bucket in plan.buckets]
    outputs = []
    for bucket, *batches in zip(plan.buckets, query.split(queries), key.split(keys), value.split(keys), strict=True):
        q, k, v = (batch.unflatten(0, (bucket.sequences, -1)).transpose(1, 2) for batch in batches)
        near = window if window is not None and window < bucket.keys else None
        mask = bucket.mask(near)
        if near is not None and mask is None:
            output = _attend_in_blocks(q, k, v, near, partial(_attend, scale=scale, cap=cap, sinks=sinks))
        else:
            output = _attend(q, k, v, mask, scale, cap, sinks)
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    padded = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return padded if plan.query_slots is None else Collect.apply(padded, plan.query_slots)


def _attend_in_blocks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int, attend: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """Computes attention within a window in blocks of `window` queries. The first block is plain causal; another sees
    keys of its own block and of the one before it, so that no mask and no work grows with a sequence's square."""
    length = q.shape[2]
    q, k, v = (F.pad(x, (0, 0, 0, -length % window)) for x in (q, k, v))
    of_first, of_later = q.split([window, q.shape[2] - window], dim=2)
    first = attend(of_first, k[:, :, :window], v[:, :, :window], None)
    queries = of_later.unflatten(2, (-1, window)).transpose(1, 2).flatten(0, 1)
    keys, values = (x.unfold(2, 2 * window, window).permute(0, 2, 1, 4, 3).flatten(0, 1) for x in (k, v))
    mask = torch.ones(window, 2 * window, dtype=torch.bool, device=q.device).tril(window).triu(1)
    later = attend(queries, keys, values, mask).unflatten(0, (len(q), -1)).transpose(1, 2).flatten(2, 3)
    return torch.cat([first, later], dim=2)[:, :, :length]


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
    cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Does the same as _attend_batch, with a cap or sinks."""
    # On GPUs plain causal attention reaches torch's flash kernel, with sinks as well; a mask (windows, context ranks)
    # the memory-efficient one. On CPUs one kernel takes all of these. A cap has none: flex_attention's score_mod would
    # serve on GPUs.
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    if cap is not None:
        return _attend_with_cap(q, k, v, mask, factor, cap, sinks)
    if sinks is not None:
        return _attend_with_sinks(q, k, v, mask, factor, sinks)
    # torch's kernels for GPUs that take masks take no query groups: with both, every score is kept.
    return _attend_batch(q, k, v, mask, scale, mask is None or not q.is_cuda)


SINK_ELEMENTS = 8
"""Elements behind the last of a head, in which sinks lie: torch's kernels for GPUs need a multiple of 8."""


def _attend_with_sinks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float, sinks: torch.Tensor
) -> torch.Tensor:
    """Computes attention with one key more, whose score is the head's sink and whose value is 0.

    The score is a product like all others, of elements of the queries that other keys multiply by 0: so any kernel
    computes it and its gradient, and none has to keep scores.
    """
    size, batch = q.shape[-1], (len(q), -1, q.shape[2], -1)
    exact = sinks.double() / scale
    rounded = exact.to(q.dtype)
    rest = (exact - rounded.double()).detach().to(q.dtype)
    column = F.pad(torch.stack([rounded, rest], dim=-1), (0, SINK_ELEMENTS - 2))
    q = torch.cat([q, column[None, :, None].expand(batch)], dim=-1)
    k, v = (F.pad(x, (0, SINK_ELEMENTS, 1, 0)) for x in (k, v))
    with torch.no_grad():
        k[:, :, 0, size : size + 2] = 1
    if mask is not None:
        mask = F.pad(mask, (1, 0), value=True)
    else:
        q = F.pad(q, (0, 0, 1, 0))  # a query beside the sink: with as many queries as keys, causal needs no mask
    output = _attend_batch(q, k, v, mask, scale, mask is None or not q.is_cuda)
    return output[:, :, -batch[2] :, :size]


def _attend_with_cap(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    cap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Computes attention step by step, scores in float32, for some queries at a time: a backward pass computes their
    scores again."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = torch.tanh(q.to(wide) @ k.to(wide).mT * (scale / cap)) * cap
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            column = sinks.to(wide)[None, :, None, None].expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, column], dim=-1)
        return scores.softmax(-1)[..., : k.shape[2]].to(v.dtype) @ v

    outputs, queries = [], max(1, CAPPED_SCORES // (len(q) * q.shape[1] * k.shape[2]))
    for first in range(0, q.shape[2], queries):
        last = min(first + queries, q.shape[2])
        if mask is None:
            keys, seen = last, torch.ones(last - first, last, dtype=torch.bool, device=q.device).tril(first)
        else:
            keys, seen = k.shape[2], mask[..., first:last, :]
        tensors = q[:, :, first:last], k[:, :, :keys], v[:, :, :keys], seen
        outputs.append(checkpoint(attend, *tensors, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(outputs, dim=2)


def _attend_batch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float | None, groups: bool
) -> torch.Tensor:
    """Maps q [sequences, heads, queries, dim], k, v [sequences, groups, keys, dim] to a result like q. No mask: causal.
    With `groups` torch broadcasts k and v over query heads; without, they are repeated for every head, or a mask that
    all sequences share [queries, keys] is: the heads of a group are then one head with more queries."""
    heads = q.shape[1] // k.shape[1]
    if not groups and heads > 1 and mask is not None and mask.dim() == 2:
        output = _attend_batch(q.unflatten(1, (-1, heads)).flatten(2, 3), k, v, mask.repeat(heads, 1), scale, False)
        return output.unflatten(2, (heads, -1)).flatten(1, 2)
    if not groups and heads > 1:
        k, v = (x.repeat_interleave(heads, dim=1) for x in (k, v))
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
    positions: torch.Tensor | None
    """Positions of queries, int64 [sequences, queries], 0 in padding. None: their indices; queries == keys."""
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)

    def mask(self, window: int | None) -> torch.Tensor | None:
        """Returns the keys that queries see, bool [sequences, 1, queries, keys]; None without positions. Layers share
        it. Queries of padding see the first key, so that no row of the softmax is empty."""
        if self.positions is None:
            return None
        if window not in self.masks:
            keys, last = torch.arange(self.keys, device=self.positions.device), self.positions[:, :, None]
            seen = keys <= last
            self.masks[window] = (seen if window is None else seen & (keys > last - window))[:, None]
        return self.masks[window]


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
        of_queries = None
        if context > 1:
            position = np.zeros((len(members), longest), dtype=np.int64)
            inside = np.isin(sequence, members)
            place = np.empty_like(lengths)
            place[members] = np.arange(len(members))
            position[place[sequence[inside]], index[inside]] = positions[context_rank][inside]
            of_queries = torch.from_numpy(position).to(device)
        buckets.append(LengthBucket(len(members), longest, longest * context, of_queries))
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

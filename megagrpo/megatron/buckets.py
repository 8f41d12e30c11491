"""How packed sequences are batched for attention: a few calls over padded batches instead of one call per sequence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

# A sequence joins a bucket if it fills 4/5 of the longest there (at most a quarter of waste), or lacks no more tokens
# than this: for short sequences a further call costs more than the padding.
PADDING_ALWAYS_ALLOWED = 16


@dataclass(frozen=True)
class Bucket:
    """Sequences of similar length, as one padded batch of queries and one of keys."""

    sequences: int
    queries: int  # slots of each sequence, as many as the longest has tokens on this rank
    keys: int  # the same over all context ranks
    mask: torch.Tensor | None  # bool [sequences, 1, queries, keys]; None: plain causal, queries == keys


@dataclass(frozen=True)
class AttentionPlan:
    """Where each token goes in the padded batches of all buckets, which lie one after the other in one buffer.

    `query_slots[t]` is for this rank's token t. `key_slots` is for the tokens of all context ranks, in rank order; it
    is the same tensor where context is 1. None: the tokens are already in that order, without padding.
    """

    buckets: tuple[Bucket, ...]
    query_slots: torch.Tensor | None  # int64 [tokens]
    key_slots: torch.Tensor | None  # int64 [context * tokens]
    queries: int
    keys: int


def plan_attention(
    lengths: np.ndarray, positions: list[np.ndarray], context_rank: int, device: torch.device | str
) -> AttentionPlan:
    """For sequences of `lengths` tokens per context rank; positions[rank]: of that rank's tokens in their sequences."""
    context = len(positions)
    order = np.argsort(-lengths, kind="stable")
    query_base = np.empty_like(lengths)
    key_base = np.empty_like(lengths)
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    index = np.arange(len(sequence)) - (np.cumsum(lengths) - lengths)[sequence]
    buckets: list[Bucket] = []
    queries = 0
    for members in _split(order, lengths):
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
        buckets.append(Bucket(len(members), longest, longest * context, mask))
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


def _split(order: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """`order` (longest first) cut into buckets."""
    cuts = []
    longest = int(lengths[order[0]])
    for at, length in enumerate(lengths[order].tolist()):
        if 5 * length < 4 * longest and longest - length > PADDING_ALWAYS_ALLOWED:
            cuts.append(at)
            longest = length
    return np.split(order, cuts)


def _slots(slots: np.ndarray, size: int, device: torch.device | str) -> torch.Tensor | None:
    if len(slots) == size and (slots == np.arange(size)).all():
        return None
    return torch.from_numpy(slots).to(device)

"""Logprobs and entropies over kept sets: the ids among which an engine drew each token (heads.py has those over the
whole vocabulary).

A token with at most GATHERED_IDS of them multiplies with the rows of these alone. Others mask the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megagrpo.batching.rank_batches import TrainSequence
from megagrpo.errors import REPORT, Problem, RankError
from megagrpo.megatron.attention import Collect
from megagrpo.megatron.heads import CHUNK_ELEMENTS, Head, VocabularyShard, scaled, vocabulary_logprobs
from megagrpo.types import GATHERED_IDS, KeptSets


@dataclass(frozen=True)
class KeptTokens:
    """The kept sets of the response tokens of one microbatch: narrow ones as pairs of a token and an id, in ascending
    order of ids; others, and tokens drawn from the whole vocabulary, as bits."""

    narrow: Tensor  # int64 [narrow tokens], their places among the response tokens
    of: Tensor  # int32 [pairs], index of the token in `narrow`
    ids: Tensor  # int32 [pairs]
    host_ids: np.ndarray  # the same on the host: no tensor rank waits for its device to find its part
    wide: Tensor  # int64 [other tokens], their places among the response tokens
    bits: Tensor  # uint8 [other tokens, bytes], as vocabulary_logprobs takes them
    order: Tensor  # int64 [response tokens], the place of each in narrow and wide ones end to end
    largest: int  # of all ids


def kept_tokens(
    sequences: Sequence[TrainSequence], chosen: np.ndarray, device: torch.device | str, gathered_ids: int = GATHERED_IDS
) -> KeptTokens | None:
    """Returns the kept sets of some response tokens, or None if no sequence has any.

    chosen: int64 [response tokens of a rank], their indices among the response tokens of all sequences.
    """
    if all(sequence.kept is None for sequence in sequences):
        return None
    kept = KeptSets.joined((sequence.kept, int(sequence.loss_mask.sum())) for sequence in sequences)
    sizes, ends = kept.sizes[chosen], kept.ends[chosen]
    gathered = (sizes > 0) & (sizes <= gathered_ids)
    narrow, wide = np.flatnonzero(gathered), np.flatnonzero(~gathered)
    of = np.repeat(np.arange(len(narrow)), sizes[narrow])
    behind = np.cumsum(sizes[narrow])[of] - np.arange(len(of))  # how far before the end of its set each id is
    ids = kept.ids[ends[narrow][of] - behind]
    by_id = np.argsort(ids, kind="stable")
    sets = [kept.ids[ends[at] - sizes[at] : ends[at]] for at in wide]
    bits = np.zeros((len(wide), 2 + max((int(one.max(initial=0)) for one in sets), default=0) // 8), np.uint8)
    for row, ids_of_row in zip(bits, sets, strict=True):
        row[:-1] = np.packbits(np.bincount(ids_of_row, minlength=8 * (len(row) - 1)).astype(bool), bitorder="little")
        if not len(ids_of_row):
            row[:] = 255

    def tensor(array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    order = np.argsort(np.concatenate([narrow, wide]))
    pairs = tensor(of[by_id].astype(np.int32)), tensor(ids[by_id]), ids[by_id]
    largest = int(kept.ids.max(initial=0))
    return KeptTokens(tensor(narrow), *pairs, tensor(wide), tensor(bits), tensor(order), largest)


def kept_logprobs(
    hidden: Tensor,
    positions: Tensor,
    labels: Tensor,
    kept: KeptTokens | None,
    head: Head,
    *,
    entropy: bool,
) -> tuple[Tensor, Tensor]:
    """Returns what `vocabulary_logprobs` does, each token's softmax over its kept set alone. None: the vocabulary.

    A tensor rank computes the logits of the ids whose rows it holds. For narrow sets it holds them in float32, and a
    few numbers more for each: at most GATHERED_IDS of a token. Its forward pass takes two all-reduces too. Raises
    RankError for an id that the vocabulary does not have.
    """
    weight, shard = head.weight, head.shard
    if kept is not None and kept.largest >= shard.vocab:
        raise RankError(
            Problem("kept sets of a microbatch", f"the id {kept.largest}", f"ids below {shard.vocab}", REPORT)
        )
    if kept is None or not len(kept.narrow):
        bits = None if kept is None or not len(kept.wide) else kept.bits
        return vocabulary_logprobs(hidden, positions, labels, head, kept_bits=bits, entropy=entropy)
    begin, end = np.searchsorted(kept.host_ids, [shard.first, shard.first + shard.real_rows(len(weight))])
    chosen: Tensor = Collect.apply(hidden, positions[kept.narrow])
    of, rows = kept.of[begin:end].long(), kept.ids[begin:end].long() - shard.first
    is_label = rows == (labels[kept.narrow] - shard.first)[of]
    parts = [_KeptLogprobs.apply(chosen, weight, of, rows, is_label, shard, *head.scale.factors, entropy)]
    if len(kept.wide):
        of_wide = positions[kept.wide], labels[kept.wide], head
        parts.append(vocabulary_logprobs(hidden, *of_wide, kept_bits=kept.bits, entropy=entropy))
    logprobs, entropies = (torch.cat(values)[kept.order] for values in zip(*parts, strict=True))
    return logprobs, entropies


class _KeptLogprobs(torch.autograd.Function):
    """Logprobs and entropies of tokens. A pair has the index of a token in `hidden`, the row of an id in `weight`, and
    whether the id is the label."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        of: Tensor,
        rows: Tensor,
        is_label: Tensor,
        shard: VocabularyShard,
        scale: float,
        cap: float | None,
        entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        logits = hidden.new_empty(len(of), dtype=torch.float32)
        for part in _parts(len(of), hidden.shape[1]):
            logits[part] = hidden[of[part]].float().mul_(weight[rows[part]]).sum(-1)
        logits = scaled(logits, scale, cap)
        top = torch.full((len(hidden),), torch.finfo(torch.float32).min, device=hidden.device)
        top = top.scatter_reduce(0, of, logits, "amax")
        split = shard.group is not None and shard.group.size() > 1
        if split:
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=shard.group)
        lowered = logits - top[of]
        sums = torch.zeros(3, len(hidden), device=hidden.device)
        sums[0].index_add_(0, of, lowered.where(is_label, 0.0))
        exponentials = lowered.exp()
        sums[1].index_add_(0, of, exponentials)
        sums[2].index_add_(0, of, exponentials.mul_(lowered))
        if split:
            dist.all_reduce(sums, group=shard.group)
        of_label, total, weighted = sums
        log_total = total.log()
        entropies = log_total - weighted / total if entropy else torch.zeros_like(total)
        ctx.save_for_backward(hidden, weight, of, rows, is_label, logits, top + log_total, entropies)
        ctx.constants = scale, cap
        if not entropy:
            ctx.mark_non_differentiable(entropies)
        ctx.set_materialize_grads(False)
        return of_label - log_total, entropies

    @staticmethod
    def backward(ctx: Any, logprob_grad: Tensor | None, entropy_grad: Tensor | None) -> tuple[Any, ...]:
        hidden, weight, of, rows, is_label, logits, normalizer, entropies = ctx.saved_tensors
        scale, cap = ctx.constants
        log_p = logits - normalizer[of]
        gradient = torch.zeros_like(log_p)
        if logprob_grad is not None:
            gradient += logprob_grad[of] * (is_label.float() - log_p.exp())
        if entropy_grad is not None:
            gradient -= entropy_grad[of] * log_p.exp() * (log_p + entropies[of])
        gradient *= scale if cap is None else scale * (1 - (logits / cap).square())
        hidden_grad = torch.zeros_like(hidden, dtype=torch.float32)
        weight_grad = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for part in _parts(len(of), hidden.shape[1]):
            by_pair = gradient[part, None]
            hidden_grad.index_add_(0, of[part], weight[rows[part]].float().mul_(by_pair))
            if weight_grad is not None:
                # Rows ascend: equal ones are summed in float32 before they are rounded.
                distinct, place = rows[part].unique_consecutive(return_inverse=True)
                sums = hidden_grad.new_zeros(len(distinct), hidden.shape[1])
                sums.index_add_(0, place, hidden[of[part]].float().mul_(by_pair))
                weight_grad.index_add_(0, distinct, sums.to(weight.dtype))
        return hidden_grad.to(hidden.dtype), weight_grad, *[None] * 7


def _parts(pairs: int, hidden: int) -> Iterator[slice]:
    """Yields slices of the pairs whose rows of hidden numbers have about CHUNK_ELEMENTS."""
    width = max(1, CHUNK_ELEMENTS // hidden)
    for begin in range(0, pairs, width):
        yield slice(begin, begin + width)

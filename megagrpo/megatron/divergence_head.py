"""Distillation at the end of the last pipeline stage: the divergence of a student from a teacher of the same ranks with
the student's logprobs, and the most likely ids of a model (heads.py has logprobs at given ids).

Logits [tokens, vocabulary] never exist, neither the student's nor the teacher's: both apply a few rows of their output
matrices at a time, the same ids, each half as many as a head of one model. For jsd the forward pass takes a few tokens
at a time, and holds their logits of all ids of the rank until both normalizers are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megagrpo.algorithm.distillation import Divergence
from megagrpo.megatron.attention import Collect
from megagrpo.megatron.heads import (
    LOWEST,
    Factors,
    Head,
    VocabularyShard,
    add_labels,
    columns_at_once,
    compiled,
    exponential_sums,
    labels_in,
    product,
    scaled,
    vocabulary_parts,
)

LEAST_TOKENS = 128
"""Tokens of a block, at least, however many ids there are: each block reads both output matrices whole."""
LEAST = 1e-30
"""A probability that counts nothing, in place of lower ones: the log of its ratio to another is finite."""
LOW = 2**32 - 1
"""The lower bits of an int64."""


@dataclass(frozen=True)
class Compared:
    """The results of a head that compares a student with a teacher at n tokens."""

    logprobs: Tensor  # float32 [n], the student's, of the labels
    entropies: Tensor  # float32 [n], the student's; zeros: not computed
    divergence: Tensor  # float32 [n]
    of_teacher: Tensor  # float32 [n], the teacher's logprobs of the labels; NaN: not known
    agrees: Tensor  # bool [n], the most likely id of both is the same


def vocabulary_divergence(
    hidden: Tensor,
    positions: Tensor,
    labels: Tensor,
    student: Head,
    teacher_hidden: Tensor,
    teacher: Head,
    *,
    divergence: Divergence,
    beta: float,
    entropy: bool = False,
    chunk_columns: int | None = None,
) -> Compared:
    """Computes the divergence of student p from teacher q over the vocabulary, and logprobs and entropies of p.

    forward_kl: sum q log(q / p); reverse_kl: sum p log(p / q); jsd: beta KL(q || m) + (1 - beta) KL(p || m) with
    m = beta q + (1 - beta) p, 0 < beta < 1 (arXiv:2306.13649): for beta near 0 it is beta times the forward KL, near 1
    1 - beta times the reverse one.
    hidden: [tokens, hidden], equal on all tensor ranks; positions: int64 [n], distinct rows of it; labels: int64 [n];
    teacher_hidden: [n, its hidden size], at these positions. Both heads have the same ids. The result is equal on all
    tensor ranks. Of equally likely ids the lowest is the most likely.

    Gradients flow to `hidden` and the student's matrix as in `vocabulary_logprobs`, and not to the teacher: one product
    with each output matrix serves all results. The forward pass gathers 10 numbers of each position from all tensor
    ranks, and 2 more for `jsd`, which gathers block by block. The backward pass computes the logits again, and moves
    nothing.
    """
    columns = chunk_columns or columns_at_once(len(positions), hidden.device, models=2)
    tokens = max(1 if chunk_columns else LEAST_TOKENS, len(positions) * columns // max(1, len(student.weight)))
    chosen: Tensor = Collect.apply(hidden, positions)
    of_teacher = teacher_hidden.detach(), teacher.weight.detach()
    factors = student.scale.factors, teacher.scale.factors
    options = student.shard, divergence, beta, factors, entropy, tokens, columns
    return Compared(*_VocabularyDivergence.apply(chosen, student.weight, labels, *of_teacher, *options))


@dataclass(frozen=True)
class Top:
    """The most likely ids of n rows, the most likely first, and logprobs."""

    ids: Tensor  # int64 [n, k]
    logprobs: Tensor  # float32 [n, k]
    of_labels: Tensor  # float32 [n]
    entropies: Tensor  # float32 [n]; zeros: not computed
    normalizer: Tensor  # float32 [n], the log of the sum of e^x over all ids


@torch.no_grad()
def top_logprobs(
    hidden: Tensor, labels: Tensor, head: Head, k: int, *, entropy: bool = False, chunk_columns: int | None = None
) -> Top:
    """Finds the k most likely ids of each row, or all ids if there are fewer, and the labels' logprobs.

    hidden: [n, hidden]; labels: int64 [n]. Both are equal on all tensor ranks, which gather k + 3 numbers of each row.
    Of equally likely ids the lower comes first.
    """
    weight, shard, factors = head.weight, head.shard, head.scale.factors
    columns, k = chunk_columns or columns_at_once(len(hidden), hidden.device), min(k, shard.vocab)
    best = torch.full((len(hidden), k), torch.iinfo(torch.int64).min, device=hidden.device)
    zeros, sums = hidden.new_zeros(len(hidden), dtype=torch.float32), compiled(exponential_sums, hidden.is_cuda)
    lowest = zeros + LOWEST
    of_parts = [torch.stack([lowest, zeros, zeros]).double()]  # a rank may have padding alone
    for part in vocabulary_parts(shard.real_rows(len(weight)), columns):
        logits, (in_part, column) = product(hidden, weight[part].t()), labels_in(part, labels[:, None] - shard.first)
        logits = scaled(logits, *factors, logits)
        of_label = logits.gather(1, column).where(in_part, 0.0)[:, 0]
        best = torch.cat([best, _top_keys(logits, shard.first + part.start, k)], 1).topk(k).values
        top, total, weighted = sums(logits, lowest, None, 1.0, None, entropy)
        del logits
        mean = zeros if weighted is None else top + weighted / total
        of_parts.append(torch.stack([top + total.log(), mean, of_label]).double())
    best = torch.cat(_of_ranks(best, shard), 1).topk(k).values
    normalizer, mean, of_label = _merged_means(_of_ranks(_merged_means(of_parts), shard))
    ids, logits = _of_keys(best)
    found = logits - normalizer[:, None], of_label - normalizer, normalizer - mean if entropy else zeros, normalizer
    return Top(ids, *(each.float() for each in found))


def _merged_means(of_parts: Sequence[Tensor]) -> Tensor:
    """Returns the log of the sum of e^x, the mean of x and the label's x, float64 [3, n], from those of parts."""
    logs, means, labels = torch.stack([*of_parts]).unbind(1)
    return torch.stack([logs.logsumexp(0), (logs.softmax(0) * means).sum(0), labels.sum(0)])


class _VocabularyDivergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        shard: VocabularyShard,
        divergence: Divergence,
        beta: float,
        factors: tuple[Factors, Factors],
        entropy: bool,
        tokens: int,
        columns: int,
    ) -> tuple[Tensor, ...]:
        rows, local = shard.real_rows(len(weight)), labels[:, None] - shard.first
        sums, of_mixture = (compiled(each, hidden.is_cuda) for each in (_sums, _mixture_sums))
        weighing = None if divergence == "jsd" else int(divergence == "forward_kl")
        found, shares = (hidden.new_zeros(size, len(hidden), dtype=torch.float64) for size in (10, 2))
        found[:2] = LOWEST
        # For jsd: CPUs are faster with narrow products, GPUs with wide ones.
        tile = (len(hidden), columns) if weighing is not None else (tokens, rows if hidden.is_cuda else columns)
        for block in vocabulary_parts(len(hidden), tile[0]):
            of_block = hidden[block], weight, teacher_hidden[block], teacher_weight
            of_parts, held = [found[:, block]], []
            for part in vocabulary_parts(rows, tile[1]):
                logits, (in_part, column) = _logits(of_block, part), labels_in(part, local[block])
                pairs = zip(logits, factors, strict=True)
                of_labels = [scaled(x.gather(1, column), *of_model).where(in_part, 0.0).t() for x, of_model in pairs]
                of_part = torch.cat([sums(*logits, factors, weighing, entropy), *of_labels])
                of_part[2:4] += shard.first + part.start
                of_parts.append(of_part)
                if weighing is None:
                    held.append(logits)
                del logits  # before the next ones are made
            found[:, block] = _merged(_of_ranks(_merged(of_parts, weighing), shard), weighing)
            while held:
                tops = of_parts.pop()[:2]
                scales = (tops - found[:2, block]).exp() / found[4:6, block]
                shares[:, block] += of_mixture(*held.pop(), tops.float(), scales.float(), factors, beta)
        tops, ids, totals = found[:6].view(3, 2, -1)
        log_totals = totals.log()
        logprobs, entropies = (found[8:] - tops - log_totals).float(), log_totals[0] - found[7] / totals[0]
        tops, totals = tops.float(), totals.float()
        if weighing is None:
            share, mean = torch.stack(_of_ranks(shares, shard)).sum(0)
            values = share + mean
        else:
            mean = found[6] / found[4 + weighing]
            values = mean - log_totals[weighing] + log_totals[1 - weighing]
        entropies = entropies.float() if entropy else torch.zeros_like(mean, dtype=torch.float32)
        of_teacher, agrees = logprobs[1].where(labels < shard.vocab, torch.nan), ids[0] == ids[1]
        both = hidden, weight, teacher_hidden, teacher_weight
        ctx.save_for_backward(*both, local, tops, totals, mean.float(), entropies)
        ctx.constants = rows, divergence, beta, factors, columns
        ctx.mark_non_differentiable(of_teacher, agrees, *([] if entropy else [entropies]))
        ctx.set_materialize_grads(False)
        return logprobs[0], entropies, values.clamp(min=0).float(), of_teacher, agrees

    @staticmethod
    def backward(
        ctx: Any, logprob_grad: Tensor | None, entropy_grad: Tensor | None, divergence_grad: Tensor | None, *_: Any
    ) -> tuple[Any, ...]:
        *both, local, tops, totals, mean, entropies = ctx.saved_tensors
        hidden, weight, *_ = both
        rows, *constants, columns = ctx.constants
        hidden_grad = torch.zeros_like(hidden, dtype=torch.float32)
        weight_grad = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        gradient_of = compiled(_gradient, hidden.is_cuda)
        logprob_grad = torch.zeros_like(mean) if logprob_grad is None else logprob_grad
        divergence_grad = torch.zeros_like(mean) if divergence_grad is None else divergence_grad
        of_tokens = tops, totals, mean, entropies, logprob_grad, entropy_grad, divergence_grad
        for part in vocabulary_parts(rows, columns):
            in_part, column = labels_in(part, local)
            label_grad = logprob_grad[:, None].where(in_part, 0.0)
            gradient = gradient_of(*_logits(both, part), *of_tokens, label_grad, column, *constants, weight.dtype)
            hidden_grad += product(gradient, weight[part])
            if weight_grad is not None:
                torch.mm(gradient.t(), hidden, out=weight_grad[part])
            del gradient  # before the next logits are made
        return hidden_grad.to(hidden.dtype), weight_grad, *[None] * 10


def _logits(both: Sequence[Tensor], part: slice) -> tuple[Tensor, Tensor]:
    """Returns the student's and the teacher's products with the rows of `part`."""
    hidden, weight, teacher_hidden, teacher_weight = both
    return product(hidden, weight[part].t()), product(teacher_hidden, teacher_weight[part].t())


def _of_ranks(values: Tensor, shard: VocabularyShard) -> list[Tensor]:
    """Returns `values` of every tensor rank, in the order of their ids."""
    if shard.group is None or shard.group.size() == 1:
        return [values]
    gathered = [torch.empty_like(values) for _ in range(shard.group.size())]
    dist.all_gather(gathered, values, group=shard.group)
    return gathered


def _sums(
    student: Tensor, teacher: Tensor, factors: tuple[Factors, Factors], weighing: int | None, entropy: bool
) -> Tensor:
    """Returns of a part of the scaled logits x of both models: the highest of each and their columns, the sums of e^y,
    y = x - highest, the sum of e^y (y - z) with y of the weighing model and z of the other, and of the student's y e^y.

    float64 [8, n], of the last two 0 if not wanted. Op by op it leaves e^y in the memory of the logits; compiled it
    leaves them alone, because writing them takes time.
    """
    lowered, tops, columns = [], [], []
    for logits, of_model in zip((student, teacher), factors, strict=True):
        memory = None if torch.compiler.is_compiling() else logits
        x = scaled(logits, *of_model, memory)
        top, column = x.max(-1)
        lowered.append(torch.sub(x, top[:, None], out=memory))
        tops.append(top)
        columns.append(column)
    weights = of_entropy = torch.zeros_like(tops[0])
    difference = None if weighing is None else lowered[weighing] - lowered[1 - weighing]
    if entropy:
        of_entropy = lowered[0].exp().mul_(lowered[0]).sum(-1)
    exponentials = [y.exp_() for y in lowered]
    if difference is not None:
        weights = difference.mul_(exponentials[weighing or 0]).sum(-1)
    totals = (each.sum(-1) for each in exponentials)
    return torch.stack([each.double() for each in (*tops, *columns, *totals, weights, of_entropy)])


def _merged(of_parts: Sequence[Tensor], weighing: int | None) -> Tensor:
    """Returns what `_sums` does, with ids for columns and both logits of the label behind, of all parts together.

    Ids rise from part to part. The label's logits are 0 where it is not in a part.
    """
    parts = torch.stack([*of_parts])
    tops, best = parts[:, :2].max(0)
    ids, by, first = parts[:, 2:4].gather(0, best[None])[0], parts[:, :2] - tops, weighing or 0
    factor, totals = by.exp(), parts[:, 4:6]
    weights = factor[:, first] * (parts[:, 6] + totals[:, first] * (by[:, first] - by[:, 1 - first]))
    of_entropy = factor[:, 0] * (parts[:, 7] + totals[:, 0] * by[:, 0])
    sums = torch.cat([factor * totals, torch.stack([weights, of_entropy], 1), parts[:, 8:]], 1)
    return torch.cat([tops, ids, sums.sum(0)])


def _lowered(logits: Tensor, top: Tensor, factors: Factors) -> Tensor:
    """Returns x - highest of a part, which may be changed in place; memory as in `_sums`.

    With the whole normalizer subtracted, rounding it would be felt: it is as large as logits are.
    """
    memory = None if torch.compiler.is_compiling() else logits
    return torch.sub(scaled(logits, *factors, memory), top[:, None], out=memory)


def _mixture_sums(
    student: Tensor, teacher: Tensor, tops: Tensor, scales: Tensor, factors: tuple[Factors, Factors], beta: float
) -> Tensor:
    """Returns the sums of beta q log q / m and of (1 - beta) p log p / m over a part, [2, n].

    student, teacher: what `_sums` leaves; tops: the part's; scales: of e^y, probabilities are that times it.
    """
    probabilities = []
    for left, top, its_scale, of_model in zip((student, teacher), tops, scales, factors, strict=True):
        exponentials = _lowered(left, top, of_model).exp() if torch.compiler.is_compiling() else left
        probabilities.append(exponentials.mul_(its_scale[:, None]).clamp_(min=LEAST))
    p, q = probabilities
    of_student = (q / p).sub_(1).mul_(beta).log1p_().mul_(p).sum(-1)
    of_teacher = (p / q).sub_(1).mul_(1 - beta).log1p_().mul_(q).sum(-1)
    return torch.stack([-beta * of_teacher, (beta - 1) * of_student])


def _gradient(
    student: Tensor,
    teacher: Tensor,
    tops: Tensor,
    totals: Tensor,
    mean: Tensor,
    entropies: Tensor,
    logprob_grad: Tensor,
    entropy_grad: Tensor | None,
    divergence_grad: Tensor,
    label_grad: Tensor,
    column: Tensor,
    divergence: Divergence,
    beta: float,
    factors: tuple[Factors, Factors],
    dtype: torch.dtype,
) -> Tensor:
    """Returns the loss's gradient for the student's logits of a part, in `dtype`; memory as in `_sums`.

    d divergence / d x_j = p_j - q_j (forward), p_j (g_j - mean), with g = log p / q but for a constant (reverse) or
    (1 - beta) log p / m (jsd), and mean = sum p g, [n]; the others as in heads.py.
    """
    y, z = _lowered(student, tops[0], factors[0]), _lowered(teacher, tops[1], factors[1])
    scale, cap = factors[0]
    slope = None if cap is None else (y + tops[0, :, None]).square_().mul_(-scale / cap**2).add_(scale)
    of_entropy = None
    if entropy_grad is not None:
        of_entropy = (y + (entropies - totals[0].log())[:, None]).mul_((-entropy_grad / totals[0])[:, None])
    of_divergence = divergence_grad / totals[0]  # p is e^y / total
    if divergence == "forward_kl":
        factor = (of_divergence - logprob_grad / totals[0])[:, None]
        gradient = y.exp_().mul_(factor if of_entropy is None else of_entropy.add_(factor))
        gradient.addcmul_(z.exp_(), (-divergence_grad / totals[1])[:, None])
    else:
        g = z.sub_(y).neg_() if divergence == "reverse_kl" else z.exp_().mul_((totals[0] / totals[1])[:, None])
        p = y.exp_().clamp_(min=LEAST)
        if divergence == "jsd":
            g.div_(p).sub_(1).mul_(beta).log1p_().mul_(beta - 1)
        g.mul_(of_divergence[:, None]).sub_((of_divergence * mean + logprob_grad / totals[0])[:, None])
        gradient = (g if of_entropy is None else g.add_(of_entropy)).mul_(p)
    gradient = add_labels(gradient, column, label_grad)
    if slope is not None or scale != 1.0:
        gradient = gradient.mul_(scale if slope is None else slope)
    return gradient.to(dtype)


BLOCK = 8
"""Columns of which the highest alone is looked at first."""


def _top_keys(logits: Tensor, first: int, k: int) -> Tensor:
    """Returns the keys of the k highest float32 logits [n, columns] of ids from `first` on, in any order, or of all.

    They are in the k blocks whose highest logits have the highest keys.
    """
    n, columns = logits.shape
    if columns <= 2 * k * BLOCK:
        keys = _keys(logits, torch.arange(first, first + columns, device=logits.device))
        return keys.topk(min(k, columns)).values
    whole = columns // BLOCK
    blocks = logits[:, : whole * BLOCK].view(n, whole, BLOCK)
    number = torch.arange(whole, device=logits.device)
    chosen = LOW - (_keys(blocks.amax(-1), number).topk(k).values & LOW)
    at = (chosen[..., None] * BLOCK + torch.arange(BLOCK, device=logits.device)).flatten(1)
    rest = torch.arange(whole * BLOCK, columns, device=logits.device).expand(n, -1)
    at = torch.cat([at, rest], 1)
    return _keys(logits.gather(1, at), first + at).topk(k).values


def _keys(logits: Tensor, ids: Tensor) -> Tensor:
    """Returns float32 logits of ids as int64 keys in the order of likelihood.

    Keys are distinct: of equal logits the lower id has the higher key. Upper 32 bits: the logit's bits, which order
    numbers of one sign by size, negative ones with all but the sign flipped; lower ones: 2^32 - 1 - id.
    """
    bits = (logits + 0.0).view(torch.int32)  # -0 is 0
    return (_ordered(bits).long() << 32) + (LOW - ids)


def _of_keys(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the ids and the logits of keys."""
    return LOW - (keys & LOW), _ordered((keys >> 32).int()).view(torch.float32)


def _ordered(bits: Tensor) -> Tensor:
    """Flips all bits but the sign of negative numbers; the inverse of itself."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)

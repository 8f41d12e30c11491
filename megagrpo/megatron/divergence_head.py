"""Distillation at the end of the last pipeline stage: the divergence of a student from a teacher of the same ranks, the
most likely ids of a model, and logprobs at given ids (heads.py has those of the sampled ones).

Logits [tokens, vocabulary] never exist, neither the student's nor the teacher's: both apply a few rows of their output
matrices at a time, the same ids, each half as many as a head of one model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megagrpo.algorithm.distillation import RATIO_MAX, Divergence
from megagrpo.megatron.attention import Collect
from megagrpo.megatron.heads import (
    LOWEST,
    VocabularyShard,
    columns_at_once,
    compiled,
    product,
    scaled,
    vocabulary_logprobs,
    vocabulary_parts,
)

LOW = 2**32 - 1
"""The lower bits of an int64."""

Factors = tuple[float, float | None]
"""Scale and cap of logits, both divided by the temperature."""


@dataclass(frozen=True)
class HeadScale:
    """Factors of a model's logits, made of products x with its output matrix: scale x, or cap tanh(scale x / cap), each
    divided by the temperature."""

    scale: float = 1.0
    cap: float | None = None
    temperature: float = 1.0

    @property
    def factors(self) -> Factors:
        return self.scale / self.temperature, None if self.cap is None else self.cap / self.temperature


def vocabulary_divergence(
    hidden: Tensor,
    positions: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    shard: VocabularyShard,
    *,
    divergence: Divergence,
    beta: float,
    student: HeadScale,
    teacher: HeadScale,
    chunk_columns: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the divergence of student p from teacher q over the vocabulary, and whether their most likely ids agree.

    forward_kl: sum q log(q / p); reverse_kl: sum p log(p / q); jsd: beta KL(q || m) + (1 - beta) KL(p || m) with
    m = beta q + (1 - beta) p, 0 < beta < 1 (arXiv:2306.13649): for beta near 0 it is beta times the forward KL, near 1
    1 - beta times the reverse one.
    hidden: [tokens, hidden], equal on all tensor ranks; positions: int64 [n], distinct rows of it; weight: [rows of
    this rank, hidden]; teacher_hidden: [n, its hidden size], at these positions; teacher_weight: its rows of the same
    ids. A model's two tensors are both float32 or both bfloat16. Returns float32 [n] and bool [n], equal on all tensor
    ranks. Of equally likely ids the lowest is the most likely.

    Gradients flow to `hidden` and `weight` as in `vocabulary_logprobs`, and not to the teacher. The forward pass
    gathers 7 numbers of each position from all tensor ranks; `jsd` computes all logits twice, and sums 2 more. The
    backward pass computes them again, and moves nothing.
    """
    columns = chunk_columns or columns_at_once(len(positions), hidden.device) // 2
    chosen: Tensor = Collect.apply(hidden, positions)
    of_teacher = teacher_hidden.detach(), teacher_weight.detach()
    values, agree = _VocabularyDivergence.apply(
        chosen, weight, *of_teacher, shard, divergence, beta, (student.factors, teacher.factors), columns
    )
    return values, agree


def logprobs_at(
    hidden: Tensor, positions: Tensor, ids: Tensor, weight: Tensor, shard: VocabularyShard, scale: HeadScale
) -> Tensor:
    """Returns log softmax at several ids of each position: float32 [n, k], with gradients as in `vocabulary_logprobs`.

    ids: int64 [n, k], below shard.vocab.
    """
    logprobs, _ = vocabulary_logprobs(
        hidden, positions, ids, weight, shard,
        temperature=scale.temperature, entropy=False, scale=scale.scale, cap=scale.cap,
    )  # fmt: skip
    return logprobs


@torch.no_grad()
def top_logprobs(
    hidden: Tensor,
    weight: Tensor,
    shard: VocabularyShard,
    k: int,
    scale: HeadScale,
    *,
    chunk_columns: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the k most likely ids, the most likely first, and their logprobs: int64 and float32 [n, k].

    hidden: [n, hidden]; k: at most shard.vocab. Both are equal on all tensor ranks, which gather k + 1 numbers of each
    row. Of equally likely ids the lower comes first.
    """
    columns = chunk_columns or columns_at_once(len(hidden), hidden.device) // 2
    best = torch.full((len(hidden), k), torch.iinfo(torch.int64).min, device=hidden.device)
    normalizer = torch.full((len(hidden),), LOWEST, dtype=torch.float64, device=hidden.device)
    for part in vocabulary_parts(shard.real_rows(len(weight)), columns):
        logits = product(hidden, weight[part].t())
        logits = scaled(logits, *scale.factors, logits)
        top = logits.amax(-1)
        total = (logits - top[:, None]).exp_().sum(-1)
        normalizer = torch.logaddexp(normalizer, top + total.double().log())
        keys = _keys(logits, shard.first + part.start)
        best = torch.cat([best, keys.topk(min(k, keys.shape[1])).values], 1).topk(k).values
    best = torch.cat(_of_ranks(best, shard), 1).topk(k).values
    normalizer = torch.stack(_of_ranks(normalizer, shard)).logsumexp(0)
    ids, logits = _of_keys(best)
    return ids, (logits - normalizer[:, None]).float()


class _VocabularyDivergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        shard: VocabularyShard,
        divergence: Divergence,
        beta: float,
        factors: tuple[Factors, Factors],
        columns: int,
    ) -> tuple[Tensor, Tensor]:
        both = hidden, weight, teacher_hidden, teacher_weight
        rows = shard.real_rows(len(weight))
        sums, merged, of_mixture = (compiled(each, hidden.is_cuda) for each in (_sums, _merged, _mixture_sums))
        order = -1 if divergence == "forward_kl" else 1  # the side whose probabilities weigh log ratios is first
        found = hidden.new_zeros(7, len(hidden), dtype=torch.float64)
        found[:2] = LOWEST
        for part in vocabulary_parts(rows, columns):
            of_part = sums(*_logits(both, part)[::order], factors[::order], divergence != "jsd")
            of_part[2:4] += shard.first + part.start
            found = merged(found, of_part)
        found, *others = _of_ranks(found, shard)
        for of_rank in others:
            found = merged(found, of_rank)
        (tops, ids, totals), mean = found[:6].view(3, 2, -1), found[6] / found[4]
        values, agree = mean - (totals[0] / totals[1]).log(), ids[0] == ids[1]
        if order < 0:
            tops, totals = tops.flip(0), totals.flip(0)
        tops, totals = tops.float(), totals.float()
        if divergence == "jsd":
            shares = hidden.new_zeros(2, len(hidden), dtype=torch.float64)
            for part in vocabulary_parts(rows, columns):
                shares += of_mixture(*_logits(both, part), tops, totals, factors, beta)
            of_teacher, mean = torch.stack(_of_ranks(shares, shard)).sum(0)
            values = of_teacher + mean
        ctx.save_for_backward(*both, tops, totals, mean.float())
        ctx.constants = rows, divergence, beta, factors, columns
        ctx.mark_non_differentiable(agree)
        return values.clamp(min=0).float(), agree

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
        *both, tops, totals, mean = ctx.saved_tensors
        hidden, weight, *_ = both
        rows, *constants, columns = ctx.constants
        hidden_grad = torch.zeros_like(hidden, dtype=torch.float32)
        weight_grad = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        gradient_of = compiled(_gradient, hidden.is_cuda)
        for part in vocabulary_parts(rows, columns):
            gradient = gradient_of(*_logits(both, part), tops, totals, mean, grad, *constants, weight.dtype)
            hidden_grad += product(gradient, weight[part])
            if weight_grad is not None:
                torch.mm(gradient.t(), hidden, out=weight_grad[part])
            del gradient  # before the next logits are made
        return hidden_grad.to(hidden.dtype), weight_grad, *[None] * 7


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


def _sums(first: Tensor, second: Tensor, factors: tuple[Factors, Factors], weighted: bool) -> Tensor:
    """Returns of a part of the scaled logits x of two models: the highest of each and their columns, the sums of e^y,
    y = x - highest, and the sum of e^y (y - z) with y of the first and z of the second (0 unless `weighted`).

    float64 [7, n]. Op by op it reuses the memory of the logits; compiled it leaves them alone, because writing them
    takes time.
    """
    lowered, tops, columns = [], [], []
    for logits, of_model in zip((first, second), factors, strict=True):
        memory = None if torch.compiler.is_compiling() else logits
        x = scaled(logits, *of_model, memory)
        top, column = x.max(-1)
        lowered.append(torch.sub(x, top[:, None], out=memory))
        tops.append(top)
        columns.append(column)
    difference = lowered[0] - lowered[1] if weighted else None
    exponentials = [y.exp_() for y in lowered]
    weights = torch.zeros_like(tops[0]) if difference is None else difference.mul_(exponentials[0]).sum(-1)
    totals = (each.sum(-1) for each in exponentials)
    return torch.stack([each.double() for each in (*tops, *columns, *totals, weights)])


def _merged(left: Tensor, right: Tensor) -> Tensor:
    """Returns what `_sums` does, with ids for columns, of two parts together. The ids of the left one are lower."""
    tops = torch.maximum(left[:2], right[:2])
    ids = right[2:4].where(right[:2] > left[:2], left[2:4])
    totals, weighted = torch.zeros_like(tops), torch.zeros_like(tops[:1])
    for part in (left, right):
        by = part[:2] - tops
        factor = by.exp()
        totals = totals + factor * part[4:6]
        weighted = weighted + factor[:1] * (part[6:] + part[4:5] * (by[:1] - by[1:]))
    return torch.cat([tops, ids, totals, weighted])


def _lowered(logits: Tensor, top: Tensor, factors: Factors) -> Tensor:
    """Returns x - highest of a part, which may be changed in place; memory as in `_sums`.

    With the whole normalizer subtracted, rounding it would be felt: it is as large as logits are.
    """
    memory = None if torch.compiler.is_compiling() else logits
    return torch.sub(scaled(logits, *factors, memory), top[:, None], out=memory)


def _log_p_of_mixture(log_ratio: Tensor, beta: float) -> Tensor:
    """Returns log p / m of log q / p, in place."""
    return log_ratio.clamp_(max=RATIO_MAX).expm1_().mul_(beta).log1p_().neg_()


def _mixture_sums(
    student: Tensor,
    teacher: Tensor,
    tops: Tensor,
    totals: Tensor,
    factors: tuple[Factors, Factors],
    beta: float,
) -> Tensor:
    """Returns the sums of beta q log q / m and of (1 - beta) p log p / m over a part, [2, n]."""
    y, z = _lowered(student, tops[0], factors[0]), _lowered(teacher, tops[1], factors[1])
    log_ratio = (z - y).add_((totals[0] / totals[1]).log()[:, None]).clamp_(max=RATIO_MAX)
    of_mixture = _log_p_of_mixture(log_ratio.clone(), beta)
    of_student = y.exp_().mul_(of_mixture).sum(-1) / totals[0]
    of_teacher = z.exp_().mul_(log_ratio.add_(of_mixture)).sum(-1) / totals[1]
    return torch.stack([beta * of_teacher, (1 - beta) * of_student])


def _gradient(
    student: Tensor,
    teacher: Tensor,
    tops: Tensor,
    totals: Tensor,
    mean: Tensor,
    grad: Tensor,
    divergence: Divergence,
    beta: float,
    factors: tuple[Factors, Factors],
    dtype: torch.dtype,
) -> Tensor:
    """Returns the loss's gradient for the student's logits of a part, in `dtype`; memory as in `_sums`.

    d divergence / d x_j = p_j - q_j (forward), p_j (g_j - mean), with g = log p / q but for a constant (reverse) or
    (1 - beta) log p / m (jsd), and mean = sum p g, [n];  d x / d logit = scale (1 - (x / cap)^2)
    """
    y, z = _lowered(student, tops[0], factors[0]), _lowered(teacher, tops[1], factors[1])
    scale, cap = factors[0]
    slope = None if cap is None else (y + tops[0, :, None]).square_().mul_(-scale / cap**2).add_(scale)
    ratio = (totals[0] / totals[1])[:, None]
    if divergence == "forward_kl":
        gradient = y.exp_().addcmul_(z.exp_(), -ratio)
    else:
        z.sub_(y)
        g = z.neg_() if divergence == "reverse_kl" else _log_p_of_mixture(z.add_(ratio.log()), beta).mul_(1 - beta)
        gradient = g.sub_(mean[:, None]).mul_(y.exp_())
    factor = (grad / totals[0])[:, None]  # p is e^y / total
    gradient = gradient.mul_(factor * scale if slope is None else slope.mul_(factor))
    return gradient.to(dtype)


def _keys(logits: Tensor, first: int) -> Tensor:
    """Returns float32 logits [n, columns] of ids from `first` on as int64 keys in the order of likelihood.

    Keys are distinct: of equal logits the lower id has the higher key. Upper 32 bits: the logit's bits, which order
    numbers of one sign by size, negative ones with all but the sign flipped; lower ones: 2^32 - 1 - id.
    """
    ids = torch.arange(first, first + logits.shape[1], device=logits.device)
    bits = (logits + 0.0).view(torch.int32)  # -0 is 0
    return (_ordered(bits).long() << 32) + (LOW - ids)


def _of_keys(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the ids and the logits of keys."""
    return LOW - (keys & LOW), _ordered((keys >> 32).int()).view(torch.float32)


def _ordered(bits: Tensor) -> Tensor:
    """Flips all bits but the sign of negative numbers; the inverse of itself."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)

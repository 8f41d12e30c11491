"""The end of the last pipeline stage: a policy's logprobs and entropies, or a critic's values.

Logits [tokens, vocabulary] never exist: both passes apply a few rows of the output matrix at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megagrpo.megatron.attention import Collect


class OutputLayer(torch.nn.Module):
    """Replaces a GPTModel's output layer: keeps its weight, under its name, but does not multiply by it.

    It returns the hidden states of all tokens of this context rank, equal on all tensor ranks. Each tensor rank
    computes with its own rows of the weight, so the gradients of the ranks are summed.
    """

    def __init__(self, linear: ColumnParallelLinear) -> None:
        super().__init__()
        self.register_parameter("weight", linear.weight)  # None: the embedding's serves
        self.sharded_state_dict = linear.sharded_state_dict  # Megatron's own checkpoints see no difference
        self.group = linear.tp_group
        self.sequence_parallel = linear.sequence_parallel

    def forward(
        self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """[tokens, or tokens / tensor with sequence parallelism, 1, hidden] -> [tokens, 1, hidden]."""
        if self.sequence_parallel:
            return gather_from_sequence_parallel_region(hidden, group=self.group), None
        return copy_to_tensor_model_parallel_region(hidden, group=self.group), None


def output_weight(chunk: GPTModel) -> Tensor:
    """The rows of the output matrix that this rank holds, [padded vocab / tensor, hidden]; `chunk` is the last."""
    own: Tensor | None = chunk.output_layer.weight
    return chunk.embedding.word_embeddings.weight if own is None else own


class ValueHead(torch.nn.Module):
    """A critic's linear layer from hidden to 1, whole on every tensor rank and float32 whatever the model's dtype.

    In bfloat16, values of about 1 would lie 1/128 apart: as much as the differences that they explain.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        self.weight = torch.nn.Parameter(
            torch.zeros(1, config.hidden_size, dtype=torch.float32, device=torch.cuda.current_device())
        )
        # Each tensor rank sees a part of the sequence; finalize_model_grads sums the gradients of marked parameters.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor, **_: Any) -> tuple[Tensor, None]:
        """hidden: [tokens of this rank, 1, hidden]. Values [tokens, 1, 1] float32, on all tensor ranks alike."""
        values = F.linear(hidden.float(), self.weight)
        if self.sequence_parallel:
            # All tensor ranks compute the same loss of all tokens: each needs only its own tokens' gradient back.
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


CHUNK_ELEMENTS = 2**22
"""Logits held at a time, 16 MiB in float32, besides a few temporaries of that size. More is slower on CPUs."""
CHUNK_COLUMNS = 2048
"""Logits per token at a time, at least, however many tokens: narrower matrices are inefficient on GPUs."""


@dataclass(frozen=True)
class VocabularyShard:
    """The rows of the output matrix that one tensor rank holds. Rows from `vocab` on are padding."""

    vocab: int
    first: int
    group: dist.ProcessGroup | None  # the tensor ranks; None if there is one

    def real_rows(self, rows: int) -> int:
        return max(0, min(rows, self.vocab - self.first))


def vocabulary_logprobs(
    hidden: Tensor,
    positions: Tensor,
    labels: Tensor,
    weight: Tensor,
    shard: VocabularyShard,
    *,
    temperature: float,
    entropy: bool,
    chunk_columns: int | None = None,
) -> tuple[Tensor, Tensor]:
    """log softmax(hidden weight^T / temperature) at `labels`, and the entropy of that softmax, at `positions` only.

    hidden: [tokens, hidden], equal on all tensor ranks; positions: int64 [n], distinct rows of it; labels: int64 [n],
    in the whole vocabulary; weight: [rows of this rank, hidden], float32 or bfloat16 as `hidden`. Returns two float32
    [n], equal on all tensor ranks; the second is zeros unless `entropy`.

    Gradients flow from both to `hidden`, the part from this rank's rows (to be summed over tensor ranks), and to
    `weight` unless it is frozen. Products are in the dtype of `weight`; everything between them and all sums are in
    float32. The forward pass takes two all-reduces of [n], the backward pass none. Sums over the vocabulary follow
    arXiv:1805.02867.
    """
    columns = chunk_columns or max(CHUNK_COLUMNS, CHUNK_ELEMENTS // max(len(positions), 1))
    chosen: Tensor = Collect.apply(hidden, positions)
    logprobs, entropies = _VocabularyLogprobs.apply(chosen, weight, labels, shard, 1.0 / temperature, entropy, columns)
    return logprobs, entropies


class _VocabularyLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        shard: VocabularyShard,
        scale: float,
        entropy: bool,
        columns: int,
    ) -> tuple[Tensor, Tensor]:
        rows = shard.real_rows(len(weight))
        local = labels - shard.first
        of_label, total, weighted = hidden.new_zeros(3, len(hidden), dtype=torch.float32)
        top = torch.full_like(total, torch.finfo(torch.float32).min)
        for part in _parts(rows, columns):
            logits = _logits(hidden, weight[part], scale)
            higher = torch.maximum(top, logits.amax(-1))
            here, column = _labels_in(part, local)
            of_label += logits.gather(1, column)[:, 0].where(here, 0.0)
            logits -= higher[:, None]
            _lower(total, weighted, top - higher)
            top = higher
            if entropy:
                exponentials = logits.exp()
                weighted += torch.linalg.vecdot(exponentials, logits)
            else:
                exponentials = logits.exp_()
            total += exponentials.sum(-1)
        if shard.group is not None and shard.group.size() > 1:
            highest = top.clone()
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=shard.group)
            _lower(total, weighted, top - highest)
            top = highest
            sums = torch.stack([of_label, total, weighted])
            dist.all_reduce(sums, group=shard.group)
            of_label, total, weighted = sums
        log_total = total.log()
        logprobs = of_label - top - log_total
        entropies = log_total - weighted / total if entropy else torch.zeros_like(total)
        ctx.save_for_backward(hidden, weight, local, top + log_total, entropies)
        ctx.constants = rows, scale, columns
        if not entropy:
            ctx.mark_non_differentiable(entropies)
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, logprob_grad: Tensor | None, entropy_grad: Tensor | None) -> tuple[Any, ...]:
        hidden, weight, local, normalizer, entropies = ctx.saved_tensors
        rows, scale, columns = ctx.constants
        hidden_grad = torch.zeros_like(hidden, dtype=torch.float32)
        weight_grad = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        # d logprob / d x_j = [j is the label] - p_j;  d entropy / d x_j = -p_j (log p_j + entropy)
        for part in _parts(rows, columns):
            log_p = _logits(hidden, weight[part], scale).sub_(normalizer[:, None])
            if entropy_grad is not None:
                factor = (log_p + entropies[:, None]).mul_(entropy_grad[:, None])
                if logprob_grad is not None:
                    factor += logprob_grad[:, None]
                gradient = log_p.exp_().mul_(factor).neg_()
            elif logprob_grad is not None:
                gradient = log_p.exp_().mul_(-logprob_grad[:, None])
            else:
                break
            if logprob_grad is not None:
                here, column = _labels_in(part, local)
                gradient.scatter_add_(1, column, logprob_grad.where(here, 0.0)[:, None])
            if scale != 1.0:
                gradient *= scale
            gradient = gradient.to(weight.dtype)
            hidden_grad += gradient @ weight[part]
            if weight_grad is not None:
                torch.mm(gradient.t(), hidden, out=weight_grad[part])
        return hidden_grad.to(hidden.dtype), weight_grad, None, None, None, None, None


def _parts(rows: int, columns: int) -> Iterator[slice]:
    """Slices of the output matrix's rows (columns of the logits), about `columns` each and of about equal size."""
    count = -(-rows // columns)
    ends = [rows * i // count for i in range(count + 1)] if count else [0]
    return map(slice, ends, ends[1:])


def _logits(hidden: Tensor, weight: Tensor, scale: float) -> Tensor:
    """Float32 [n, rows of weight], divided by the temperature."""
    logits = (hidden @ weight.t()).float()
    return logits if scale == 1.0 else logits.mul_(scale)


def _labels_in(part: slice, local: Tensor) -> tuple[Tensor, Tensor]:
    """Which labels lie in `part`, bool [n], and their columns in it, int64 [n, 1], 0 for the others."""
    here = (local >= part.start) & (local < part.stop)
    return here, (local - part.start).where(here, 0)[:, None]


def _lower(total: Tensor, weighted: Tensor, by: Tensor) -> None:
    """Turns sums of e^x and of x e^x into the sums for x + by, in place. `by` is finite and <= 0."""
    weighted += total * by
    factor = by.exp()
    total *= factor
    weighted *= factor

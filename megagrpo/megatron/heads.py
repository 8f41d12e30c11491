"""The end of the last pipeline stage: a policy's logprobs and entropies, or a critic's values.

Logits [tokens, vocabulary] never exist: both passes apply a few rows of the output matrix at a time. They are float32
also where weights are bfloat16: rounded, they would be off by 0.02 nats.

Bytes moved for each logit, with bfloat16 weights. Where torch.compile fuses what is between products (CUDA): 12
forward (a product writes the logit, which is read for the highest and for the sums) and 14 backward (made again, turned
into a bfloat16 gradient, read by two products), with an entropy or without. Op by op, as on CPUs: 28 and 46, 44 and 46
with an entropy, 44 and 74 if the loss has it too. A cap on logits moves no more where fused; op by op 24 and 60.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
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
from megagrpo.weights.families.architecture import Architecture


class OutputLayer(torch.nn.Module):
    """A replacement for a GPTModel's output layer that keeps its weight, under its name, but does not multiply by it.

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
        """Maps [tokens, 1, hidden], with sequence parallelism [tokens / tensor, 1, hidden], to [tokens, 1, hidden]."""
        if self.sequence_parallel:
            return gather_from_sequence_parallel_region(hidden, group=self.group), None
        return copy_to_tensor_model_parallel_region(hidden, group=self.group), None


def output_weight(chunk: GPTModel) -> Tensor:
    """Returns this rank's rows of the output matrix, [padded vocab / tensor, hidden]; `chunk` is the last."""
    weight: Tensor | None = chunk.output_layer.weight
    return chunk.embedding.word_embeddings.weight if weight is None else weight


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
        # Adam trains it where Muon trains matrices.
        self.weight.is_embedding_or_output_parameter = True  # type: ignore[attr-defined]
        # Each tensor rank sees a part of the sequence; finalize_model_grads sums the gradients of marked parameters.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor, **_: Any) -> tuple[Tensor, None]:
        """Maps hidden [tokens of this rank, 1, hidden] to values [tokens, 1, 1], float32, equal on all tensor ranks."""
        values = F.linear(hidden.float(), self.weight)
        if self.sequence_parallel:
            # All tensor ranks compute the same loss of all tokens: each needs only its own tokens' gradient back.
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


CHUNK_ELEMENTS = 2**22
"""Logits held at a time, 16 MiB in float32, besides a few temporaries of that size. More is slower on CPUs."""
CHUNK_COLUMNS: Mapping[str, int] = {"cpu": 2048, "cuda": 8192}
"""Logits per token at a time, at least, however many tokens: narrower matrices are inefficient on GPUs."""


ALIGNED = 64
LOWEST = -1e15
"""A logit of probability 0, also in a softmax of such logits alone that others follow. Its square is finite."""


@dataclass(frozen=True)
class VocabularyShard:
    """The rows of the output matrix that one tensor rank holds. Rows from `vocab` on are padding."""

    vocab: int
    first: int
    group: dist.ProcessGroup | None  # the tensor ranks; None if there is one

    def real_rows(self, rows: int) -> int:
        return max(0, min(rows, self.vocab - self.first))


Factors = tuple[float, float | None]
"""Scale and cap of logits, both divided by the temperature."""


@dataclass(frozen=True)
class HeadScale:
    """Factors of a model's logits, made of products x with its output matrix: scale x, or cap tanh(scale x / cap)
    (arXiv:2408.00118, section 2), each divided by the temperature."""

    scale: float = 1.0
    cap: float | None = None
    temperature: float = 1.0

    @property
    def factors(self) -> Factors:
        return self.scale / self.temperature, None if self.cap is None else self.cap / self.temperature


@dataclass(frozen=True)
class Head:
    """The output matrix of a model on this rank, and what makes logits of its products."""

    weight: Tensor  # [rows of this rank, hidden], float32 or bfloat16 as the hidden states
    shard: VocabularyShard
    scale: HeadScale


def head_scale(architecture: Architecture, temperature: float) -> HeadScale:
    """Makes the factors of a model's logits."""
    return HeadScale(architecture.logit_scale, architecture.logit_cap, temperature)


def vocabulary_logprobs(
    hidden: Tensor,
    positions: Tensor,
    labels: Tensor,
    head: Head,
    *,
    entropy: bool,
    kept_bits: Tensor | None = None,
    known: tuple[Tensor, Tensor, Tensor] | None = None,
    chunk_columns: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns log softmax(logits / temperature) at `labels`, and that softmax's entropy, at `positions` only.

    hidden: [tokens, hidden], equal on all tensor ranks; positions: int64 [n], distinct rows of it; labels: int64 [n],
    or [n, k] for several of each, in the whole vocabulary. Returns float32 as `labels` and [n], equal on all tensor
    ranks; the second is zeros unless `entropy`. With `kept_bits`, uint8 [n, bytes], both are over each token's own ids:
    bit i % 8 of byte i // 8 says whether id i is kept, the last byte is for all behind. known: the results and the log
    of the sum of e^x of each token, if an earlier pass has found them: then the forward pass multiplies nothing.

    Gradients flow from both to `hidden`, the part from this rank's rows (to be summed over tensor ranks), and to the
    matrix unless it is frozen. Products multiply in the dtype of the matrix and give float32, but for its gradient;
    everything between them and all sums are in float32. The entropy's gradient is computed only if the loss has one.
    The forward pass takes two all-reduces of [n], the backward pass none. Sums over the vocabulary follow
    arXiv:1805.02867.
    """
    columns = chunk_columns or columns_at_once(len(positions), hidden.device)
    chosen: Tensor = Collect.apply(hidden, positions)
    several = labels if labels.dim() == 2 else labels[:, None]
    logprobs, entropies = _VocabularyLogprobs.apply(
        chosen, head.weight, several, kept_bits, head.shard, *head.scale.factors, entropy, columns, known
    )
    return logprobs.view(labels.shape), entropies


def columns_at_once(tokens: int, device: torch.device, models: int = 1) -> int:
    """Returns how many columns of the logits of so many tokens exist at a time, of each model."""
    return max(CHUNK_COLUMNS[device.type], CHUNK_ELEMENTS // max(tokens, 1)) // models // ALIGNED * ALIGNED


class _VocabularyLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        bits: Tensor | None,
        shard: VocabularyShard,
        scale: float,
        cap: float | None,
        entropy: bool,
        columns: int,
        known: tuple[Tensor, Tensor, Tensor] | None,
    ) -> tuple[Tensor, Tensor]:
        rows = shard.real_rows(len(weight))
        local = labels - shard.first
        ctx.constants = rows, shard, scale, cap, columns
        ctx.set_materialize_grads(False)
        if known is not None:
            logprobs, entropies = known[0].clone(), known[1].clone()
            ctx.save_for_backward(hidden, weight, local, bits, known[2], entropies)
            if not entropy:
                ctx.mark_non_differentiable(entropies)
            return logprobs, entropies
        of_label = torch.zeros_like(labels, dtype=torch.float32)
        total, weighted = hidden.new_zeros(2, len(hidden), dtype=torch.float32)
        top = torch.full_like(total, torch.finfo(torch.float32).min)
        sums = compiled(exponential_sums, hidden.is_cuda)
        for part in vocabulary_parts(rows, columns):
            logits = product(hidden, weight[part].t())
            in_part, column = labels_in(part, local)
            of_label += scaled(logits.gather(1, column), scale, cap).where(in_part, 0.0)
            higher, of_part, weighted_of_part = sums(logits, top, _dropped(bits, part, shard), scale, cap, entropy)
            del logits  # before the next ones are made
            _lower(total, weighted, top - higher)
            top = higher
            total += of_part
            if weighted_of_part is not None:
                weighted += weighted_of_part
        if shard.group is not None and shard.group.size() > 1:
            highest = top.clone()
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=shard.group)
            _lower(total, weighted, top - highest)
            top = highest
            together = torch.cat([of_label, total[:, None], weighted[:, None]], 1)
            dist.all_reduce(together, group=shard.group)
            of_label, total, weighted = together[:, :-2], together[:, -2], together[:, -1]
        log_total = total.log()
        logprobs = of_label - top[:, None] - log_total[:, None]
        entropies = log_total - weighted / total if entropy else torch.zeros_like(total)
        ctx.save_for_backward(hidden, weight, local, bits, top + log_total, entropies)
        if not entropy:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, logprob_grad: Tensor | None, entropy_grad: Tensor | None) -> tuple[Any, ...]:
        hidden, weight, local, bits, normalizer, entropies = ctx.saved_tensors
        rows, shard, scale, cap, columns = ctx.constants
        hidden_grad = torch.zeros_like(hidden, dtype=torch.float32)
        weight_grad = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        gradient_of = compiled(_gradient, hidden.is_cuda)
        if logprob_grad is None:
            logprob_grad = torch.zeros_like(local, dtype=torch.float32)
        of_all_labels = logprob_grad.sum(1)
        for part in vocabulary_parts(rows, columns):
            in_part, column = labels_in(part, local)
            label_grad = logprob_grad.where(in_part, 0.0)
            logits = product(hidden, weight[part].t())
            of_tokens = _dropped(bits, part, shard), normalizer, entropies, of_all_labels, entropy_grad, label_grad
            gradient = gradient_of(logits, *of_tokens, column, scale, cap, weight.dtype)
            del logits
            hidden_grad += product(gradient, weight[part])
            if weight_grad is not None:
                torch.mm(gradient.t(), hidden, out=weight_grad[part])
            del gradient
        return hidden_grad.to(hidden.dtype), weight_grad, *[None] * 8


@cache
def compiled(function: Callable[..., Any], on_cuda: bool) -> Callable[..., Any]:
    """Compiles elementwise operations to a kernel on CUDA. They run op by op elsewhere or if TORCHDYNAMO_DISABLE=1."""
    return torch.compile(function, dynamic=True) if on_cuda else function


def _dropped(bits: Tensor | None, part: slice, shard: VocabularyShard) -> Tensor | None:
    """Unpacks the columns of `part` of `kept_bits`: bool [n, columns], True for ids that are not kept."""
    if bits is None:
        return None
    ids = torch.arange(shard.first + part.start, shard.first + part.stop, device=bits.device)
    shifted = bits[:, (ids // 8).clamp(max=bits.shape[1] - 1)]
    shifted >>= (ids % 8).to(torch.uint8)
    shifted &= 1
    return shifted == 0


def scaled(logits: Tensor, scale: float, cap: float | None, memory: Tensor | None = None) -> Tensor:
    """Returns what the softmax takes of products with the output matrix, in `memory` if it changes them.

    `scale` and `cap` are divided by the temperature.
    """
    if cap is None:
        return logits if scale == 1.0 else torch.mul(logits, scale, out=memory)
    return torch.mul(torch.tanh(torch.mul(logits, scale / cap, out=memory), out=memory), cap, out=memory)


def _masked(logits: Tensor, dropped: Tensor | None, memory: Tensor | None) -> Tensor:
    """Lowers logits until they count nothing, in place with `memory`. Infinite ones would make an entropy NaN."""
    if dropped is None:
        return logits
    return logits.masked_fill(dropped, LOWEST) if memory is None else logits.masked_fill_(dropped, LOWEST)


def exponential_sums(
    logits: Tensor, top: Tensor, dropped: Tensor | None, scale: float, cap: float | None, entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the highest scaled logit x of each row and `top`; sums over the row of e^y and y e^y, y = x - highest.

    Op by op it reuses the memory of `logits`; compiled it leaves them alone, because writing them takes time.
    """
    memory = None if torch.compiler.is_compiling() else logits
    logits = _masked(scaled(logits, scale, cap, memory), dropped, memory)
    higher = torch.maximum(top, logits.amax(-1))
    logits = torch.sub(logits, higher[:, None], out=memory)
    if not entropy:
        return higher, torch.exp(logits, out=memory).sum(-1), None
    exponentials = logits.exp()
    return higher, exponentials.sum(-1), torch.mul(exponentials, logits, out=memory).sum(-1)


def _gradient(
    logits: Tensor,
    dropped: Tensor | None,
    normalizer: Tensor,
    entropies: Tensor,
    logprob_grad: Tensor,
    entropy_grad: Tensor | None,
    label_grad: Tensor,
    column: Tensor,
    scale: float,
    cap: float | None,
    dtype: torch.dtype,
) -> Tensor:
    """Returns the loss's gradient for `logits`, in `dtype`; memory as in `exponential_sums`.

    logprob_grad: sum over a token's labels; label_grad: of each, [n, k], where `column` is the label's, else 0.
    d logprob / d x_j = [j is the label] - p_j;  d entropy / d x_j = -p_j (log p_j + entropy);
    d x / d logit = scale (1 - (x / cap)^2)
    """
    memory = None if torch.compiler.is_compiling() else logits
    logits = _masked(scaled(logits, scale, cap, memory), dropped, memory)
    slope = scale if cap is None else logits.square().mul_(-scale / cap**2).add_(scale)
    log_p = torch.sub(logits, normalizer[:, None], out=memory)
    factor = -logprob_grad[:, None]
    if entropy_grad is not None:
        factor = (log_p + entropies[:, None]).mul_(-entropy_grad[:, None]).add_(factor)
    gradient = torch.mul(torch.exp(log_p, out=memory), factor, out=memory)
    gradient = add_labels(gradient, column, label_grad)
    if cap is not None or scale != 1.0:
        gradient = torch.mul(gradient, slope, out=memory)
    return gradient.to(dtype)


def add_labels(gradient: Tensor, column: Tensor, label_grad: Tensor) -> Tensor:
    """Adds `label_grad` at the labels' columns, both [n, k], in place unless compiled for one label of each token."""
    if torch.compiler.is_compiling() and column.shape[1] == 1:
        is_label = torch.arange(gradient.shape[1], device=gradient.device) == column
        return gradient + torch.where(is_label, label_grad, 0.0)
    return gradient.scatter_add_(1, column, label_grad)


def product(left: Tensor, right: Tensor) -> Tensor:
    """Multiplies two matrices, both in float32 or both in bfloat16. The product is in float32."""
    if left.dtype == torch.float32:
        return left @ right
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def vocabulary_parts(rows: int, columns: int) -> Iterator[slice]:
    """Yields slices of rows, as of the output matrix (columns of the logits), at most `columns` each, about equal.

    Products are slow with widths that are no multiples of 16, and on GPUs with matrices that do not begin at multiples
    of 16 bytes: ends are multiples of ALIGNED.
    """
    width = -(-rows // max(1, -(-rows // max(1, columns))))
    if columns % ALIGNED == 0:
        width = -(-width // ALIGNED) * ALIGNED
    for begin in range(0, rows, max(1, width)):
        yield slice(begin, min(begin + width, rows))


def labels_in(part: slice, local: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a mask of the labels in `part`, bool [n, k], and their columns in it, int64 [n, k], 0 for others."""
    in_part = (local >= part.start) & (local < part.stop)
    return in_part, (local - part.start).where(in_part, 0)


def _lower(total: Tensor, weighted: Tensor, by: Tensor) -> None:
    """Lowers sums of e^x and of x e^x to the sums for x + by, in place. `by` is finite and <= 0."""
    weighted += total * by
    factor = by.exp()
    total *= factor
    weighted *= factor

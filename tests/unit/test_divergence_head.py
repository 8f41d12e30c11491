"""Divergences over the vocabulary, most likely ids and logprobs at given ids, against full logits in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.logits_memory import peak_bytes
from megagrpo.algorithm.distillation import divergence_of_top
from megagrpo.megatron.divergence_head import top_logprobs, vocabulary_divergence
from megagrpo.megatron.heads import Head, HeadScale, VocabularyShard, vocabulary_logprobs
from tests.fused_kernels import moved_and_errors

PLAIN = HeadScale()
DIVERGENCES = "forward_kl", "reverse_kl", "jsd"


@dataclass(frozen=True)
class Case:
    """A student, a teacher and what is asked of them. Sizes: tokens, positions, ids, both hidden sizes."""

    divergence: Any
    beta: float = 0.3
    student: HeadScale = PLAIN
    teacher: HeadScale = PLAIN
    sizes: tuple[int, int, int, int, int] = (23, 17, 131, 16, 24)
    padding: int = 3
    chunk_columns: int | None = 9
    dtype: torch.dtype = torch.float32
    seed: int = 0
    of_loss: tuple[bool, bool, bool] = (True, True, True)
    """Terms of the loss: the divergence, logprobs of the labels, entropies."""

    def tensors(self) -> tuple[Tensor, ...]:
        """Hidden states, positions, matrix, the teacher's hidden states and matrix, labels, weights of three values at
        the positions in a loss."""
        random = torch.Generator().manual_seed(self.seed)
        tokens, n, vocab, hidden, of_teacher = self.sizes
        states = torch.randn(tokens, hidden, generator=random), torch.randn(n, of_teacher, generator=random)
        matrices = (torch.randn(vocab, size, generator=random) * 2 / size**0.5 for size in (hidden, of_teacher))
        (own, others), (matrix, its_matrix) = ([each.to(self.dtype) for each in pair] for pair in (states, matrices))
        positions = torch.randperm(tokens, generator=random)[:n]
        labels = torch.randint(0, vocab, (n,), generator=random)
        weights = torch.randn(3, n, generator=random) * torch.tensor(self.of_loss)[:, None]
        return own, positions, matrix, others, its_matrix, labels, weights


def log_softmax(hidden: Tensor, matrix: Tensor, scale: HeadScale) -> Tensor:
    """Over all ids, in float64."""
    logits = hidden.double() @ matrix.double().t() * scale.scale
    logits = logits if scale.cap is None else scale.cap * torch.tanh(logits / scale.cap)
    return torch.log_softmax(logits / scale.temperature, -1)


def divergence_of(log_p: Tensor, log_q: Tensor, divergence: str, beta: float) -> Tensor:
    """Returns what the definitions have."""

    def kl(left: Tensor, right: Tensor) -> Tensor:
        return (left.exp() * (left - right)).sum(-1)

    mixture = torch.logaddexp(log_q + math.log(beta), log_p + math.log1p(-beta))
    return {
        "forward_kl": lambda: kl(log_q, log_p),
        "reverse_kl": lambda: kl(log_p, log_q),
        "jsd": lambda: beta * kl(log_q, mixture) + (1 - beta) * kl(log_p, mixture),
    }[divergence]()


def part_of(matrix: Tensor, first: int, rows: int) -> Tensor:
    """Rows of a rank, filled up with padding that would win every softmax."""
    real = matrix[first : first + rows]
    return torch.cat([real, torch.full((rows - len(real), matrix.shape[1]), 50.0, dtype=matrix.dtype)])


def plain(matrix: Tensor) -> Head:
    return Head(matrix, VocabularyShard(len(matrix), 0, None), PLAIN)


def errors(case: Case) -> tuple[float, float, float]:
    """Largest errors of this process' part: of divergences, relative above 1, of logprobs and entropies, relative to
    the range of logits; of the gradients of the hidden states and of the matrix, relative to the largest number above
    0.1."""
    hidden, positions, matrix, others, its_matrix, labels, weights = case.tensors()
    exact = hidden.double().requires_grad_(), matrix.double().requires_grad_()
    log_p, log_q = (
        log_softmax(exact[0][positions], exact[1], case.student),
        log_softmax(others, its_matrix, case.teacher),
    )
    of_label, entropies = log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    wanted = torch.stack([divergence_of(log_p, log_q, case.divergence, case.beta), of_label, entropies])
    of_hidden, of_matrix = torch.autograd.grad((wanted * weights).sum(), exact)

    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    rows = -(-len(matrix) // ranks) + case.padding // ranks
    shard = VocabularyShard(len(matrix), rows * rank, dist.group.WORLD if ranks > 1 else None)
    own = part_of(matrix, shard.first, rows).requires_grad_()
    hidden.requires_grad_()
    entropy = case.of_loss[2]
    student, teacher = Head(own, shard, case.student), Head(part_of(its_matrix, shard.first, rows), shard, case.teacher)
    found = vocabulary_divergence(
        hidden, positions, labels, student, others, teacher, divergence=case.divergence, beta=case.beta,
        entropy=entropy, chunk_columns=case.chunk_columns,
    )  # fmt: skip
    three = found.divergence, found.logprobs, found.entropies
    sum((value * weight).sum() for value, weight in zip(three, weights, strict=True) if weight.any()).backward()
    assert hidden.grad is not None
    assert own.grad is not None
    assert {value.dtype for value in three} == {torch.float32}
    assert found.entropies.requires_grad == entropy
    assert entropy or not found.entropies.any()
    assert not found.agrees.requires_grad
    assert torch.equal(found.agrees, log_p.argmax(-1) == log_q.argmax(-1)) or case.dtype == torch.bfloat16
    assert (found.of_teacher - log_q.gather(1, labels[:, None])[:, 0]).abs().max() < 1e-6 * max(1, log_q.abs().max())
    values = torch.stack(three if entropy else (*three[:2], wanted[2].float()))
    whole = hidden.grad.double()
    if ranks > 1:
        dist.all_reduce(whole)
    real = shard.real_rows(rows)
    assert not own.grad[real:].any()
    range_of_logits = log_p.detach().abs().amax(-1).clamp(min=1)
    sizes = torch.stack([torch.ones_like(range_of_logits), range_of_logits, range_of_logits])
    of_rows = own.grad[:real] - of_matrix[shard.first : shard.first + real]
    return (
        ((values - wanted).abs() / wanted.abs().maximum(sizes)).max().item(),
        ((whole - of_hidden).abs().max() / of_hidden.abs().max().clamp(min=0.1)).item(),
        (of_rows.abs().amax() / of_matrix.abs().max().clamp(min=0.1)).item() if real else 0.0,
    )


scales = st.builds(
    HeadScale,
    scale=st.sampled_from([1.0, 0.4, 2.0]),
    cap=st.sampled_from([None, 3.0]),
    temperature=st.sampled_from([1.0, 0.6, 1.7]),
)
cases = st.builds(
    Case,
    divergence=st.sampled_from(DIVERGENCES),
    beta=st.floats(0.02, 0.98),
    student=scales,
    teacher=scales,
    sizes=st.tuples(st.integers(9, 30), st.integers(1, 9), st.integers(2, 200), st.integers(2, 40), st.integers(2, 40)),
    padding=st.integers(0, 70),
    chunk_columns=st.sampled_from([None, 1, 7, 64]),
    seed=st.integers(0, 10**6),
    of_loss=st.sampled_from([(True, False, False), (True, True, False), (True, True, True), (False, True, True)]),
)


@settings(max_examples=150)
@given(cases)
def test_values_and_gradients_are_those_of_full_logits(case: Case) -> None:
    of_values, *of_gradients = errors(case)
    assert of_values < 1e-6
    assert max(of_gradients) < 1e-5


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_weights_in_bfloat16_cost_some_roundings_of_gradients(divergence: str) -> None:
    case = Case(divergence, sizes=(23, 17, 1031, 16, 24), chunk_columns=64, dtype=torch.bfloat16)
    of_values, *of_gradients = errors(case)
    assert of_values < 1e-6
    assert max(of_gradients) < 0.01


def test_a_distant_teacher_has_finite_values_and_gradients() -> None:
    """Log ratios of hundreds of nats, in both directions."""
    for divergence in DIVERGENCES:
        case = Case(divergence, student=HeadScale(scale=60.0), teacher=HeadScale(scale=60.0), chunk_columns=40)
        of_values, *of_gradients = errors(case)
        assert of_values < 3e-6
        assert max(of_gradients) < 1e-4


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_a_teacher_that_is_the_student_is_at_no_distance(divergence: Any) -> None:
    hidden, positions, matrix, _, _, labels, _ = Case(divergence).tensors()
    hidden.requires_grad_()
    head = plain(matrix)
    found = vocabulary_divergence(
        hidden, positions, labels, head, hidden.detach()[positions], head, divergence=divergence, beta=0.5
    )
    found.divergence.sum().backward()
    assert found.agrees.all()
    assert not found.divergence.any()
    assert hidden.grad is not None
    assert hidden.grad.abs().max() < 1e-5


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_a_frozen_matrix_and_no_positions(divergence: Any) -> None:
    hidden, positions, matrix, others, its_matrix, labels, _ = Case(divergence).tensors()
    hidden.requires_grad_()
    for n in (len(positions), 0):
        found = vocabulary_divergence(
            hidden, positions[:n], labels[:n], plain(matrix), others[:n], plain(its_matrix), divergence=divergence,
            beta=0.5,
        )  # fmt: skip
        found.divergence.sum().backward()
        assert found.logprobs.shape == found.divergence.shape == found.agrees.shape == (n,)
        assert matrix.grad is None
        assert hidden.grad is not None


def test_of_equal_logits_the_lowest_id_is_the_most_likely() -> None:
    """Ids 1 and 3 are the student's best, 1 alone is the teacher's, wherever chunks end."""
    student, teacher = torch.tensor([[0.0, 2, 1, 2]]), torch.tensor([[1.0, 4, 0, 3]])
    hidden, at = torch.ones(1, 1), torch.tensor([0])
    for columns in (1, 2, 3, 4):
        found = vocabulary_divergence(
            hidden, at, at, plain(student.t()), hidden, plain(teacher.t()), divergence="forward_kl", beta=0.5,
            chunk_columns=columns,
        )  # fmt: skip
        assert found.agrees.all()


@settings(max_examples=60)
@given(st.integers(2, 400), st.integers(1, 40), st.sampled_from([None, 1, 7, 64]), scales, st.integers(0, 10**6))
def test_most_likely_ids_come_in_order_with_their_logprobs(
    vocab: int, k: int, columns: int | None, scale: HeadScale, seed: int
) -> None:
    """Small whole numbers: many logits are equal. Of fewer ids than k, all are found."""
    random = torch.Generator().manual_seed(seed)
    hidden, matrix = (torch.randint(-2, 3, (size, 3), generator=random).float() for size in (8, vocab))
    labels = torch.randint(0, vocab, (8,), generator=random)
    head = Head(part_of(matrix, 0, vocab + 5), VocabularyShard(vocab, 0, None), scale)
    top = top_logprobs(hidden, labels, head, k, entropy=True, chunk_columns=columns)
    order = (hidden @ matrix.t()).argsort(dim=-1, descending=True, stable=True)[:, :k]
    wanted = log_softmax(hidden, matrix, scale)
    assert top.ids.dtype == torch.int64
    assert top.logprobs.dtype == top.of_labels.dtype == top.normalizer.dtype == torch.float32
    assert torch.equal(top.ids, order)
    assert (top.logprobs - wanted.gather(1, order)).abs().max() < 8e-6  # float32, logits are up to 40
    assert (top.of_labels - wanted.gather(1, labels[:, None])[:, 0]).abs().max() < 8e-6
    assert (top.entropies + (wanted.exp() * wanted).sum(-1)).abs().max() < 2e-5


@settings(max_examples=60)
@given(st.integers(2, 150), st.integers(1, 40), scales, st.integers(0, 10**6))
def test_logprobs_at_several_ids_entropies_and_their_gradients(vocab: int, k: int, scale: HeadScale, seed: int) -> None:
    """An id may be asked for twice."""
    case = Case("", sizes=(23, 17, vocab, 16, 24), seed=seed)
    hidden, positions, matrix, *_ = case.tensors()
    random = torch.Generator().manual_seed(seed)
    ids, weights = torch.randint(0, vocab, (17, k), generator=random), torch.randn(17, k, generator=random)
    exact = hidden.double().requires_grad_(), matrix.double().requires_grad_()
    of_all = log_softmax(exact[0][positions], exact[1], scale)
    of_wanted = torch.autograd.grad(of_head(weights, of_all.gather(1, ids), -(of_all.exp() * of_all).sum(-1)), exact)
    own = part_of(matrix, 0, vocab + 5)
    inputs = hidden.requires_grad_(), own.requires_grad_()
    where = positions, ids, Head(own, VocabularyShard(vocab, 0, None), scale)
    logprobs, entropies = vocabulary_logprobs(hidden, *where, entropy=True)
    found = torch.autograd.grad(of_head(weights, logprobs, entropies), inputs)
    top = top_logprobs(hidden.detach()[positions], ids[:, 0], where[2], k, entropy=True)
    known = logprobs.detach(), top.entropies, top.normalizer
    again = vocabulary_logprobs(hidden, *where, entropy=True, known=known)
    of_known = torch.autograd.grad(of_head(weights, *again), inputs)
    for one, other in zip(of_known, found, strict=True):
        assert (one - other).abs().max() < 1e-5 * other.abs().max().clamp(min=1)
    of_hidden, of_matrix = found
    assert not of_matrix[vocab:].any()
    for one, expected in zip((of_hidden, of_matrix[:vocab]), of_wanted, strict=True):
        assert (one - expected).abs().max() < 1e-5 * expected.abs().max().clamp(min=0.1)


def of_head(weights: torch.Tensor, logprobs: torch.Tensor, entropies: torch.Tensor) -> torch.Tensor:
    """A loss with gradients for both."""
    return (logprobs * weights).sum() + (entropies * weights[:, 0]).sum()


def test_logits_of_both_models_are_never_held() -> None:
    """All memory but the inputs, the gradient of the matrix among it, beside the naive form's. Chunks of 1/16."""
    tokens, vocab = 512, 32768
    hidden, others = torch.randn(2, tokens, 32).requires_grad_()
    matrix, its_matrix = torch.randn(2, vocab, 32).requires_grad_()
    positions, heads = torch.arange(tokens), (plain(matrix), plain(its_matrix))

    def chunked(divergence: Any) -> None:
        found = vocabulary_divergence(
            hidden, positions, positions, heads[0], others, heads[1], divergence=divergence, beta=0.5, entropy=True,
            chunk_columns=2048,
        )  # fmt: skip
        (found.divergence + found.logprobs).sum().backward()

    def naive() -> None:
        log_p, log_q = (hidden @ matrix.t()).log_softmax(-1), (others @ its_matrix.t()).detach().log_softmax(-1)
        divergence_of(log_p, log_q, "forward_kl", 0.5).sum().backward()

    whole = 4 * tokens * vocab
    peaks = {each: peak_bytes(lambda each=each: chunked(each), "cpu") / whole for each in DIVERGENCES}
    of_naive = peak_bytes(naive, "cpu") / whole
    print(f"of [tokens, vocabulary]: {peaks}, naive {of_naive:.2f}")
    assert max(peaks.values()) < 0.35
    assert of_naive > 4


FUSED = """
import json, torch
from torch._inductor import ir, metrics
from megagrpo.megatron import heads
from megagrpo.megatron.divergence_head import _gradient, _mixture_sums, _sums
torch._logging.set_logs(inductor_metrics=True)
ir.is_cpu = lambda _: False  # on CPUs alone a tanh that is used twice is written and read
rows, columns = 64, 4096
student, teacher = torch.randn(2, rows, columns)
tops, totals, mean, grad = torch.randn(2, rows) + 4, torch.rand(2, rows) + 2, *torch.randn(2, rows)
factors, moved, errors = ((0.7, 2.0), (1.0, None)), [], []
column = torch.randint(0, columns, (rows, 1))
of_mixture = torch.stack([torch.tanh(student * 0.35).amax(-1) * 2, teacher.amax(-1)]), 1 / totals, factors, 0.3
cases = [(_sums, (factors, 0, False)), (_sums, (factors, 1, True)), (_mixture_sums, of_mixture)]
for divergence in ("forward_kl", "jsd"):
    of_tokens = tops, totals, mean, mean, grad, None, grad, grad[:, None], column
    cases.append((_gradient, (*of_tokens, divergence, 0.3, factors, torch.bfloat16)))
for function, more in cases:
    metrics.reset()
    logits, copies = ((student.clone(), teacher.clone()) for _ in range(2))
    if function is _mixture_sums:
        _sums(*copies, factors, None, False)
    fused, plain = torch.compile(function, dynamic=True)(*logits, *more), function(*copies, *more)
    assert torch.equal(logits[0], student) and torch.equal(logits[1], teacher)
    moved.append(metrics.num_bytes_accessed / rows / columns)
    errors.append(((fused - plain).abs().max() / plain.abs().max()).item())
column, of_labels = torch.randint(0, columns, (rows, 3)), torch.randn(rows, 3)
more = None, tops[0], totals[0], grad, None, of_labels, column, 0.7, 2.0, torch.float32
fused, plain = (way(student.clone(), *more) for way in (torch.compile(heads._gradient, dynamic=True), heads._gradient))
errors.append((fused - plain).abs().max().item())
print(json.dumps([moved, errors]))
"""


@pytest.mark.long
def test_fused_the_logits_of_both_models_are_read_once_between_products() -> None:
    """Compiled for CPUs by the compiler that fuses for GPUs. Several labels of a token compile, too."""
    moved, errors = moved_and_errors(FUSED)
    # Two logits; two logits and a bfloat16 gradient.
    assert moved == pytest.approx([8, 8, 8, 10, 10], rel=0.05)
    assert max(errors) < 1e-2  # of bfloat16


tops = st.tuples(
    st.integers(0, 10**6),
    st.integers(1, 5),
    st.integers(1, 12),
    st.integers(1, 30),
    st.floats(0.1, 5),
)


@given(st.sampled_from(DIVERGENCES), st.floats(0.02, 0.98), tops)
def test_the_divergence_of_top_ids_counts_all_others_as_one(divergence: Any, beta: float, top: Any) -> None:
    seed, n, k, rest, sharp = top
    random = torch.Generator().manual_seed(seed)
    log_p, log_q = torch.log_softmax(torch.randn(2, n, k + rest, generator=random, dtype=torch.float64) * sharp, -1)
    log_p.requires_grad_()

    def joined(logprobs: Tensor) -> Tensor:
        return torch.cat([logprobs[:, :k], logprobs[:, k:].logsumexp(-1, keepdim=True)], -1)

    wanted = divergence_of(joined(log_p), joined(log_q), divergence, beta)
    found = divergence_of_top(log_p[:, :k], log_q[:, :k], divergence, beta)
    assert torch.allclose(found, wanted, rtol=1e-6, atol=1e-9)
    rounded = divergence_of_top(log_p[:, :k].float(), log_q[:, :k].float(), divergence, beta)
    assert torch.allclose(rounded.double(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_no_rest_and_a_sum_above_one_have_finite_divergences(divergence: Any) -> None:
    for total in (1.0, 1.0 + 3e-7, 1.0 - 1e-7):
        log_p = (torch.tensor([[0.5, 0.25, 0.25]]) * total).log().requires_grad_()
        log_q = torch.tensor([[0.25, 0.25, 0.4999]]).log()
        for teacher in (log_q, log_p.detach()):
            found = divergence_of_top(log_p, teacher, divergence, 0.5)
            (gradient,) = torch.autograd.grad(found.sum(), log_p)
            assert found.isfinite().all()
            assert gradient.isfinite().all()
            assert gradient.abs().max() < 1

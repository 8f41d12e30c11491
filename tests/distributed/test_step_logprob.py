"""Logprobs and entropies of hidden states and a split output matrix, against log_softmax in float64."""

from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megagrpo.megatron.heads import Head, HeadScale, VocabularyShard, vocabulary_logprobs
from tests.rank_group import run_ranks

TOKENS, HIDDEN = 23, 16


def shard_of(vocab):
    """Returns this rank's rows of an output matrix padded to equal shards, and their number."""
    rows = -(-vocab // dist.get_world_size())
    return VocabularyShard(vocab, rows * dist.get_rank(), dist.group.WORLD), rows


def random_case(vocab, dtype=torch.float32):
    """Hidden states and an output matrix, equal on all ranks; some tokens, their labels, weights of both outputs."""
    random = torch.Generator().manual_seed(vocab)
    hidden = torch.randn(TOKENS, HIDDEN, generator=random).to(dtype)
    weight = (torch.randn(vocab, HIDDEN, generator=random) * 3 / HIDDEN**0.5).to(dtype)
    positions = torch.randperm(TOKENS, generator=random)[:17].sort().values
    labels = torch.randint(0, vocab, (17,), generator=random)
    labels[0], labels[1] = 0, vocab - 1
    return hidden, weight, positions, labels, *torch.randn(2, 17, generator=random)


def shard_rows(weight, shard, rows):
    """The rank's rows, and padding that would win every softmax."""
    real = shard.real_rows(rows)
    padded = torch.full((rows, HIDDEN), 50.0, dtype=weight.dtype)
    padded[:real] = weight[shard.first : shard.first + real]
    return padded, real


def compare(vocab, temperature, chunk_columns, dtype, which, scale=1.0, cap=None):
    """Largest errors against float64: of the outputs; of the hidden states' and the matrix's gradients, relative."""
    hidden, weight, positions, labels, logprob_weight, entropy_weight = random_case(vocab, dtype)
    exact = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logits = (exact[0] @ exact[1].t())[positions] * scale
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    log_p = torch.log_softmax(logits / temperature, -1)
    expected = log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    loss = (expected[0] * logprob_weight).sum() * ("logprob" in which)
    loss = loss + (expected[1] * entropy_weight).sum() * ("entropy" in which)
    expected_gradients = torch.autograd.grad(loss, exact)

    shard, rows = shard_of(vocab)
    local, real = shard_rows(weight, shard, rows)
    hidden.requires_grad_()
    local.requires_grad_("frozen" not in which)
    logprobs, entropies = vocabulary_logprobs(
        hidden, positions, labels, Head(local, shard, HeadScale(scale, cap, temperature)),
        entropy="entropy" in which, chunk_columns=chunk_columns,
    )  # fmt: skip
    loss = (logprobs * logprob_weight).sum() if "logprob" in which else logprobs.new_zeros(())
    if "entropy" in which:
        loss = loss + (entropies * entropy_weight).sum()
    else:
        assert not entropies.any()
        assert not entropies.requires_grad
    loss.backward()
    errors = [(logprobs - expected[0]).abs().max()]
    if "entropy" in which:
        errors.append((entropies - expected[1]).abs().max())
    whole = hidden.grad.double()
    dist.all_reduce(whole)
    if "frozen" in which:
        assert local.grad is None
        matrix_error = 0.0
    else:
        assert not local.grad[real:].any()
        wanted = expected_gradients[1][shard.first : shard.first + real]
        matrix_error = relative(local.grad[:real], wanted, expected_gradients[1]) if real else 0.0
    return max(errors).item(), relative(whole, expected_gradients[0], expected_gradients[0]), matrix_error


def relative(got, wanted, whole):
    return ((got - wanted).abs().max() / whole.abs().max()).item()


def errors_of(ranks, cases):
    """The largest of all ranks in each case, as `compare` finds them."""
    by_rank = run_ranks(ranks, compare_all, cases)
    return [tuple(map(max, zip(*of_case, strict=True))) for of_case in zip(*by_rank, strict=True)]


def compare_all(cases):
    return [compare(*case) for case in cases]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_logprobs_entropies_and_gradients_match_float64(ranks):
    """With 4 ranks and 5 words, one rank holds only padding."""
    sizes = (131, 1.0, None), (131, 0.7, 9), (5, 1.3, 1)
    outputs = "logprob", "logprob and entropy", "entropy", "logprob, frozen"
    scales = (1.0, None), (0.4, None), (1.7, 4.0)
    cases = [(*size, torch.float32, which, *scale) for size, which, scale in product(sizes, outputs, scales)]
    for case, errors in zip(cases, errors_of(ranks, cases), strict=True):
        assert max(errors) < 3e-6, (case, errors)


def test_bfloat16_is_summed_in_float32():
    """Off by some roundings of the logits, and no more for many chunks: sums in bfloat16 would be 0.05 off."""
    ((outputs, *gradients),) = errors_of(1, [(1031, 0.9, 1, torch.bfloat16, "logprob and entropy")])
    assert outputs < 0.04
    assert max(gradients) < 0.02


def no_responses():
    """Gradients of a microbatch without a single response token."""
    hidden, weight, *_ = random_case(8)
    shard, rows = shard_of(8)
    local, _ = shard_rows(weight, shard, rows)
    nowhere = torch.empty(0, dtype=torch.int64)
    head = Head(local.requires_grad_(), shard, HeadScale())
    outputs = vocabulary_logprobs(hidden.requires_grad_(), nowhere, nowhere, head, entropy=True)
    sum(output.sum() for output in outputs).backward()
    return [tuple(output.shape) for output in outputs], hidden.grad.any().item(), local.grad.any().item()


def test_a_microbatch_without_responses_has_no_gradient():
    assert run_ranks(2, no_responses) == [([(0,), (0,)], False, False)] * 2


def largest_allocation(tokens, columns, chunk_columns):
    """Largest tensor, in elements, that forward and backward make besides the gradients."""

    class Sizes(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, (tuple, list)) else (result,):
                if torch.is_tensor(tensor) and tensor._base is None and tensor.shape != (columns, 2):
                    Sizes.largest = max(Sizes.largest, tensor.numel())
            return result

    hidden = torch.randn(tokens, 2, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(columns, 2, dtype=torch.bfloat16, requires_grad=True)
    with Sizes():
        logprobs, entropies = vocabulary_logprobs(
            hidden, torch.arange(tokens), torch.zeros(tokens, dtype=torch.long),
            Head(weight, VocabularyShard(columns, 0, None), HeadScale()), entropy=True, chunk_columns=chunk_columns,
        )  # fmt: skip
        (logprobs.sum() + entropies.sum()).backward()
    return Sizes.largest


def test_no_more_logits_exist_than_those_of_a_chunk():
    assert run_ranks(1, largest_allocation, 64, 1000, 10) == [64 * 10]

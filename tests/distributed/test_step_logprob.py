"""Logprobs and entropies of vocabulary-parallel logits against log_softmax in float64 and finite differences."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.rank_group import run_ranks

TOKENS = 23


def shard_of(vocab):
    """This rank's columns of a vocabulary padded to equal shards, and what lies in them."""
    from megagrpo.megatron.logprob import VocabularyShard

    columns = -(-vocab // dist.get_world_size())
    return VocabularyShard(vocab, columns * dist.get_rank(), dist.group.WORLD), columns


def random_case(vocab, dtype=torch.float32, spread=3.0):
    """Logits that are equal on all ranks, some rows of them, their labels, and weights of both outputs."""
    random = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(TOKENS, vocab, generator=random) * spread).to(dtype)
    positions = torch.randperm(TOKENS, generator=random)[:17].sort().values
    labels = torch.randint(0, vocab, (17,), generator=random)
    labels[0], labels[1] = 0, vocab - 1
    return logits, positions, labels, *torch.randn(2, 17, generator=random)


def compare(vocab, temperature, chunk_elements, dtype, which):
    """Largest errors of the outputs and of the gradient against float64, and whether the logits were left alone."""
    from megagrpo.megatron.logprob import vocabulary_logprobs

    logits, positions, labels, logprob_weight, entropy_weight = random_case(vocab, dtype)
    wide = logits.double().requires_grad_()
    log_p = torch.log_softmax(wide[positions] / temperature, -1)
    expected = log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    loss = (expected[0] * logprob_weight).sum() * ("logprob" in which)
    loss = loss + (expected[1] * entropy_weight).sum() * ("entropy" in which)
    (expected_gradient,) = torch.autograd.grad(loss, wide)

    shard, columns = shard_of(vocab)
    real = shard.real_columns(columns)
    local = torch.full((TOKENS, columns), 50.0, dtype=dtype)  # padding that would win every softmax
    local[:, :real] = logits[:, shard.first : shard.first + real]
    before = local.clone()
    local.requires_grad_()
    logprobs, entropies = vocabulary_logprobs(
        local, positions, labels, shard,
        temperature=temperature, entropy="entropy" in which, chunk_elements=chunk_elements,
    )  # fmt: skip
    loss = (logprobs * logprob_weight).sum() if "logprob" in which else logprobs.new_zeros(())
    if "entropy" in which:
        loss = loss + (entropies * entropy_weight).sum()
    loss.backward()
    errors = [(logprobs - expected[0]).abs().max().item()]
    if "entropy" in which:
        errors.append((entropies - expected[1]).abs().max().item())
    else:
        assert not entropies.any()
    gradient = torch.zeros(TOKENS, columns, dtype=torch.float64)
    gradient[:, :real] = expected_gradient[:, shard.first : shard.first + real]
    return max(errors), (local.grad - gradient).abs().max().item(), torch.equal(local.detach(), before)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("which", ["logprob", "logprob and entropy", "entropy"])
def test_logprobs_entropies_and_gradients_match_float64(ranks, which):
    for vocab, temperature, chunk in ((131, 1.0, 2**24), (131, 0.7, 200), (5, 1.3, 1)):
        for errors, gradient_error, untouched in run_ranks(
            ranks, f"{__name__}:compare", vocab, temperature, chunk, torch.float32, which
        ):
            assert (errors < 2e-6, gradient_error < 4e-6, untouched) == (True, True, True)


def test_a_rank_that_holds_only_padding_takes_part():
    for errors, gradient_error, untouched in run_ranks(
        4, f"{__name__}:compare", 5, 1.0, 8, torch.float32, "logprob and entropy"
    ):
        assert (errors < 2e-6, gradient_error < 4e-6, untouched) == (True, True, True)


def test_bfloat16_logits_are_computed_in_float32():
    for errors, gradient_error, untouched in run_ranks(
        2, f"{__name__}:compare", 131, 0.9, 500, torch.bfloat16, "logprob and entropy"
    ):
        assert (errors < 2e-6, gradient_error < 2**-8 * 4, untouched) == (True, True, True)


def finite_differences(vocab):
    """A directional derivative of the shared loss by central differences in the logits, and by autograd."""
    from megagrpo.megatron.logprob import vocabulary_logprobs

    logits, positions, labels, logprob_weight, entropy_weight = random_case(vocab, spread=1.0)
    shard, columns = shard_of(vocab)
    real = shard.real_columns(columns)
    padded = torch.nn.functional.pad(logits, (0, columns * dist.get_world_size() - vocab))
    direction = torch.randn(padded.shape, generator=torch.Generator().manual_seed(1))
    mine = slice(shard.first, shard.first + columns)

    def loss(values):
        outputs = vocabulary_logprobs(values[:, mine], positions, labels, shard, temperature=0.8, entropy=True)
        return (outputs[0].double() * logprob_weight + outputs[1].double() * entropy_weight).sum()

    step = 1e-2
    by_difference = (loss(padded + step * direction) - loss(padded - step * direction)).item() / (2 * step)
    padded.requires_grad_()
    loss(padded).backward()
    by_autograd = (padded.grad * direction).sum()
    assert not padded.grad[:, shard.first + real : shard.first + columns].any()
    dist.all_reduce(by_autograd)
    return by_difference, by_autograd.item()


def test_gradient_matches_finite_differences():
    for by_difference, by_autograd in run_ranks(2, f"{__name__}:finite_differences", 131):
        np.testing.assert_allclose(by_difference, by_autograd, rtol=1e-3)


def largest_allocation(tokens, columns):
    """Largest tensor, in elements of float32, that forward and backward allocate besides the gradient of the logits."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from megagrpo.megatron.logprob import VocabularyShard, vocabulary_logprobs

    class Sizes(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, (tuple, list)) else (result,):
                if torch.is_tensor(tensor) and tensor.dtype == torch.float32 and tensor._base is None:
                    Sizes.largest = max(Sizes.largest, tensor.numel())
            return result

    logits = torch.randn(tokens, columns, dtype=torch.bfloat16, requires_grad=True)
    with Sizes():
        logprobs, entropies = vocabulary_logprobs(
            logits, torch.arange(tokens), torch.zeros(tokens, dtype=torch.long),
            VocabularyShard(columns, 0, None), temperature=1.0, entropy=True, chunk_elements=4 * columns,
        )  # fmt: skip
        (logprobs.sum() + entropies.sum()).backward()
    return Sizes.largest


def test_no_float32_copy_of_the_logits_is_made():
    assert run_ranks(1, f"{__name__}:largest_allocation", 64, 1000) == [4 * 1000]

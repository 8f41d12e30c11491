"""Logprobs and entropies over kept sets, against a masked softmax in float64, in layouts of several ranks."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megagrpo.batching.rank_batches import Microbatch, TrainSequence
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.megatron import heads, kept_head
from megagrpo.megatron.batch import pack
from megagrpo.megatron.heads import Head, HeadScale, VocabularyShard
from megagrpo.megatron.kept_head import kept_logprobs, kept_tokens
from megagrpo.types import KeptSets
from tests.distributed import step_case
from tests.distributed.layouts import ROWS
from tests.distributed.step_case import load_reference
from tests.distributed.test_step_logprob import relative, shard_of, shard_rows
from tests.distributed.test_step_parity import recipe_of, run
from tests.rank_group import run_ranks


def long_one(value):
    return pytest.param(value, marks=pytest.mark.long)


HIDDEN, VOCAB = 16, 131


def random_sequences(seed, vocab=VOCAB, largest=VOCAB):
    """An agent's branch with given tokens between, a response, and one that was drawn from the whole vocabulary."""
    random = np.random.default_rng(seed)
    sequences = []
    for row, length in enumerate((17, 12, 9)):
        tokens = random.integers(0, vocab, length)
        mask = np.arange(length) > 3
        mask[7:9] &= row > 0
        sets = [
            np.union1d(random.choice(vocab, random.integers(1, largest + 1), replace=False), [token])
            for token in tokens[mask]
        ]
        kept = KeptSets.of(sets) if row < 2 else None
        sequences.append(TrainSequence(tokens, mask, np.zeros(length, np.float32), row, kept=kept))
    return sequences


def allowed(sequences, vocab=VOCAB):
    """bool [response tokens, vocab]"""
    rows = []
    for sequence in sequences:
        for at in range(int(sequence.loss_mask.sum())):
            row = np.full(vocab, sequence.kept is None)
            if sequence.kept is not None:
                ends = [0, *sequence.kept.ends]
                row[sequence.kept.ids[ends[at] : ends[at + 1]]] = True
            rows.append(row)
    return torch.from_numpy(np.stack(rows))


def compare(gathered, which, scale, cap, dtype=torch.float32):
    """Largest errors against float64: of logprobs and entropies; of gradients, relative."""
    sequences = random_sequences(3)
    mask = allowed(sequences)
    random = torch.Generator().manual_seed(5)
    count = len(mask)
    hidden = torch.randn(count + 4, HIDDEN, generator=random).to(dtype)
    weight = (torch.randn(VOCAB, HIDDEN, generator=random) / HIDDEN**0.5).to(dtype)
    positions = torch.randperm(count + 4, generator=random)[:count]
    labels = torch.from_numpy(np.concatenate([s.tokens[s.loss_mask] for s in sequences]))
    of_logprobs, of_entropies = torch.randn(2, count, generator=random)

    exact = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logits = (exact[0] @ exact[1].t())[positions] * scale
    logits = (logits if cap is None else cap * torch.tanh(logits / cap)) / 0.8
    log_p = torch.log_softmax(logits.masked_fill(~mask, -torch.inf), -1)
    expected = log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p.masked_fill(~mask, 0.0)).sum(-1)
    loss = (expected[0] * of_logprobs).sum() * ("logprob" in which) + (expected[1] * of_entropies).sum() * (
        "entropy" in which
    )
    wanted = torch.autograd.grad(loss, exact)

    kept = kept_tokens(sequences, np.arange(count), "cpu", gathered)
    assert (len(kept.narrow), len(kept.wide)) == {0: (0, 24), 60: (6, 18), VOCAB: (19, 5)}[gathered]
    shard, rows = shard_of(VOCAB)
    local, real = shard_rows(weight, shard, rows)
    hidden.requires_grad_()
    local.requires_grad_("frozen" not in which)
    logprobs, entropies = kept_logprobs(
        hidden, positions, labels, kept, Head(local, shard, HeadScale(scale, cap, 0.8)), entropy="entropy" in which
    )
    loss = (logprobs * of_logprobs).sum() * ("logprob" in which)
    loss = loss + (entropies * of_entropies).sum() if "entropy" in which else loss
    loss.backward()
    errors = [(logprobs - expected[0]).abs().max().item()]
    if "entropy" in which:
        errors.append((entropies - expected[1]).abs().max().item())
    whole = hidden.grad.double()
    dist.all_reduce(whole)
    gradients = [relative(whole, wanted[0], wanted[0])]
    if "frozen" not in which:
        assert not local.grad[real:].any()
        part = wanted[1][shard.first : shard.first + real]
        gradients.append(relative(local.grad[:real], part, wanted[1]))
    return max(errors), max(gradients)


def compare_all(cases):
    return [compare(*case) for case in cases]


@pytest.mark.parametrize("ranks", [long_one(1), 2, long_one(4)])
def test_kept_sets_give_the_masked_softmax_and_its_gradients(ranks):
    """All masked, all gathered but those drawn from the whole vocabulary, and some of each."""
    outputs, scales = ("logprob", "logprob and entropy", "entropy", "logprob, frozen"), ((1.0, None), (0.8, 4.0))
    cases = [(gathered, which, *scale) for gathered, which, scale in product((0, 60, VOCAB), outputs, scales)]
    for case, *of_ranks in zip(cases, *run_ranks(ranks, compare_all, cases), strict=True):
        assert np.max(of_ranks) < 1e-6, (case, of_ranks)


def test_bfloat16_rows_are_multiplied_in_float32():
    (((error, gradient),),) = run_ranks(1, compare_all, [(VOCAB, "logprob and entropy", 1.0, None, torch.bfloat16)])
    assert error < 1e-6
    assert gradient < 0.01


@pytest.mark.parametrize("context", [1, 2])
def test_every_context_rank_has_the_sets_of_its_own_tokens(context):
    sequences = random_sequences(4)
    kept_by_token = {}
    mask = iter(allowed(sequences).numpy())
    for sequence in sequences:
        for position in np.flatnonzero(sequence.loss_mask):
            kept_by_token[sequence.row, int(position)] = set(np.flatnonzero(next(mask)).tolist())
    found = {}
    for rank in range(context):
        packed = pack(
            Microbatch(tuple(sequences)), layout=ParallelLayout(context=context), context_rank=rank, device="cpu"
        )
        (response,) = packed.responses
        sets = sets_of(response.kept)
        for row, position, ids in zip(response.rows.tolist(), response.numbers.tolist(), sets, strict=True):
            found[row, position] = ids
    assert found == kept_by_token


def sets_of(kept):
    """The ids of each token, as the head reads them."""
    narrow = [set(kept.ids[kept.of == at].tolist()) for at in range(len(kept.narrow))]
    wide = []
    for bits in kept.bits.numpy():
        ids = np.flatnonzero(np.unpackbits(bits[:-1], bitorder="little"))
        wide.append(set(range(VOCAB)) if bits[-1] else set(ids.tolist()))
    both = [*narrow, *wide]
    return [both[place] for place in kept.order.tolist()]


def test_a_microbatch_without_sets_has_none():
    plain = [replace(sequence, kept=None) for sequence in random_sequences(1)]
    assert kept_tokens(plain, np.arange(5), "cpu") is None
    assert kept_tokens([], np.arange(0), "cpu") is None


def test_no_tensor_is_near_a_quarter_of_the_logits(monkeypatch):
    """Forward and backward, of narrow and of wide sets."""
    tokens, vocab, hidden = 256, 16384, 32
    random = np.random.default_rng(0)

    class Sizes(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, (tuple, list)) else (result,):
                if torch.is_tensor(tensor) and tensor._base is None and tensor.shape != (vocab, hidden):
                    Sizes.largest = max(Sizes.largest, tensor.numel() * tensor.element_size())
            return result

    for module in (heads, kept_head):
        monkeypatch.setattr(module, "CHUNK_ELEMENTS", 2**18)
    for size in (100, 5000):
        sets = [np.append(random.choice(vocab - 1, size, replace=False) + 1, 0) for _ in range(tokens)]
        sequence = TrainSequence(
            np.zeros(tokens, np.int64), np.ones(tokens, bool), np.zeros(tokens, np.float32), 0, kept=KeptSets.of(sets)
        )
        kept = kept_tokens([sequence], np.arange(tokens), "cpu")
        states, weight = torch.randn(tokens, hidden, requires_grad=True), torch.randn(vocab, hidden, requires_grad=True)
        labels, shard = torch.zeros(tokens, dtype=torch.long), VocabularyShard(vocab, 0, None)
        with Sizes():
            logprobs, _ = kept_logprobs(
                states, torch.arange(tokens), labels, kept, Head(weight, shard, HeadScale()), entropy=True
            )
            logprobs.sum().backward()
        assert Sizes.largest < 0.25 * 4 * tokens * vocab


def with_sets(case):
    """The case with kept sets of 1 to 20 ids for all sequences but one, and old logprobs over them."""
    random, model, sequences = np.random.default_rng(2), load_reference(case.directory), []
    for sequence in case.sequences[1:]:
        tokens = sequence.tokens[sequence.loss_mask]
        sets = [
            np.union1d(random.choice(step_case.VOCAB, random.integers(0, 20), replace=False), [token])
            for token in tokens
        ]
        narrowed = replace(sequence, kept=KeptSets.of(sets))
        with torch.no_grad():
            logprobs = step_case.response_logprobs(model, sequence.tokens, step_case.kept_ids(narrowed))[0].numpy()
        noise = random.normal(0, 0.25, len(sequence.tokens))
        old = np.where(sequence.loss_mask, np.append(0, logprobs) + noise, 0).astype(np.float32)
        sequences.append(replace(narrowed, rollout_logprobs=old))
    return replace(case, sequences=[case.sequences[0], *sequences])


@pytest.mark.parametrize("name", [long_one("one rank"), "tensor", long_one("context, data"), long_one("all")])
def test_a_step_over_kept_sets_is_that_of_plain_torch_in_any_layout(name, case_of):
    family = ROWS[name].family
    case, recipe = with_sets(case_of(family)), recipe_of(family, ROWS[name].layout)
    wanted = step_case.grpo_step(case, recipe, load_reference(case.directory))
    step_case.assert_same_step(run(recipe, case), wanted)

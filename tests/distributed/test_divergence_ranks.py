"""Divergences, most likely ids and logprobs at given ids over tensor ranks."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megagrpo.megatron.divergence_head import top_logprobs
from megagrpo.megatron.heads import Head, HeadScale, VocabularyShard, vocabulary_logprobs
from tests.rank_group import run_ranks
from tests.unit.test_divergence_head import DIVERGENCES, PLAIN, Case, errors, log_softmax, part_of

RANKS = [2, pytest.param(4, marks=pytest.mark.long)]
CAPPED = HeadScale(scale=1.7, cap=4.0, temperature=0.7)


def errors_of_all(cases: list[Case]) -> list[tuple[float, ...]]:
    return [errors(case) for case in cases]


@pytest.mark.parametrize("ranks", RANKS)
def test_ranks_have_the_values_and_gradients_of_full_logits(ranks: int) -> None:
    """With 5 ids, a rank of four holds only padding. The same ids agree, too."""
    sizes = (23, 17, 131, 16, 24), (9, 4, 5, 3, 2)
    scales = PLAIN, CAPPED
    cases = [Case(*which, sizes=size) for *which, size in product(DIVERGENCES, (0.3,), scales, scales, sizes)]
    cases.append(replace(cases[0], chunk_columns=None))
    for of_rank in run_ranks(ranks, errors_of_all, cases):
        for case, (of_values, *of_gradients) in zip(cases, of_rank, strict=True):
            assert of_values < 1e-6, case
            assert max(of_gradients) < 1e-5, case


def tops_and_picks(vocab: int, k: int, scale: HeadScale) -> Any:
    """The answers of this rank, and gradients of the hidden states over all ranks. Many logits are equal."""
    random = torch.Generator().manual_seed(vocab)
    hidden, matrix = (torch.randint(-2, 3, (size, 3), generator=random).float() for size in (8, vocab))
    ids, weights = torch.randint(0, vocab, (8, k), generator=random), torch.randn(8, k, generator=random)
    rows = -(-vocab // dist.get_world_size())
    shard = VocabularyShard(vocab, rows * dist.get_rank(), dist.group.WORLD)
    head = Head(part_of(matrix, shard.first, rows), shard, scale)
    top = top_logprobs(hidden, ids[:, 0], head, k, entropy=True, chunk_columns=7)
    picked, _ = vocabulary_logprobs(hidden.requires_grad_(), torch.arange(8), ids, head, entropy=False)
    (gradient,) = torch.autograd.grad((picked * weights).sum(), hidden)
    dist.all_reduce(gradient)
    return top.ids, top.logprobs, top.of_labels, top.entropies, picked.detach(), gradient


def wanted_of(vocab: int, k: int, scale: HeadScale) -> tuple[Tensor, ...]:
    random = torch.Generator().manual_seed(vocab)
    hidden, matrix = (torch.randint(-2, 3, (size, 3), generator=random).float() for size in (8, vocab))
    ids, weights = torch.randint(0, vocab, (8, k), generator=random), torch.randn(8, k, generator=random)
    logprobs = log_softmax(hidden.requires_grad_(), matrix, scale)
    order = (hidden @ matrix.t()).argsort(dim=-1, descending=True, stable=True)[:, :k]
    (gradient,) = torch.autograd.grad((logprobs.gather(1, ids) * weights).sum(), hidden)
    found = logprobs.gather(1, order), logprobs.gather(1, ids[:, :1])[:, 0], -(logprobs.exp() * logprobs).sum(-1)
    return order, *found, logprobs.gather(1, ids), gradient


@pytest.mark.parametrize("ranks", RANKS)
def test_ranks_agree_on_the_most_likely_ids_and_on_logprobs_at_given_ids(ranks: int) -> None:
    """A rank holds fewer than 10 of the 10 most likely of 13 ids."""
    for vocab, k, scale in ((131, 20, PLAIN), (13, 10, CAPPED)):
        order, *wanted = wanted_of(vocab, k, scale)
        for ids, *found in run_ranks(ranks, tops_and_picks, vocab, k, scale):
            assert torch.equal(ids, order)
            for one, expected in zip(found, wanted, strict=True):
                assert (one - expected).abs().max() < 1e-6 * expected.abs().max()

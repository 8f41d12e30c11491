"""The tokens of high covariance against a sort of all of them, wherever they lie; and the draws between them."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megagrpo.algorithm.over_ranks import kth_smallest, token_draws
from megagrpo.algorithm.policy_losses import CovarianceLoss
from tests.methods import loss
from tests.rank_threads import on_threads

TOKENS = st.lists(
    # Few values, so that many covariances are equal.
    st.tuples(st.sampled_from([-3.0, -1.5, -0.1]), st.sampled_from([-1.0, 0.0, 2.0]), st.booleans()),
    min_size=1,
    max_size=120,
)


def settings_of(name: str, share: float, low: float = 0.2, high: float = 1.5) -> CovarianceLoss:
    bounds = {"covariance_low": low, "covariance_high": high} if name == "clip_cov" else {}
    return loss(name=name, covariance_share=share, **bounds)


def columns(rows: list[tuple[float, float, bool]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    logprobs, advantages = (torch.tensor([row[i] for row in rows]) for i in (0, 1))
    draws = torch.rand(len(rows), generator=torch.Generator().manual_seed(len(rows)), dtype=torch.float64)
    return logprobs, advantages, torch.tensor([row[2] for row in rows]), draws


def written_out(rows: list[tuple[float, float, bool]], s: CovarianceLoss) -> set[int]:
    """By sorting; draws decide between equal covariances."""
    logprobs, advantages, kept, draws = (column.double().numpy() for column in columns(rows))
    there = [t for t in range(len(rows)) if kept[t]]
    if not there:
        return set()
    covariance = (logprobs - logprobs[there].mean()) * (advantages - advantages[there].mean())
    wanted = max(1, int(s.covariance_share * len(there)))
    if s.name == "clip_cov":
        there = [t for t in there if s.covariance_low <= covariance[t] <= s.covariance_high]
        return set(sorted(there, key=lambda t: draws[t])[:wanted])
    return set(sorted(there, key=lambda t: (-round(covariance[t], 6), draws[t]))[:wanted])


@settings(max_examples=80)
@given(TOKENS, st.sampled_from(["clip_cov", "kl_cov"]), st.sampled_from([0.001, 0.1, 0.5, 1.0]), st.integers(1, 3))
def test_the_chosen_tokens_are_those_of_a_sort_wherever_they_are(rows, name, share, ranks):
    s = settings_of(name, share)
    parts = [[column[rank::ranks] for column in columns(rows)] for rank in range(ranks)]
    found = on_threads(ranks, lambda rank, sum_over_ranks: s.choose(*parts[rank], sum_over_ranks))
    chosen = {rank + ranks * t for rank in range(ranks) for t in found[rank].nonzero()[:, 0].tolist()}
    assert chosen == written_out(rows, s)


def test_both_zeros_are_one_covariance():
    logprobs, advantages = torch.tensor([-2.0, -1.0, -1.0, 0.0]), torch.tensor([0.0, 1.0, -1.0, 0.0])
    for first in range(4):  # the covariances are -0, 0, -0 and 0
        draws = torch.full((4,), 0.5, dtype=torch.float64)
        draws[first] = 0.1
        kept = torch.ones(4, dtype=torch.bool)
        chosen = settings_of("kl_cov", 0.25).choose(logprobs, advantages, kept, draws, lambda _: None)
        assert chosen.nonzero().tolist() == [[first]]


@settings(max_examples=60)
@given(st.lists(st.integers(0, 2**53 - 1) | st.integers(0, 3), min_size=1, max_size=60), st.data())
def test_the_kth_smallest_and_its_ties_are_those_of_a_sort(values, data):
    wanted = data.draw(st.integers(1, len(values)))
    found, ties = kth_smallest(torch.tensor(values), wanted, 53, lambda _: None)
    ordered = sorted(values)
    assert found == ordered[wanted - 1]
    assert ties == sum(value == found for value in ordered[:wanted])
    assert np.sum(np.array(values) < found) + ties == wanted


WORD = 2**64 - 1
GAMMA = 0x9E3779B97F4A7C15


def splitmix64(state: int) -> int:
    """One output of the published generator, in Python's integers."""
    state = (state + GAMMA) & WORD
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & WORD
    return state ^ (state >> 31)


def test_the_generator_is_splitmix64():
    assert splitmix64(0) == 0xE220A8397B1DCDAF  # its published first output for seed 0


@given(st.integers(0, 2**40), st.integers(0, 2**30), st.integers(0, 2**30))
def test_draws_are_splitmix64_of_seed_row_and_place(seed, row, place):
    wanted = splitmix64((splitmix64((splitmix64(seed) + row) & WORD) + place) & WORD) >> 11
    assert token_draws(seed, torch.tensor([row]), torch.tensor([place])).item() == wanted * 2.0**-53

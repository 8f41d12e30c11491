"""Draws of a sample: seeds, uniform numbers, the sets that top-k and top-p leave, and SGLang's hash for CPUs."""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megagrpo.rollout.decoding import Record, draw, truncate, uniforms
from megagrpo.rollout.requests import sample_seed
from megagrpo.rollout.sglang.launch import murmur_hash32
from megagrpo.types import SamplingParams
from tests.rollout_engines import request
from tests.unit.test_algorithm_over_ranks import GAMMA, splitmix64

DRAWS = 40_000
CHI_SQUARE_999_7_DEGREES = 24.32  # a right sampler exceeds it once in a thousand; the seeds are fixed


def numbers(seeds: int, positions: int) -> torch.Tensor:
    """[seeds, positions] uniform numbers."""
    grid = torch.meshgrid(torch.arange(seeds), torch.arange(positions), indexing="ij")
    return uniforms(grid[0], grid[1])


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**40))
def test_uniform_numbers_are_splitmix64_of_the_mixed_seed_jumped_to_the_position(seed: int, position: int) -> None:
    start = splitmix64(seed - GAMMA)
    expected = (splitmix64(start + position * GAMMA) >> 12) / 2**52
    assert uniforms(torch.tensor([seed]), torch.tensor([position])).item() == expected


def test_sample_seeds_are_stable_and_differ_in_every_part() -> None:
    assert sample_seed(1, 2, "gsm8k:3", 4) == 6638698133960075135
    parts = list(product((0, 1), (0, 1, 10), ("a", "b", "0/a"), (0, 1)))
    seeds = [sample_seed(*part) for part in parts]
    assert len(set(seeds)) == len(parts)
    assert all(0 <= seed < 2**63 for seed in seeds)


def chi_square(tokens: torch.Tensor, probabilities: torch.Tensor) -> float:
    counts = torch.bincount(tokens, minlength=len(probabilities)).double()
    assert counts[probabilities == 0].sum() == 0
    expected = probabilities[probabilities > 0] * len(tokens)
    return float(((counts[probabilities > 0] - expected) ** 2 / expected).sum())


def test_drawn_tokens_follow_the_temperature_scaled_distribution() -> None:
    logits = torch.tensor([0.3, -1.0, 2.0, 0.0, 1.0, -2.0, 0.5, -0.3])
    probabilities = (logits.double() / 0.7).softmax(-1)
    tokens, logprobs, _ = draw(
        logits.expand(DRAWS, -1), numbers(DRAWS, 1)[:, 0], SamplingParams(max_tokens=1, temperature=0.7)
    )
    assert chi_square(tokens, probabilities) < CHI_SQUARE_999_7_DEGREES
    torch.testing.assert_close(logprobs.double(), probabilities.log()[tokens], atol=1e-6, rtol=0)


@pytest.mark.parametrize("kept_sets", [False, True])
@pytest.mark.parametrize(
    ("sampling", "nucleus"),
    [
        # The six likeliest hold 0.94; four of them hold 0.80 > 0.8 x 0.94, three only 0.70.
        (SamplingParams(1, top_k=6, top_p=0.8), [1, 2, 4, 5]),
        (SamplingParams(1, min_p=0.25), [1, 2, 3, 4, 5]),
        (SamplingParams(1, min_p=0.5, top_k=3), [1, 4, 5]),
    ],
    ids=["top-k and top-p", "min-p", "min-p and top-k"],
)
def test_draws_are_renormalised_over_their_set_as_are_logprobs_where_it_is_wanted(
    sampling: SamplingParams, nucleus: list[int], kept_sets: bool
) -> None:
    probabilities = torch.tensor([0.02, 0.30, 0.10, 0.08, 0.25, 0.15, 0.04, 0.06], dtype=torch.float64)
    among = torch.zeros(8, dtype=torch.float64)
    among[nucleus] = probabilities[nucleus] / probabilities[nucleus].sum()
    wanted = replace(sampling, kept_sets=kept_sets)
    tokens, logprobs, kept = draw(probabilities.log().expand(DRAWS, -1), numbers(DRAWS, 1)[:, 0], wanted)
    assert chi_square(tokens, among) < CHI_SQUARE_999_7_DEGREES
    assert (kept is not None) == kept_sets
    assert kept is None or torch.equal(kept, (among > 0).expand(DRAWS, -1))
    expected = among if kept_sets else probabilities
    torch.testing.assert_close(logprobs.double(), expected.log()[tokens], atol=1e-6, rtol=0)


def nucleus_by_hand(row: list[float], top_k: int, top_p: float) -> set[int]:
    ranked = sorted(range(len(row)), key=lambda token: -row[token])[: top_k or None]
    total, mass, kept = sum(row[token] for token in ranked), 0.0, set()
    for token in ranked:
        if mass >= top_p * total:
            break
        kept.add(token)
        mass += row[token]
    return kept


@given(
    st.lists(st.lists(st.integers(1, 1000), min_size=6, max_size=6, unique=True), min_size=1, max_size=4),
    st.integers(0, 8),
    st.sampled_from([0.05, 0.333, 0.71, 0.97, 1.0]),
)
def test_truncation_keeps_the_smallest_likeliest_set(rows: list[list[int]], top_k: int, top_p: float) -> None:
    probabilities = torch.tensor(rows, dtype=torch.float32)
    kept = truncate(probabilities, top_k, top_p)
    for row, after in zip(probabilities, kept, strict=True):
        expected = nucleus_by_hand(row.double().tolist(), top_k, top_p)
        assert set(after.nonzero().flatten().tolist()) == expected
        assert torch.equal(after[list(expected)], row[list(expected)])


def test_extreme_uniform_numbers_never_draw_an_impossible_token() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, 1.0, -torch.inf]]).expand(2, -1)
    tokens, *_ = draw(logits, torch.tensor([0.0, 1 - 2.0**-52], dtype=torch.float64), SamplingParams(max_tokens=1))
    assert tokens.tolist() == [1, 2]


def test_greedy_takes_the_likeliest_with_its_logprob_at_temperature_one() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    tokens, logprobs, _ = draw(
        logits, torch.tensor([0.999], dtype=torch.float64), SamplingParams(max_tokens=1, temperature=0.0)
    )
    assert tokens.tolist() == [1]
    torch.testing.assert_close(logprobs, logits.log_softmax(-1)[:, 1])


WORD = (1 << 32) - 1


def murmur3(data: bytes) -> int:
    """MurmurHash3_x86_32 with seed 0, of whole words (Appleby, smhasher/src/MurmurHash3.cpp)."""

    def rotate(x: int, by: int) -> int:
        return (x << by | x >> (32 - by)) & WORD

    state = 0
    for start in range(0, len(data), 4):
        word = int.from_bytes(data[start : start + 4], "little")
        word = rotate(word * 0xCC9E2D51 & WORD, 15) * 0x1B873593 & WORD
        state = (rotate(state ^ word, 13) * 5 + 0xE6546B64) & WORD
    state ^= len(data)
    state = (state ^ state >> 16) * 0x85EBCA6B & WORD
    state = (state ^ state >> 13) * 0xC2B2AE35 & WORD
    return state ^ state >> 16


def test_the_reference_gives_published_values() -> None:
    assert murmur3(b"test") == 0xBA6BD213
    assert murmur3(b"") == 0


@given(
    seeds=st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=3),
    position=st.integers(0, 2**31 - 1),
    columns=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=3),
)
def test_the_hash_is_murmur3_of_seed_position_and_column(seeds: list[int], position: int, columns: list[int]) -> None:
    hashed = murmur_hash32(
        torch.tensor(seeds, dtype=torch.int64).view(torch.uint64),
        torch.full((len(seeds),), position),
        torch.tensor(columns),
    )
    expected = [
        [murmur3(b"".join(part.to_bytes(size, "little") for part, size in ((seed, 8), (position, 4), (column, 4))))
         for column in columns]
        for seed in seeds
    ]  # fmt: skip
    assert hashed.tolist() == expected


def test_a_thread_that_reads_between_the_writes_of_a_step_sees_no_stop_token_of_a_response_that_goes_on() -> None:
    asked = request((1,), SamplingParams(max_tokens=4))
    record, seen = Record([asked, asked]), []

    class Watched(np.ndarray[Any, Any]):
        def __setitem__(self, rows: Any, values: Any) -> None:
            super().__setitem__(rows, values)
            seen.extend(record.samples())

    for name in ("tokens", "logprobs", "versions", "lengths", "stopped"):
        setattr(record, name, getattr(record, name).view(Watched))
    record.add(0, np.array([5, 7]), np.zeros(2), 0, np.array([7]))
    assert any(7 in row.tokens for row in seen)
    assert all(row.finish == "stop" for row in seen if 7 in row.tokens)

import torch
from hypothesis import given
from hypothesis import strategies as st

from megagrpo.algorithm.selection import token_draws

WORD = 2**64 - 1


def splitmix64(state: int) -> int:
    """One output of the published generator, in Python's integers."""
    state = (state + 0x9E3779B97F4A7C15) & WORD
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & WORD
    return state ^ (state >> 31)


def test_the_generator_is_splitmix64():
    assert splitmix64(0) == 0xE220A8397B1DCDAF  # its published first output for seed 0


@given(st.integers(0, 2**40), st.integers(0, 2**30), st.integers(0, 2**30))
def test_draws_are_splitmix64_of_seed_row_and_place(seed, row, place):
    wanted = splitmix64((splitmix64((splitmix64(seed) + row) & WORD) + place) & WORD) >> 11
    assert token_draws(seed, torch.tensor([row]), torch.tensor([place])).item() == wanted * 2.0**-53


def test_draws_are_uniform_and_differ_between_neighbours():
    rows, places = torch.arange(200).repeat_interleave(500), torch.arange(500).repeat(200)
    draws = token_draws(7, rows, places)
    assert len(draws.unique()) == 100_000
    counts = torch.histc(draws.float(), bins=20, min=0, max=1)
    assert (counts - 5000).abs().max() < 5 * 5000**0.5
    assert not torch.equal(draws, token_draws(8, rows, places))

"""Sums and choices over tokens that lie on several ranks: exactly, and without gathering them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megagrpo.splitmix64 import GAMMA, mixed, shifted

DIGIT_BITS = 11
FLOAT32_BITS = 32
DRAW_BITS = 53
"""Bits of a draw: as many as a float64 holds."""


@dataclass(frozen=True)
class Sequences:
    """The response of each token of a microbatch. Every token belongs to one.

    Under context parallelism a response's tokens lie on several ranks, as do the branches of an agent's rollout where
    they count as one: `over_ranks` then sums over those. All of these ranks call everything here in the same order. No
    sum has a gradient. All are made in float64: GPUs add in any order, and rounded to float32 the result must not
    depend on it.
    """

    index: Tensor  # int64 [tokens], from 0 to count - 1
    tokens: Tensor  # float32 [count], response tokens of each sequence on all ranks together
    over_ranks: Callable[[Tensor], Tensor] = lambda sums: sums  # float64 [count] -> [count]

    def sum(self, values: Tensor) -> Tensor:
        """Sums [tokens] of any type by sequence: float64 [count]."""
        zeros = torch.zeros(len(self.tokens), dtype=torch.float64, device=values.device)
        return self.over_ranks(zeros.index_add(0, self.index, values.detach().double()))

    def mean(self, values: Tensor) -> Tensor:
        """Averages [tokens] of any type by sequence: float64 [count]; 0 for a sequence without response tokens."""
        return self.sum(values) / self.tokens.clamp(min=1)

    def of_tokens(self, per_sequence: Tensor) -> Tensor:
        """Gives each token its sequence's number: [count] -> [tokens]."""
        return per_sequence[self.index]

    def shares(self) -> Tensor:
        """Returns each token's share of its sequence, float64 [tokens]; all ranks' sum is the number of sequences."""
        return 1 / self.of_tokens(self.tokens.double())


def largest_of_ranks(values: Tensor, draws: Tensor, wanted: int, sum_over_ranks: Callable[[Tensor], None]) -> Tensor:
    """Selects the `wanted` largest of all ranks' values, of equal ones those with the smallest draws; bool [values]."""
    # int64 in [0, 2**32) that fall where the float32 values rise.
    bits = (values + 0.0).view(torch.int32).long()  # -0.0 + 0.0 is 0.0: both zeros are one value
    descending = (1 << (FLOAT32_BITS - 1)) - 1 - torch.where(bits < 0, -1 - (bits & 0x7FFFFFFF), bits)
    last, ties = kth_smallest(descending, wanted, FLOAT32_BITS, sum_over_ranks)
    tied = descending == last
    draw_bits = (draws * 2.0**DRAW_BITS).long()
    last_draw, _ = kth_smallest(draw_bits[tied], ties, DRAW_BITS, sum_over_ranks)
    return (descending < last) | (tied & (draw_bits <= last_draw))


def token_draws(seed: int, rows: Tensor, places: Tensor) -> Tensor:
    """Draws uniform numbers in [0, 1), float64 [tokens], by seed, row of the sample and place of the token in it.

    rows, places: int64 [tokens]; rows are those of the step. SplitMix64 of each number in turn, modulo 2**64.
    """
    state = mixed(torch.full_like(rows, seed) + GAMMA)
    for number in (rows, places):
        state = mixed(state + number + GAMMA)
    return shifted(state, 64 - DRAW_BITS).double() * 2.0**-DRAW_BITS


def kth_smallest(bits: Tensor, wanted: int, width: int, sum_over_ranks: Callable[[Tensor], None]) -> tuple[int, int]:
    """Returns the `wanted`-th smallest of all ranks' bits, and the number of its equals among the first `wanted`.

    bits: int32 or int64 [any number], at least 0 and below 2**width; wanted: from 1 to the number on all ranks;
    sum_over_ranks sums an int64 tensor in place. A radix selection: a histogram of 16 KiB is summed for each 11 bits.
    """
    smallest = 0
    for shift in range(-(-width // DIGIT_BITS) * DIGIT_BITS - DIGIT_BITS, -1, -DIGIT_BITS):
        digit = (bits >> shift) & ((1 << DIGIT_BITS) - 1)
        counts = torch.bincount(digit, minlength=1 << DIGIT_BITS)
        sum_over_ranks(counts)
        up_to = counts.cumsum(0)
        chosen = int((up_to < wanted).sum())
        wanted -= int(up_to[chosen] - counts[chosen])
        bits = bits[digit == chosen]
        smallest = smallest << DIGIT_BITS | chosen
    return smallest, wanted

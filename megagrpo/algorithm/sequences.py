"""Sums over whole responses of numbers by token, on one rank or on several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


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

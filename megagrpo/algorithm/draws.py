"""Randomness that belongs to a token: the same draw wherever and with whatever else it is computed."""

from __future__ import annotations

import torch
from torch import Tensor

GOLDEN, MIX_1, MIX_2 = (
    value - 2**64 for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)  # as signed integers
DRAW_BITS = 53
"""Of a draw: as many as a float64 holds."""


def token_draws(seed: int, rows: Tensor, places: Tensor) -> Tensor:
    """Uniform in [0, 1), float64 [tokens], by seed, row of the sample in the step and place of the token in it.

    rows, places: int64 [tokens]. SplitMix64 (doi:10.1145/2714064.2660195) of each number in turn, modulo 2**64.
    """
    state = _mixed(torch.full_like(rows, seed))
    for number in (rows, places):
        state = _mixed(state + number)
    return _shifted(state, 64 - DRAW_BITS).double() * 2.0**-DRAW_BITS


def _mixed(state: Tensor) -> Tensor:
    state = state + GOLDEN
    state = (state ^ _shifted(state, 30)) * MIX_1
    state = (state ^ _shifted(state, 27)) * MIX_2
    return state ^ _shifted(state, 31)


def _shifted(bits: Tensor, by: int) -> Tensor:
    """To the right, with zeros coming in: torch's own shift repeats the sign."""
    return (bits >> by) & ((1 << (64 - by)) - 1)

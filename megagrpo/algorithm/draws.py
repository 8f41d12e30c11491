"""Randomness that belongs to a token: the same draw wherever and with whatever else it is computed."""

from __future__ import annotations

import torch
from torch import Tensor

from megagrpo.splitmix64 import GAMMA, mixed, shifted

DRAW_BITS = 53
"""Of a draw: as many as a float64 holds."""


def token_draws(seed: int, rows: Tensor, places: Tensor) -> Tensor:
    """Uniform in [0, 1), float64 [tokens], by seed, row of the sample in the step and place of the token in it.

    rows, places: int64 [tokens]. SplitMix64 of each number in turn, modulo 2**64.
    """
    state = mixed(torch.full_like(rows, seed) + GAMMA)
    for number in (rows, places):
        state = mixed(state + number + GAMMA)
    return shifted(state, 64 - DRAW_BITS).double() * 2.0**-DRAW_BITS

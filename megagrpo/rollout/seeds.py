"""Randomness that belongs to a sample: the same seed draws the same tokens in any batch, order, engine or restart."""

from __future__ import annotations

import hashlib

import torch

from megagrpo.splitmix64 import GAMMA, mixed, shifted

SEED_BITS = 63  # a seed fits a signed 64-bit integer, which torch and most engines want


def sample_seed(recipe_seed: int, step: int, prompt_id: str, index: int) -> int:
    """Seed of sample `index` of a prompt in a step, in [0, 2**63): BLAKE2b of the four, alike on every machine."""
    digest = hashlib.blake2b(f"{recipe_seed}/{step}/{index}/{prompt_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - SEED_BITS)


def uniforms(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One uniform number in [0, 1) for each (seed, position), without any state.

    `seeds` and `positions` are int64 of one shape, as is the float64 result. It is SplitMix64, started at the mixed
    seed and jumped to the position. 52 of its bits are kept: `u * total < total` then holds in float64 for any
    total, so that some token is always drawn.
    """
    state = mixed(seeds) + (positions + 1) * GAMMA
    return shifted(mixed(state), 12).to(torch.float64) * 2.0**-52

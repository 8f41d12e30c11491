"""Randomness that belongs to a sample: the same seed draws the same tokens in any batch, order, engine or restart."""

from __future__ import annotations

import hashlib

import torch

SEED_BITS = 63  # a seed fits a signed 64-bit integer, which torch and most engines want


def sample_seed(recipe_seed: int, step: int, prompt_id: str, index: int) -> int:
    """Seed of sample `index` of a prompt in a step, in [0, 2**63): BLAKE2b of the four, alike on every machine."""
    digest = hashlib.blake2b(f"{recipe_seed}/{step}/{index}/{prompt_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - SEED_BITS)


def uniforms(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One uniform number in [0, 1) for each (seed, position), without any state.

    `seeds` and `positions` are int64 of one shape, as is the float64 result. It is SplitMix64 (Steele, Lea and Flood,
    "Fast splittable pseudorandom number generators", 2014) started at the mixed seed and jumped to the position. Of its
    bits, 52 are kept: `u * total < total` then holds in float64 for any total, so that some token is always drawn.
    """
    state = _mix(seeds) + (positions + 1) * _signed(0x9E3779B97F4A7C15)
    return _shift_right(_mix(state), 12).to(torch.float64) * 2.0**-52


def _mix(bits: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser on int64, which wraps as uint64 does."""
    bits = (bits ^ _shift_right(bits, 30)) * _signed(0xBF58476D1CE4E5B9)
    bits = (bits ^ _shift_right(bits, 27)) * _signed(0x94D049BB133111EB)
    return bits ^ _shift_right(bits, 31)


def _shift_right(bits: torch.Tensor, count: int) -> torch.Tensor:
    """Logical shift: torch's own repeats the sign."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _signed(constant: int) -> int:
    return constant - (1 << 64) if constant >> 63 else constant

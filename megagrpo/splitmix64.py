"""SplitMix64 on int64 tensors, which wrap as its unsigned integers do.

Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014 (doi:10.1145/2714064.2660195).
"""

from __future__ import annotations

import torch


def signed(constant: int) -> int:
    """Converts an unsigned 64-bit constant to the int64 with the same bits."""
    return constant - (1 << 64) if constant >> 63 else constant


GAMMA = signed(0x9E3779B97F4A7C15)
"""The generator's increment of its state before each number."""

MIX_1, MIX_2 = signed(0xBF58476D1CE4E5B9), signed(0x94D049BB133111EB)


def mixed(bits: torch.Tensor) -> torch.Tensor:
    """Returns the generator's output for these states, int64 of the same shape."""
    bits = (bits ^ shifted(bits, 30)) * MIX_1
    bits = (bits ^ shifted(bits, 27)) * MIX_2
    return bits ^ shifted(bits, 31)


def shifted(bits: torch.Tensor, count: int) -> torch.Tensor:
    """Shifts to the right and fills with zeros: torch's own shift repeats the sign."""
    return (bits >> count) & ((1 << (64 - count)) - 1)

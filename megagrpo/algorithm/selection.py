"""The smallest of numbers that lie on several ranks: exact, and without gathering them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

DIGIT_BITS = 11


def kth_smallest(bits: Tensor, wanted: int, width: int, sum_over_ranks: Callable[[Tensor], None]) -> tuple[int, int]:
    """The `wanted`-th smallest of all ranks' bits, and how many of those that equal it are among the first `wanted`.

    bits: int32 or int64 [any number], at least 0 and below 2**width; wanted: from 1 to the number on all ranks;
    sum_over_ranks sums an int64 tensor in place. A radix selection: a histogram of 16 KiB is summed for each 11 bits.
    """
    found = 0
    for shift in range(-(-width // DIGIT_BITS) * DIGIT_BITS - DIGIT_BITS, -1, -DIGIT_BITS):
        digit = (bits >> shift) & ((1 << DIGIT_BITS) - 1)
        counts = torch.bincount(digit, minlength=1 << DIGIT_BITS)
        sum_over_ranks(counts)
        up_to = counts.cumsum(0)
        chosen = int((up_to < wanted).sum())
        wanted -= int(up_to[chosen] - counts[chosen])
        bits = bits[digit == chosen]
        found = found << DIGIT_BITS | chosen
    return found, wanted

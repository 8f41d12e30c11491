"""Log ratios of two policies' probabilities of a token, or of a response."""

from __future__ import annotations

from torch import Tensor

LIMIT = 20.0
"""exp(20) is 5e8: beyond this a ratio says only that something is broken, and must not become inf or NaN."""


def bounded(log_ratio: Tensor) -> Tensor:
    """Within LIMIT on both sides, to be put into exp; outside of it without a gradient."""
    return log_ratio.clamp(-LIMIT, LIMIT)

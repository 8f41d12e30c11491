"""Mean 0 and variance 1 over the response tokens of a step."""

from __future__ import annotations

import numpy as np

VARIANCE_FLOOR = 1e-8
"""Added to the variance, so that what hardly differs is not blown up to 1."""


def whitened(values: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """(value - mean) / sqrt(variance + 1e-8), float64 [n]; the variance is that of a sample (N - 1).

    tokens: [n], how many response tokens each value stands for. A value of 0 tokens enters no statistic and gets 0.
    Equal values give exact zeros, and so does a single token.
    """
    counted, total = tokens > 0, float(tokens.sum())
    if total < 2:
        return np.zeros(len(values))
    # From the lowest value: rounding errors of a mean of equal values never look like a difference.
    height = np.where(counted, values, 0.0) - values[counted].min()
    centered = np.where(counted, height - np.dot(tokens, np.where(counted, height, 0.0)) / total, 0.0)
    variance = np.dot(tokens, centered**2) / (total - 1)
    return centered / np.sqrt(variance + VARIANCE_FLOOR)

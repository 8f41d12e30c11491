"""Estimates the length bias of a step that drops its slowest responses.

A response that is cut has sampled a part of its unknown length. The lengths of all responses that began are therefore
estimated like lifetimes of which some have not ended (Kaplan and Meier, 1958).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def lengths_of_begun(ended: Sequence[int], cut: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Returns sorted lengths, and the share of each in all responses that began, float64 [responses]. cut: tokens of
    cut responses. Responses cut beyond the last end count with the tokens of the longest; they would be longer."""
    lengths, has_ended = np.array([*ended, *cut], np.int64), np.arange(len(ended) + len(cut)) < len(ended)
    order = np.lexsort((~has_ended, lengths))
    at_least = np.arange(len(order), 0, -1)  # responses that are at least as long
    longer = np.cumprod(1 - has_ended[order] / at_least)
    shares = -np.diff(longer, prepend=1.0)
    shares[-1] += longer[-1]
    return lengths[order], shares


def cut_metrics(trained: Sequence[int], ended: Sequence[int], cut: Sequence[int]) -> dict[str, float]:
    """Computes a step's metrics from its responses' tokens. ended, cut: the responses that ended, and that were cut.
    trained: the responses used for the update; some may have finish abort."""
    lengths, shares = lengths_of_begun(ended, cut)
    mean, begun_mean, tokens = float(np.mean(trained)), float(lengths @ shares), float(lengths.sum())
    return {
        "cut/samples": float(len(lengths) - len(trained)),
        "cut/tokens_share": 1 - sum(trained) / tokens if tokens else 0.0,
        "cut/trained_tokens_mean": mean,
        "cut/trained_tokens_p90": float(np.quantile(trained, 0.9, method="inverted_cdf")),
        "cut/begun_tokens_mean": begun_mean,
        "cut/begun_tokens_p90": float(lengths[np.searchsorted(np.cumsum(shares), 0.9 - 1e-9)]),
        "cut/bias": 1 - mean / begun_mean if begun_mean else 0.0,
    }

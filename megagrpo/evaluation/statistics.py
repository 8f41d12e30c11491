"""Estimates from several samples of each prompt, their intervals, and tests of two models' difference. Pure numpy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import comb
from statistics import fmean

import numpy as np

RESAMPLES, RESAMPLES_MIN = 2000, 200
"""Draws of as many prompts, with replacement, from which an interval is read."""
DRAWN_PROMPTS_MAX = 20_000_000
"""In all resamples of an interval: with more than 10,000 prompts there are fewer resamples. A second, or two."""
PERMUTATIONS = 10_000
COVERAGE = 0.95
"""The share of draws inside an interval."""
NUMBERS_AT_ONCE = 4_000_000
SEED = 0
"""The same intervals and p-values for the same responses, every time."""


def best_of(scores: Sequence[float], k: int) -> float:
    """Returns the expected best of k scores drawn from these without replacement; 1 <= k <= len(scores).

    Unbiased for the best of k independent samples. On scores of 0 and 1 it is pass@k of Chen et al.
    (arXiv:2107.03374, eq. 1): 1 - C(n - c, k) / C(n, k) for c ones among n.
    """
    return float(np.sort(np.asarray(scores, dtype=np.float64)) @ _weights_of_best(len(scores), k))


@lru_cache(maxsize=256)
def _weights_of_best(n: int, k: int) -> np.ndarray:
    """Returns each score's share of the draws whose best it is, float64 [n]. The i-th smallest (from 0) is the best of
    those C(i, k - 1) draws whose others are among the i below it."""
    return np.array([comb(i, k - 1) / comb(n, k) for i in range(n)])


def majority(scores: Sequence[float], answers: Sequence[str]) -> float:
    """Averages the scores of samples with the most frequent answer (arXiv:2203.11171); tied answers are averaged."""
    by_answer: dict[str, list[float]] = defaultdict(list)
    for score, answer in zip(scores, answers, strict=True):
        by_answer[answer].append(score)
    most = max(map(len, by_answer.values()))
    return fmean(fmean(votes) for votes in by_answer.values() if len(votes) == most)


def means(values: np.ndarray) -> np.ndarray:
    """Averages each column over the prompts that have a value; NaN if none has. values: float64 [prompts, columns], NaN
    where a prompt has no value."""
    known = ~np.isnan(values)
    with np.errstate(invalid="ignore"):
        return np.where(known, values, 0.0).sum(axis=0) / known.sum(axis=0)


def resamples_of(prompts: int) -> int:
    return max(RESAMPLES_MIN, min(RESAMPLES, DRAWN_PROMPTS_MAX // max(prompts, 1)))


def intervals(values: np.ndarray, resamples: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Returns lower and upper ends of percentile bootstrap intervals of `means` over prompts, each float64 [columns].

    Prompts, not responses, are drawn anew: responses to one prompt are alike. Prompts without a value of a column are
    left out of it; NaN if all are. `resamples`: by default as resamples_of says.
    """
    known = ~np.isnan(values)
    filled = np.where(known, values, 0.0)
    drawn = []
    for counts in _resamples(len(values), resamples or resamples_of(len(values))):
        with np.errstate(invalid="ignore"):
            drawn.append((counts @ filled) / (counts @ known))
    estimates, ends = np.concatenate(drawn), ((1 - COVERAGE) / 2, (1 + COVERAGE) / 2)
    low, high = np.full((2, values.shape[1]), np.nan)
    for column in np.flatnonzero(~np.isnan(estimates).all(axis=0)):
        low[column], high[column] = np.nanquantile(estimates[:, column], ends)
    return low, high


def _resamples(prompts: int, resamples: int) -> Iterator[np.ndarray]:
    """Yields counts of each prompt's draws in each resample: float64 [some resamples, prompts], until all are made."""
    generator = np.random.default_rng(SEED)
    at_once = max(1, NUMBERS_AT_ONCE // max(prompts, 1))
    for first in range(0, resamples, at_once):
        rows = min(at_once, resamples - first)
        drawn = generator.integers(prompts, size=(rows, prompts)) + np.arange(rows)[:, None] * prompts
        yield np.bincount(drawn.ravel(), minlength=rows * prompts).reshape(rows, prompts).astype(np.float64)


def paired_p_value(differences: np.ndarray) -> tuple[float, str]:
    """Returns the two-sided p-value of no difference between two models, and the test's name. differences: float64
    [prompts], paired by prompt.

    If neither model is better, the sign of each difference is a coin's. Where all differences other than 0 are of one
    size, as with one response of score 0 or 1 to each prompt, the sum's distribution is binomial: McNemar's exact test.
    Else the signs are drawn PERMUTATIONS times.
    """
    changed = differences[differences != 0]
    if not len(changed):
        return 1.0, "McNemar, exact"
    if np.allclose(np.abs(changed), abs(changed[0]), rtol=1e-9):
        fewer, all_ = int(min((changed > 0).sum(), (changed < 0).sum())), len(changed)
        tail = sum(comb(all_, i) for i in range(fewer + 1))
        return min(1.0, 2 * tail / 2**all_), "McNemar, exact"
    generator, observed = np.random.default_rng(SEED), abs(changed.sum())
    at_once = max(1, NUMBERS_AT_ONCE // len(changed))
    as_far = 0
    for first in range(0, PERMUTATIONS, at_once):
        rows = min(at_once, PERMUTATIONS - first)
        signs = generator.integers(2, size=(rows, len(changed))) * 2 - 1
        as_far += int((np.abs(signs @ changed) >= observed * (1 - 1e-9)).sum())
    return (1 + as_far) / (1 + PERMUTATIONS), "permutation of signs"

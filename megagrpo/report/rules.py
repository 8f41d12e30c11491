"""Rules of a run's health over its metrics, as data. tools/metric_docs.py makes docs/health.md from them.

The same rules mark steps in `megagrpo report` and, by `rollout.alerts`, warn or stop while a run goes on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megagrpo.recipe.schema.rollout import AlertName
from megagrpo.section import table_beside

Series = Mapping[str, np.ndarray]
"""Metrics by name: float64 [steps], NaN where a step has no such metric."""

HELD_OUT = re.compile(r"eval/[^/]+/mean@\d+")
WITH_INTERVAL = re.compile(rf"{HELD_OUT.pattern}(/low|/high)?")

SHORT, LONG = 5, 20
"""The number of known values in a mean: SHORT for a metric that jumps, LONG for one that is noisy."""
KL_GROWTH, KL_LEAST = 2.0, 0.01
DIVERGENCE_GROWTH = 1.5
ENTROPY_LEFT = 0.2
LENGTH_GROWTH = 2.0
TRUNCATED_SHARE = 0.2
SIGNAL_SHARE = 0.1
MISMATCH_K3 = 0.01
DIFFER_SHARE = 0.5
OLD_SHARE, EFFECTIVE_SHARE = 0.5, 0.8
EVALUATIONS = 2
ERRORS_SHARE = 0.05


@dataclass(frozen=True)
class Rule:
    """One sign of illness.

    holds: returns, from a run's series, bool [steps]: the rule holds at that step, by the values up to it alone.
    """

    title: str
    reads: tuple[str, ...]  # metrics that it looks at, as track/metrics.yaml names them
    meaning: str  # when it holds, with its thresholds
    remedy: str  # what to do
    holds: Callable[[Series], np.ndarray]


@dataclass(frozen=True)
class Firing:
    """A range of steps, from `first` to `last`, at which a rule holds."""

    rule: AlertName
    first: int
    last: int


def firings(steps: np.ndarray, series: Series) -> Sequence[Firing]:
    """Returns the runs of neighbouring steps at which a rule holds, by rule and step. steps: int64 [steps], rising."""
    ranges = []
    for name, rule in RULES.items():
        holds = np.concatenate([[False], rule.holds(series), [False]]).astype(np.int8)
        begins, ends = np.flatnonzero(np.diff(holds) == 1), np.flatnonzero(np.diff(holds) == -1) - 1
        ranges += [Firing(name, int(steps[b]), int(steps[e])) for b, e in zip(begins, ends, strict=True)]
    return ranges


def trailing_mean(values: np.ndarray, count: int, back: int = 0) -> np.ndarray:
    """Returns the mean of the last `count` known values at each step, after leaving out the `back` newest ones.

    values: float64 [steps]; unknown where not finite. Returns float64 [steps], NaN before so many are known.
    """
    known = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(values[known])])
    ends = np.cumsum(known) - back
    enough = ends >= count
    means = np.full(len(values), np.nan)
    means[enough] = (sums[ends[enough]] - sums[ends[enough] - count]) / count
    return means


def _column(series: Series, name: str) -> np.ndarray:
    """Returns a metric, float64 [steps], NaN at every step without it."""
    return series[name] if name in series else np.full(len(next(iter(series.values()), [])), np.nan)


def _mean(series: Series, name: str, count: int, back: int = 0) -> np.ndarray:
    return trailing_mean(_column(series, name), count, back)


def _reward_no_higher(series: Series) -> np.ndarray:
    return _mean(series, "reward/mean", LONG) <= _mean(series, "reward/mean", LONG, back=LONG)


def _grows(series: Series, name: str, growth: float, least: float = 0.0) -> np.ndarray:
    now, before = (_mean(series, name, LONG, back) for back in (0, LONG))
    return (now > least) & (now > growth * before)


def _entropy_collapse(series: Series) -> np.ndarray:
    entropy = _column(series, "entropy")
    known = entropy[np.isfinite(entropy)][:SHORT]
    if len(known) < SHORT or known.mean() <= 0:
        return np.zeros(len(entropy), bool)
    return trailing_mean(entropy, SHORT) < ENTROPY_LEFT * known.mean()


def _overfitting(series: Series) -> np.ndarray:
    """Returns bool [steps]: the rule holds from such an evaluation (`_below_its_best`) until the next one."""
    reward = _mean(series, "reward/mean", SHORT)
    holds = np.zeros(len(reward), bool)
    for name, values in series.items():
        if HELD_OUT.fullmatch(name):
            holds |= _below_its_best(values, _column(series, f"{name}/low"), _column(series, f"{name}/high"), reward)
    return holds


def _below_its_best(scores: np.ndarray, low: np.ndarray, high: np.ndarray, reward: np.ndarray) -> np.ndarray:
    """Finds the steps, bool [steps], at which a set's newest EVALUATIONS intervals end below that of its best score.
    The reward must be higher than at that best.

    scores, low, high, reward: float64 [steps]; the first three are NaN at steps without an evaluation.
    """
    evaluations = np.flatnonzero(np.isfinite(scores))
    best, below, holds = 0, 0, [False]
    for number, step in enumerate(evaluations):
        if number == 0 or scores[step] > scores[best]:
            best = int(step)
        below = below + 1 if high[step] < low[best] and reward[step] > reward[best] else 0
        holds.append(below >= EVALUATIONS)
    return np.repeat(holds, np.diff([0, *evaluations, len(scores)]))


HOLDS: dict[AlertName, Callable[[Series], np.ndarray]] = {
    "gradient_not_finite": lambda series: (
        (_column(series, "skipped_steps") > 0) | (_column(series, "critic/skipped_steps") > 0)
    ),
    "kl_without_reward": lambda series: _grows(series, "kl/mean", KL_GROWTH, KL_LEAST) & _reward_no_higher(series),
    "divergence_grows": lambda series: _grows(series, "teacher/divergence", DIVERGENCE_GROWTH, KL_LEAST),
    "no_teacher": lambda series: _mean(series, "teacher/tokens_share", SHORT) == 0,
    "entropy_collapse": _entropy_collapse,
    "length_explosion": lambda series: (
        _grows(series, "response_tokens/mean", LENGTH_GROWTH) & _reward_no_higher(series)
    ),
    "truncated": lambda series: _mean(series, "response_tokens/truncated_share", SHORT) > TRUNCATED_SHARE,
    "no_signal": lambda series: _mean(series, "groups/with_signal_share", LONG) < SIGNAL_SHARE,
    "mismatch": lambda series: _mean(series, "logprob_difference/k3", SHORT) > MISMATCH_K3,
    "routes_differ": lambda series: _mean(series, "routes/differ_share/mean", SHORT) > DIFFER_SHARE,
    "routes_missing": lambda series: _column(series, "routes/missing") > 0,
    "staleness": lambda series: (
        (_mean(series, "staleness/above_1_share", SHORT) > OLD_SHARE)
        & (_mean(series, "rollout_ratio/effective_share", SHORT) < EFFECTIVE_SHARE)
    ),
    "overfitting": _overfitting,
    "reward_errors": lambda series: _mean(series, "reward/errors_share", SHORT) > ERRORS_SHARE,
}


def _rules() -> dict[AlertName, Rule]:
    rows = table_beside(__file__, "rules.yaml")
    rules = {}
    for name, holds in HOLDS.items():
        row = rows[name] | {"reads": tuple(rows[name]["reads"]), "meaning": rows[name]["meaning"].format(**globals())}
        rules[name] = Rule(holds=holds, **row)
    return rules


RULES = _rules()

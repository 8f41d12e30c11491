"""Rules of a run's health over its metrics, as data. tools/metric_docs.py makes docs/health.md from them.

The same rules mark steps in `megagrpo report` and, by `rollout.alerts`, warn or stop while a run goes on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megagrpo.recipe.schema.rollout import AlertName

Series = Mapping[str, np.ndarray]
"""Metrics by name: float64 [steps], NaN where a step has no such metric."""

HELD_OUT = re.compile(r"eval/[^/]+/mean@\d+")
WITH_INTERVAL = re.compile(rf"{HELD_OUT.pattern}(/low|/high)?")

SHORT, LONG = 5, 20
"""The number of known values in a mean: SHORT for a metric that jumps, LONG for one that is noisy."""
KL_GROWTH, KL_LEAST = 2.0, 0.01
ENTROPY_LEFT = 0.2
LENGTH_GROWTH = 2.0
TRUNCATED_SHARE = 0.2
SIGNAL_SHARE = 0.1
MISMATCH_K3 = 0.01
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


def _kl_without_reward(series: Series) -> np.ndarray:
    now, before = _mean(series, "kl/mean", LONG), _mean(series, "kl/mean", LONG, back=LONG)
    return (now > KL_LEAST) & (now > KL_GROWTH * before) & _reward_no_higher(series)


def _entropy_collapse(series: Series) -> np.ndarray:
    entropy = _column(series, "entropy")
    known = entropy[np.isfinite(entropy)][:SHORT]
    if len(known) < SHORT or known.mean() <= 0:
        return np.zeros(len(entropy), bool)
    return trailing_mean(entropy, SHORT) < ENTROPY_LEFT * known.mean()


def _length_explosion(series: Series) -> np.ndarray:
    now, before = (_mean(series, "response_tokens/mean", LONG, back) for back in (0, LONG))
    return (now > LENGTH_GROWTH * before) & _reward_no_higher(series)


def _staleness(series: Series) -> np.ndarray:
    old = _mean(series, "staleness/above_1_share", SHORT) > OLD_SHARE
    return old & (_mean(series, "rollout_ratio/effective_share", SHORT) < EFFECTIVE_SHARE)


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


RULES: dict[AlertName, Rule] = {
    "gradient_not_finite": Rule(
        "the gradient was not finite",
        ("skipped_steps", "critic/skipped_steps"),
        "An optimizer step was not taken, because the loss or the gradient was NaN or infinite.",
        "One such step does no harm. If they come again: lower `train.optimizer.lr`, look at `logprob_difference/max` "
        "for tokens that trainer and engines see differently, and train the step again with `megagrpo replay`.",
        lambda series: (_column(series, "skipped_steps") > 0) | (_column(series, "critic/skipped_steps") > 0),
    ),
    "kl_without_reward": Rule(
        "KL grows without reward",
        ("kl/mean", "reward/mean"),
        f"The policy's divergence from the reference has grown to more than {KL_GROWTH:g} times what it was, mean of "
        f"{LONG} steps against the {LONG} before, and the reward is no higher.",
        "The policy wanders. Lower `train.optimizer.lr`, raise `algorithm.kl.coefficient`, or go back to a checkpoint "
        "before it began. Read responses of then and now side by side: a reward that can be cheated looks like this.",
        _kl_without_reward,
    ),
    "entropy_collapse": Rule(
        "entropy collapses",
        ("entropy",),
        f"The policy's entropy, mean of {SHORT} steps, is below {ENTROPY_LEFT:.0%} of that of its first {SHORT} steps.",
        "Responses to a prompt become the same, and groups lose their signal. With several minibatches or epochs raise "
        "`algorithm.loss.clip_high` (0.28, as DAPO does); with one of each no ratio reaches a bound. In both cases try "
        "`clip_cov`, a small `algorithm.entropy_coefficient` or a lower learning rate, keep `rollout.temperature` at "
        "1, or add harder prompts. At the end of a task that is solved it is no illness. Silent with "
        "`algorithm.entropy_metric: false`.",
        _entropy_collapse,
    ),
    "length_explosion": Rule(
        "responses grow without reward",
        ("response_tokens/mean", "reward/mean"),
        f"Responses are more than {LENGTH_GROWTH:g} times as long, mean of {LONG} steps against the {LONG} before, and "
        "the reward is no higher.",
        "Look at the longest responses: they often repeat themselves. Penalise length (`reward.overlong`), use an "
        "aggregation that does not favour long responses (docs/algorithms.md), or mask truncated ones.",
        _length_explosion,
    ),
    "truncated": Rule(
        "many responses are cut off",
        ("response_tokens/truncated_share",),
        f"More than {TRUNCATED_SHARE:.0%} of the responses reach `rollout.response_tokens_max`, mean of {SHORT} steps.",
        "Raise `rollout.response_tokens_max` if the responses are on their way to an answer. If they repeat "
        "themselves, penalise length (`reward.overlong`); `reward.truncated: mask` leaves them out.",
        lambda series: _mean(series, "response_tokens/truncated_share", SHORT) > TRUNCATED_SHARE,
    ),
    "no_signal": Rule(
        "groups teach nothing",
        ("groups/with_signal_share",),
        f"Fewer than {SIGNAL_SHARE:.0%} of the groups have rewards that differ, mean of {LONG} steps.",
        "The prompts are all too easy or all too hard. Choose others, use `rollout.dynamic_sampling`, set solved "
        "prompts aside (`data.no_resampling_pass_rate`), or sample more responses for each. If the reward is 0 "
        "everywhere, `megagrpo data check` shows whether the reward can be had at all.",
        lambda series: _mean(series, "groups/with_signal_share", LONG) < SIGNAL_SHARE,
    ),
    "mismatch": Rule(
        "trainer and engines disagree",
        ("logprob_difference/k3",),
        f"The divergence between the trainer's and the engines' logprobs of the same tokens (k3) is above "
        f"{MISMATCH_K3:g} nats per token, mean of {SHORT} steps.",
        "docs/mismatch.md says what causes it and how to find the tokens. Switch on `algorithm.correction`, or lower "
        "the precision's gap: `rollout.quantization: null`, the same dtype on both sides.",
        lambda series: _mean(series, "logprob_difference/k3", SHORT) > MISMATCH_K3,
    ),
    "staleness": Rule(
        "samples are too old",
        ("staleness/above_1_share", "rollout_ratio/effective_share"),
        f"More than {OLD_SHARE:.0%} of the tokens are more than one version old, and their importance weights keep "
        f"less than {EFFECTIVE_SHARE:.0%} of the samples' worth, mean of {SHORT} steps.",
        "Lower `schedule.max_staleness`, or give engines more devices so that samples wait less (docs/schedules.md). "
        "`algorithm.correction` bounds the weights.",
        _staleness,
    ),
    "overfitting": Rule(
        "reward without held-out gain",
        ("reward/mean", "eval/{set}/mean@{k}", "eval/{set}/{metric}/low", "eval/{set}/{metric}/high"),
        f"In {EVALUATIONS} evaluations in a row a held-out set's score is below its best by more than chance: its 95 % "
        "interval ends where that of the best has not begun. The training reward is higher than it was then.",
        "The policy learns the training prompts, or to please the reward. Keep the best checkpoint "
        "(`checkpoint.keep_best`), stop there (`eval.early_stopping`), add prompts, and read held-out responses of "
        "both steps.",
        _overfitting,
    ),
    "reward_errors": Rule(
        "rewards fail",
        ("reward/errors_share",),
        f"More than {ERRORS_SHARE:.0%} of the samples have no reward, because a reward function raised or timed out, "
        f"mean of {SHORT} steps.",
        "The samples' `error` says why (`megagrpo report`, filter by the state `failed`). Mend the function, raise "
        "`reward.timeout_seconds`, or give it more workers.",
        lambda series: _mean(series, "reward/errors_share", SHORT) > ERRORS_SHARE,
    ),
}

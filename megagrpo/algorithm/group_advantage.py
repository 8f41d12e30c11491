"""Advantages of whole responses, each compared with the others of its prompt.

In all of these a masked sample enters no statistic and gets 0, as does one whose group has no other; equal scores give
exact zeros; and a group may have any size. R is a sample's score, n the scored samples of its group.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megagrpo.algorithm.whitening import whitened
from megagrpo.recipe import schema


@dataclass(frozen=True)
class ScoredGroups:
    """The samples of a step, by group. Arrays are [rows], one row for each sample, or [groups], in order of their ids.

    `height` is the score less the lowest of its group: group statistics of it are free of rounding errors where all
    scores are equal. It is 0 where `compared` is False.
    """

    group: np.ndarray  # int64 [rows], index of the row's group
    known: np.ndarray  # bool [rows]: scored, not masked
    compared: np.ndarray  # bool [rows]: scored, and not the only one of its group
    sizes: np.ndarray  # int64 [groups], scored samples
    height: np.ndarray  # float64 [rows]
    tokens: np.ndarray  # int64 [rows], response tokens

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Sum over each group's scored samples: [rows] -> float64 [groups]."""
        return np.bincount(self.group[self.known], values[self.known], minlength=len(self.sizes))

    def centered(self) -> np.ndarray:
        """R - mean of the group, float64 [rows]."""
        mean = self.sums(self.height) / np.maximum(self.sizes, 1)
        return np.where(self.compared, self.height - mean[self.group], 0.0)


def scored_groups(scores: np.ndarray, group_ids: np.ndarray, tokens: np.ndarray) -> ScoredGroups:
    """scores: float64 [rows], NaN where a sample is masked; group_ids: int [rows], in any order; tokens: int [rows]."""
    ids, group = np.unique(group_ids, return_inverse=True)
    known = ~np.isnan(scores)
    sizes = np.bincount(group[known], minlength=len(ids))
    compared = known & (sizes[group] > 1)
    lowest = np.full(len(ids), np.inf)
    np.minimum.at(lowest, group[compared], scores[compared])
    height = np.zeros(len(scores))
    height[compared] = scores[compared] - lowest[group[compared]]
    return ScoredGroups(group, known, compared, sizes, height, tokens)


def grpo(groups: ScoredGroups, settings: schema.AdvantageConfig) -> np.ndarray:
    """GRPO, arXiv:2402.03300, section 4.1.2: (R - mean) / (standard deviation + epsilon).

    Without the division it is the advantage of Dr.GRPO, arXiv:2503.20783.
    """
    return _divided(groups.centered(), groups, settings)


def rloo(groups: ScoredGroups, settings: schema.AdvantageConfig) -> np.ndarray:
    """RLOO, arXiv:2402.14740, eq. 8: R - mean of the others, which is n / (n - 1) (R - mean)."""
    return groups.centered() * (groups.sizes / np.maximum(groups.sizes - 1, 1))[groups.group]


def opo(groups: ScoredGroups, settings: schema.AdvantageConfig) -> np.ndarray:
    """OPO, arXiv:2505.23585: R - sum(tokens x R) / sum(tokens), the baseline of least variance of the gradient if a
    response's gradient grows with its length."""
    baseline = groups.sums(groups.tokens * groups.height) / np.maximum(groups.sums(groups.tokens), 1)
    return np.where(groups.compared, groups.height - baseline[groups.group], 0.0)


def gpg(groups: ScoredGroups, settings: schema.AdvantageConfig) -> np.ndarray:
    """GPG, arXiv:2504.02546, section 3.3: alpha (R - mean), alpha = samples / samples of groups whose scores differ.

    alpha makes up for groups without a gradient in the mean over the batch: these must then not be left out of it.
    """
    centered = groups.centered()
    with_signal = groups.sums(groups.height) > 0
    counted = groups.sizes[with_signal].sum()
    return centered * (groups.sizes.sum() / counted) if counted else centered


def pass_k(groups: ScoredGroups, settings: schema.AdvantageConfig) -> np.ndarray:
    """The best sample alone gets (best - second best) / (standard deviation + epsilon). arXiv:2503.19595, max@k.

    It is what the group's best score would lose without that sample. With two best ones nobody gets anything.
    """
    order = np.lexsort((groups.height, groups.group))
    order = order[groups.compared[order]]
    last = np.flatnonzero(np.diff(groups.group[order], append=-1))  # each group's best; the one before is its second
    gain = np.zeros(len(groups.height))
    gain[order[last]] = groups.height[order[last]] - groups.height[order[last - 1]]
    return _divided(gain, groups, settings)


def reinforce_plus_plus_baseline(groups: ScoredGroups, settings: schema.AdvantageConfig) -> np.ndarray:
    """REINFORCE++-baseline, arXiv:2501.03262: R - mean of the group, then whitened over the step's response tokens.

    Longer responses weigh more in the whitening's mean, so a group of equal scores gets a small advantage, all alike.
    """
    return _whitened_over_tokens(groups.centered(), groups)


def gdpo(
    groups: ScoredGroups,
    parts: np.ndarray,
    weights: np.ndarray,
    group_ids: np.ndarray,
    settings: schema.AdvantageConfig,
) -> np.ndarray:
    """GDPO, arXiv:2601.05242: GRPO's advantage of each reward apart, their weighted sum, whitened over the step.

    parts: float64 [rows, rewards]; weights: float64 [rewards]. The mean and the variance of the whitening are over
    response tokens, as in the authors' code.
    """
    total = np.zeros(len(parts))
    for weight, scores in zip(weights, parts.T, strict=True):
        of_part = scored_groups(np.where(groups.known, scores, np.nan), group_ids, groups.tokens)
        total += weight * grpo(of_part, settings)
    return _whitened_over_tokens(total, groups)


def remax(scores: np.ndarray, baselines: np.ndarray) -> np.ndarray:
    """ReMax, arXiv:2310.10505, algorithm 1: R - score of the greedy response to the same prompt.

    scores, baselines: float64 [rows], NaN where masked or where the greedy response's reward failed: these get 0.
    """
    return np.nan_to_num(scores - baselines, nan=0.0)


def _divided(values: np.ndarray, groups: ScoredGroups, settings: schema.AdvantageConfig) -> np.ndarray:
    """values / (standard deviation of the group's scores + epsilon), as far as the settings say."""
    if settings.standard_deviation == "none":
        return values
    freedom = groups.sizes - (settings.standard_deviation == "sample")
    variance = groups.sums(groups.centered() ** 2) / np.maximum(freedom, 1)
    scale = np.sqrt(variance) + settings.epsilon
    # Where every score is equal the values are 0 too; with epsilon = 0 the quotient must still be 0.
    return values / np.where(scale > 0, scale, 1.0)[groups.group]


def _whitened_over_tokens(values: np.ndarray, groups: ScoredGroups) -> np.ndarray:
    return whitened(values, np.where(groups.compared, groups.tokens, 0))

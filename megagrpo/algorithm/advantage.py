"""From the scores of a step to the advantages of its samples. GRPO, arXiv:2402.03300, section 4.1.2."""

from __future__ import annotations

from typing import Literal

import numpy as np


def grpo_advantages(
    scores: np.ndarray, group_ids: np.ndarray, normalize: Literal["sample", "none"] = "sample", epsilon: float = 1e-6
) -> np.ndarray:
    """Advantage of each sample within its group: (score - mean) / (sample standard deviation + epsilon).

    scores: float64 [samples], NaN where a sample is masked (its reward failed); group_ids: int [samples], in any order.
    Masked samples enter neither mean nor deviation and get 0, as do samples that are alone in their group.
    normalize "none" only subtracts the mean (arXiv:2503.20783). Returns float64 [samples].
    """
    ids, group = np.unique(group_ids, return_inverse=True)
    known = ~np.isnan(scores)
    lowest = np.full(len(ids), np.inf)
    np.minimum.at(lowest, group[known], scores[known])
    # Measured from the group's lowest score, equal scores give exact zeros: rounding errors never look like signal.
    height = np.where(known, scores - lowest[group], 0.0)
    count = np.bincount(group[known], minlength=len(ids))
    mean = np.bincount(group, height, minlength=len(ids)) / np.maximum(count, 1)
    centered = np.where(known & (count[group] > 1), height - mean[group], 0.0)
    if normalize == "none":
        return centered
    variance = np.bincount(group, centered**2, minlength=len(ids)) / np.maximum(count - 1, 1)
    scale = np.sqrt(variance) + epsilon
    # Where every score is equal the numerator is 0 too; with epsilon = 0 the quotient must still be 0.
    return centered / np.where(scale > 0, scale, 1.0)[group]


def groups_with_signal(advantages: np.ndarray, group_ids: np.ndarray) -> np.ndarray:
    """Ids, sorted, of the groups in which any advantage differs from 0: only these have a policy gradient."""
    return np.unique(group_ids[advantages != 0])


def penalized_scores(scores: np.ndarray, sequence_kl: np.ndarray, coefficient: float) -> np.ndarray:
    """KL in the reward: each sample's score minus coefficient times its KL estimate summed over response tokens.

    scores, sequence_kl: float64 [samples]. Masked samples stay NaN. (arXiv:2203.02155, eq. 2, once per sequence.)
    """
    return scores - coefficient * sequence_kl

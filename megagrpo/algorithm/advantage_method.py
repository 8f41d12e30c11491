"""Scores of a step as methods read them, the advantages that they make, and the base of the methods.

A masked sample enters no statistic and gets 0. Where the samples of a prompt are compared, so does one whose group has
no other; equal scores give exact zeros, and a group may have any size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from megagrpo.algorithm.ragged import Ragged, ragged_zeros
from megagrpo.section import Section

VARIANCE_FLOOR = 1e-8
"""Added to the variance in `whitened`, so that what hardly differs is not blown up to 1."""


@dataclass(frozen=True)
class AdvantageInputs:
    """A step's samples in one order of rows. A masked sample has the score NaN; its other values are not used.

    Per-token numbers may be missing (no tokens) or present in rows that are masked; elsewhere there are `tokens`.
    """

    scores: np.ndarray  # float64 [rows]
    group_ids: np.ndarray  # int64 [rows], in any order, groups of any size
    tokens: np.ndarray  # int64 [rows], response tokens
    parts: np.ndarray | None = None  # float64 [rows, rewards], what each reward function counted
    weights: np.ndarray | None = None  # float64 [rewards]
    # float64 [groups], by sorted id, for remax: greedy scores, NaN where one failed
    baselines: np.ndarray | None = None
    kl: Ragged | None = None  # KL of every response token in nats, where the penalty is in the reward
    kl_coefficient: float = 0.0
    values: Ragged | None = None  # for gae: the critic's estimate before each response token is sampled
    energy: Ragged | None = None  # for otb: token_energy of each response token
    # For a method of a user's own: response tokens, int32, and their logprobs in the engine that sampled them, float32.
    token_ids: Ragged | None = None
    logprobs: Ragged | None = None

    def __post_init__(self) -> None:
        rows = len(self.scores)
        if len(self.group_ids) != rows or len(self.tokens) != rows:
            raise ValueError(f"{rows} scores, {len(self.group_ids)} group ids and {len(self.tokens)} token counts")

    @property
    def known(self) -> np.ndarray:
        """Returns bool [rows]: samples that have a score."""
        return ~np.isnan(self.scores)


@dataclass(frozen=True)
class Advantages:
    """The advantages of a step. Masked rows have zeros everywhere, and are not to be trained on."""

    of_rows: np.ndarray  # float64 [rows]; where tokens have their own, the mean over the row's
    of_tokens: Ragged | None = None  # float64, where the tokens of a response differ
    returns: Ragged | None = None  # float64, what a critic learns

    @property
    def taught(self) -> np.ndarray:
        """Returns bool [rows]: rows with an advantage that is not 0."""
        if self.of_tokens is None:
            return self.of_rows != 0
        of_tokens = self.of_tokens
        return np.bincount(of_tokens.row_of_token, of_tokens.values != 0, minlength=of_tokens.rows) > 0


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
        """Sums `values` [rows] over each group's scored samples: float64 [groups]."""
        return np.bincount(self.group[self.known], values[self.known], minlength=len(self.sizes))

    def centered(self) -> np.ndarray:
        """Returns R - mean of the group, float64 [rows]."""
        mean = self.sums(self.height) / np.maximum(self.sizes, 1)
        return np.where(self.compared, self.height - mean[self.group], 0.0)

    def gains(self) -> np.ndarray:
        """Returns each best sample's lead over the second best of its group, 0 for other samples: float64 [rows]."""
        order = np.lexsort((self.height, self.group))
        order = order[self.compared[order]]
        last = np.flatnonzero(np.diff(self.group[order], append=-1))  # each group's best; before it is its second best
        gains = np.zeros(len(self.height))
        gains[order[last]] = self.height[order[last]] - self.height[order[last - 1]]
        return gains

    def whitened_over_tokens(self, values: np.ndarray) -> np.ndarray:
        return whitened(values, np.where(self.compared, self.tokens, 0))


def scored_groups(scores: np.ndarray, group_ids: np.ndarray, tokens: np.ndarray) -> ScoredGroups:
    """Compares samples by group. scores: float64 [rows], NaN where masked; group_ids, tokens: int [rows], any order."""
    ids, group = np.unique(group_ids, return_inverse=True)
    known = ~np.isnan(scores)
    sizes = np.bincount(group[known], minlength=len(ids))
    compared = known & (sizes[group] > 1)
    lowest = np.full(len(ids), np.inf)
    np.minimum.at(lowest, group[compared], scores[compared])
    height = np.zeros(len(scores))
    height[compared] = scores[compared] - lowest[group[compared]]
    return ScoredGroups(group, known, compared, sizes, height, tokens)


class AdvantageMethod(Section):
    """One way to make advantages."""

    name: str

    by_group: ClassVar[bool] = True
    """True if a sample is compared with others of its prompt: a single sample, or equal ones, teach nothing."""

    scales_by_signal: ClassVar[bool] = False
    """True if a factor compensates for groups whose advantages are all zero: these stay in the batch."""

    by_token: ClassVar[bool] = False
    """True if the tokens of a response may have different advantages with any settings."""

    reads_energy: ClassVar[bool] = False
    """True if advantages are made from each token's energy, which the pass for old logprobs then finds."""

    compares_turns: ClassVar[bool] = False
    """True if single turns of agents' rollouts can be compared in place of whole responses (credit.py)."""

    def advantages(self, inputs: AdvantageInputs) -> Advantages:
        """Computes advantages. With a KL penalty in the reward, methods that compare whole responses subtract its sum
        over the response from the score; those that work by token subtract it at every token.

        Raises ValueError if the inputs lack what the method needs, or do not fit together.
        """
        raise NotImplementedError

    def teaches(self, inputs: AdvantageInputs) -> np.ndarray:
        """Returns bool [rows], samples above the lowest score of their group: a group that has one teaches something.
        Whitening gives groups of equal scores equal advantages, which teach nothing.
        """
        return scored_groups(inputs.scores, inputs.group_ids, inputs.tokens).height > 0


def whitened(values: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Returns (value - mean) / sqrt(variance + 1e-8), float64 [n]; the variance is that of a sample (N - 1).

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


def laid_out(values: Ragged, lengths: np.ndarray, rows: np.ndarray) -> Ragged:
    """Spreads the values of the chosen rows (bool [rows]) to a layout of all rows, 0 in the others. Raises
    ValueError if a chosen row does not have `lengths` tokens (int64 [rows])."""
    if not np.array_equal(values.lengths[rows], lengths[rows]):
        raise ValueError(f"{values.lengths[rows]} values for responses of {lengths[rows]} tokens")
    result = ragged_zeros(lengths)
    result.values[rows[result.row_of_token]] = values.values[rows[values.row_of_token]]
    return result


def penalized_scores(inputs: AdvantageInputs) -> np.ndarray:
    """Returns scores less coefficient x KL summed over the response (arXiv:2203.02155, eq. 2); NaN if masked."""
    if inputs.kl is None:
        return inputs.scores
    return inputs.scores - inputs.kl_coefficient * laid_out(inputs.kl, inputs.tokens, inputs.known).sums()

"""Advantages of single tokens: rewards to come, discounted, with or without a critic's estimates."""

from __future__ import annotations

import numpy as np

from megagrpo.algorithm.ragged import Ragged, ragged_zeros
from megagrpo.algorithm.whitening import whitened


def laid_out(values: Ragged, lengths: np.ndarray, rows: np.ndarray) -> Ragged:
    """The values of the chosen rows (bool [rows]) in a layout of all rows, 0 in the others. Raises ValueError if a
    chosen row does not have `lengths` tokens (int64 [rows])."""
    if not np.array_equal(values.lengths[rows], lengths[rows]):
        raise ValueError(f"{values.lengths[rows]} values for responses of {lengths[rows]} tokens")
    result = ragged_zeros(lengths)
    result.values[rows[result.row_of_token]] = values.values[rows[values.row_of_token]]
    return result


def token_rewards(scores: np.ndarray, lengths: np.ndarray, kl: Ragged | None, coefficient: float) -> Ragged:
    """A response's score at its last token, less coefficient x KL at every token (arXiv:2203.02155, eq. 2).

    scores: float64 [rows], NaN where masked: the rewards of such a row are 0; lengths: int64 [rows].
    """
    known = ~np.isnan(scores)
    rewards = ragged_zeros(lengths)
    if kl is not None:
        rewards.values[:] = -coefficient * laid_out(kl, lengths, known).values
    scored = known & (lengths > 0)
    rewards.values[rewards.offsets[1:][scored] - 1] += scores[scored]
    return rewards


def discounted_sums(values: Ragged, factor: float) -> Ragged:
    """y[t] = x[t] + factor x y[t + 1] within each row, and 0 after its last token."""
    longest_first = np.argsort(-values.lengths, kind="stable")
    ends, lengths = values.offsets[1:][longest_first], values.lengths[longest_first]
    sums = np.empty(len(values.values))
    ahead = np.zeros(values.rows)
    for from_end in range(1, int(lengths.max(initial=0)) + 1):
        rows = int(np.searchsorted(-lengths, -from_end, side="right"))  # those with at least this many tokens
        at = ends[:rows] - from_end
        ahead = values.values[at] + factor * ahead[:rows]
        sums[at] = ahead
    return values.with_values(sums)


def reinforce_plus_plus(rewards: Ragged, known: np.ndarray, discount: float) -> Ragged:
    """REINFORCE++, arXiv:2501.03262: the discounted rewards to come, whitened over the tokens of rows that are known.

    known: bool [rows]; the others enter no statistic and get 0.
    """
    returns = discounted_sums(rewards, discount)
    return returns.with_values(whitened(returns.values, known[returns.row_of_token].astype(np.float64)))


def generalized_advantages(
    rewards: Ragged, values: Ragged, known: np.ndarray, discount: float, trace: float
) -> tuple[Ragged, Ragged]:
    """GAE, arXiv:1506.02438, eq. 16: (advantages, returns), 0 in rows that are not known (bool [rows]).

    delta[t] = reward[t] + discount x value[t + 1] - value[t], where a response's last token has no value after it;
    advantage[t] = delta[t] + discount x trace x advantage[t + 1]. What the critic learns is return = advantage + value;
    the advantages are whitened after that, over all tokens of known rows.
    """
    values = laid_out(values, rewards.lengths, known)
    following = np.zeros(len(values.values))
    following[:-1] = values.values[1:]
    following[values.offsets[1:][values.lengths > 0] - 1] = 0.0
    deltas = rewards.values + discount * following - values.values
    advantages = discounted_sums(rewards.with_values(deltas), discount * trace).values
    tokens = known[values.row_of_token].astype(np.float64)
    return values.with_values(whitened(advantages, tokens)), values.with_values(advantages + values.values)

"""Methods that make an advantage for each token, not for the response: returns from the token on."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from megagrpo.algorithm.advantage_method import (
    AdvantageInputs,
    AdvantageMethod,
    Advantages,
    laid_out,
    scored_groups,
    whitened,
)
from megagrpo.algorithm.ragged import Ragged, ragged_zeros
from megagrpo.section import Fraction

if TYPE_CHECKING:
    from torch import Tensor


class ReinforcePlusPlusConfig(AdvantageMethod):
    """REINFORCE++, arXiv:2501.03262: the discounted rewards to come, by token, whitened over the step's tokens."""

    by_group: ClassVar[bool] = False

    name: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"

    discount: Fraction = 1.0
    """Weight of a reward one token later (gamma)."""

    def advantages(self, inputs: AdvantageInputs) -> Advantages:
        of_tokens = whitened_tokens(inputs, discounted_sums(token_rewards(inputs), self.discount))
        return Advantages(of_tokens.means(), of_tokens)


class GaeConfig(AdvantageMethod):
    """GAE, arXiv:1506.02438, eq. 16, from the values of a critic (PPO); whitened over the step's tokens.

    delta[t] = reward[t] + discount x value[t + 1] - value[t], where a response's last token has no value after it;
    advantage[t] = delta[t] + discount x trace x advantage[t + 1]. The critic learns return = advantage + value, before
    the whitening.
    """

    by_group: ClassVar[bool] = False
    by_token: ClassVar[bool] = True

    name: Literal["gae"] = "gae"

    discount: Fraction = 1.0
    """Weight of a reward one token later (gamma)."""

    trace: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Lambda: the distance over which rewards replace the critic's estimates. 0: one token, TD(0)."""

    def advantages(self, inputs: AdvantageInputs) -> Advantages:
        if inputs.values is None:
            raise ValueError("gae needs the critic's values")
        rewards = token_rewards(inputs)
        values = laid_out(inputs.values, rewards.lengths, inputs.known)
        following = np.zeros(len(values.values))
        following[:-1] = values.values[1:]
        following[values.offsets[1:][values.lengths > 0] - 1] = 0.0
        deltas = rewards.values + self.discount * following - values.values
        advantages = discounted_sums(rewards.with_values(deltas), self.discount * self.trace)
        of_tokens = whitened_tokens(inputs, advantages)
        return Advantages(of_tokens.means(), of_tokens, values.with_values(advantages.values + values.values))


class OtbConfig(AdvantageMethod):
    """OTB, arXiv:2602.07078: G - sum(W x G) / sum(W) over the group's responses, at each place of a token.

    G is the return from the token on: the score, less penalties to come; W the sum of `token_energy` up to the token.
    This is the baseline of least variance of the gradient, if the gradient of a logprob grows with that for the logits.
    A token at whose place no other response of its group has one gets 0. Weights of a correction do not enter W.
    """

    by_token: ClassVar[bool] = True
    reads_energy: ClassVar[bool] = True

    name: Literal["otb"] = "otb"

    def advantages(self, inputs: AdvantageInputs) -> Advantages:
        if inputs.energy is None:
            raise ValueError("otb needs the tokens' energies")
        groups = scored_groups(inputs.scores, inputs.group_ids, inputs.tokens)
        # From the lowest score of the group on: equal scores give exact zeros.
        heights = np.where(inputs.known, groups.height, np.nan)
        returns = discounted_sums(token_rewards(replace(inputs, scores=heights)), 1.0)
        begins, row = returns.offsets[:-1], returns.row_of_token
        sums = np.cumsum(laid_out(inputs.energy, inputs.tokens, inputs.known).values)
        weights = sums - np.append(0.0, sums)[begins][row]
        # Each group has a cell for every place up to its longest response.
        longest = np.zeros(len(groups.sizes), np.int64)
        np.maximum.at(longest, groups.group, inputs.tokens)
        place = (np.cumsum(longest) - longest)[groups.group][row] + np.arange(len(row)) - begins[row]
        at = np.flatnonzero(groups.compared[row])
        cell, weight, value = place[at], weights[at], returns.values[at]
        count, total, weighted = (np.bincount(cell, each, longest.sum()) for each in (None, weight, weight * value))
        baseline = weighted / np.where(total > 0, total, 1.0)
        of_tokens = ragged_zeros(inputs.tokens)
        of_tokens.values[at] = np.where(count[cell] > 1, value - baseline[cell], 0.0)
        return Advantages(of_tokens.means(), of_tokens)


def token_energy(logprobs: Tensor, sharpened: Tensor) -> Tensor:
    """Returns the squared norm of each logprob's gradient for the logits, [tokens]: 1 - 2 p + sum of squares of all
    tokens' probabilities (the logit-gradient proxy of arXiv:2602.07078).

    logprobs: of the sampled tokens; sharpened: at half the temperature. The sum of squares is exp(2 logprob -
    sharpened), so no pass over the vocabulary is needed that a logprob does not take.
    """
    return (1 - 2 * logprobs.exp() + (2 * logprobs - sharpened).exp()).clamp(min=0)


def whitened_tokens(inputs: AdvantageInputs, values: Ragged) -> Ragged:
    """Whitens the values of the tokens of all rows that are not masked; 0 in the others."""
    return values.with_values(whitened(values.values, inputs.known[values.row_of_token].astype(np.float64)))


def token_rewards(inputs: AdvantageInputs) -> Ragged:
    """Returns a response's score at its last token, less coefficient x KL at every token (arXiv:2203.02155, eq. 2);
    0 in masked rows."""
    rewards = ragged_zeros(inputs.tokens)
    if inputs.kl is not None:
        rewards.values[:] = -inputs.kl_coefficient * laid_out(inputs.kl, inputs.tokens, inputs.known).values
    scored = inputs.known & (inputs.tokens > 0)
    rewards.values[rewards.offsets[1:][scored] - 1] += inputs.scores[scored]
    return rewards


def discounted_sums(values: Ragged, factor: float) -> Ragged:
    """Computes y[t] = x[t] + factor x y[t + 1] within each row, with y = 0 after its last token."""
    longest_first = np.argsort(-values.lengths, kind="stable")
    ends, lengths = values.offsets[1:][longest_first], values.lengths[longest_first]
    sums = np.empty(len(values.values))
    ahead = np.zeros(values.rows)
    for from_end in range(1, int(lengths.max(initial=0)) + 1):
        rows = int(np.searchsorted(-lengths, -from_end, side="right"))  # rows with at least this many tokens
        at = ends[:rows] - from_end
        ahead = values.values[at] + factor * ahead[:rows]
        sums[at] = ahead
    return values.with_values(sums)

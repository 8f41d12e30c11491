"""From the scores of a step to advantages: the methods, each with its settings.

A masked sample enters no statistic and gets 0. Where the samples of a prompt are compared, so does one whose group has
no other; equal scores give exact zeros, and a group may have any size. R is a sample's score, n the scored samples of
its group.

To add a method: its class here, and its name in AdvantageConfig.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from megagrpo.algorithm.ragged import Ragged, ragged_zeros
from megagrpo.errors import Problem, RecipeError
from megagrpo.section import FILE_AND_FUNCTION, ByName, Fraction, NonNegativeFloat, Rules, Section
from megagrpo.user_functions import UserFunction

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


class GroupMethod(AdvantageMethod):
    """Compares whole responses with the others of their prompt."""

    def advantages(self, inputs: AdvantageInputs) -> Advantages:
        groups = scored_groups(_penalized_scores(inputs), inputs.group_ids, inputs.tokens)
        return Advantages(self.of_groups(groups))

    def of_groups(self, groups: ScoredGroups) -> np.ndarray:
        """Returns advantages, float64 [rows]."""
        raise NotImplementedError


class ScaledMethod(GroupMethod):
    """A method that divides by the standard deviation of each group's scores."""

    standard_deviation: Literal["sample", "population", "none"] = "sample"
    """sample: n - 1; population: n; none: only subtract (Dr.GRPO)."""

    epsilon: NonNegativeFloat = 1e-6
    """Added to the standard deviation that advantages are divided by."""

    def scaled(self, values: np.ndarray, groups: ScoredGroups) -> np.ndarray:
        """Divides values by (standard deviation of the group's scores + epsilon), as far as the settings say."""
        if self.standard_deviation == "none":
            return values
        freedom = groups.sizes - (self.standard_deviation == "sample")
        variance = groups.sums(groups.centered() ** 2) / np.maximum(freedom, 1)
        scale = np.sqrt(variance) + self.epsilon
        # A group of equal scores has values and scale of 0; with epsilon = 0 the quotient must be 0 too.
        return values / np.where(scale > 0, scale, 1.0)[groups.group]

    RULES: ClassVar[Rules[ScaledMethod]] = {
        "epsilon_without_deviation": lambda one: one.standard_deviation == "none" and one.given("epsilon"),
        "epsilon_of_zero": lambda one: one.standard_deviation != "none" and one.epsilon == 0,
    }


class GrpoConfig(ScaledMethod):
    """GRPO, arXiv:2402.03300, section 4.1.2: (R - mean) / (standard deviation + epsilon), of the group.

    Without the division it is the advantage of Dr.GRPO, arXiv:2503.20783.
    """

    compares_turns: ClassVar[bool] = True

    name: Literal["grpo"] = "grpo"

    def of_groups(self, groups: ScoredGroups) -> np.ndarray:
        return self.scaled(groups.centered(), groups)


class RlooConfig(GroupMethod):
    """RLOO, arXiv:2402.14740, eq. 8: R - mean of the others, which is n / (n - 1) (R - mean)."""

    compares_turns: ClassVar[bool] = True

    name: Literal["rloo"] = "rloo"

    def of_groups(self, groups: ScoredGroups) -> np.ndarray:
        return groups.centered() * (groups.sizes / np.maximum(groups.sizes - 1, 1))[groups.group]


class OpoConfig(GroupMethod):
    """OPO, arXiv:2505.23585: R - sum(tokens x R) / sum(tokens), the baseline of least variance of the gradient if a
    response's gradient grows with its length.
    """

    compares_turns: ClassVar[bool] = True

    name: Literal["opo"] = "opo"

    def of_groups(self, groups: ScoredGroups) -> np.ndarray:
        baseline = groups.sums(groups.tokens * groups.height) / np.maximum(groups.sums(groups.tokens), 1)
        return np.where(groups.compared, groups.height - baseline[groups.group], 0.0)


class GpgConfig(GroupMethod):
    """GPG, arXiv:2504.02546, section 3.3: alpha (R - mean), alpha = samples / samples of groups whose scores differ.

    alpha makes up for groups without a gradient in the mean over the batch, so these are never left out of it.
    """

    scales_by_signal: ClassVar[bool] = True
    compares_turns: ClassVar[bool] = True

    name: Literal["gpg"] = "gpg"

    def of_groups(self, groups: ScoredGroups) -> np.ndarray:
        centered = groups.centered()
        with_signal = groups.sums(groups.height) > 0
        counted = groups.sizes[with_signal].sum()
        return centered * (groups.sizes.sum() / counted) if counted else centered


class PassKConfig(ScaledMethod):
    """max@k, arXiv:2503.19595: the best sample of a group alone gets (best - second best) / (standard deviation +
    epsilon), and none if two are best.
    """

    name: Literal["pass_k"] = "pass_k"

    def of_groups(self, groups: ScoredGroups) -> np.ndarray:
        return self.scaled(groups.gains(), groups)

    def teaches(self, inputs: AdvantageInputs) -> np.ndarray:
        """Returns bool [rows], samples that are better than all others of their group."""
        return scored_groups(inputs.scores, inputs.group_ids, inputs.tokens).gains() > 0


class ReinforcePlusPlusBaselineConfig(GroupMethod):
    """REINFORCE++-baseline, arXiv:2501.03262: R - mean of the group, then whitened over the step's response tokens.

    Longer responses weigh more in the whitening's mean, so a group of equal scores gets a small advantage, all alike.
    """

    compares_turns: ClassVar[bool] = True

    name: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"

    def of_groups(self, groups: ScoredGroups) -> np.ndarray:
        return groups.whitened_over_tokens(groups.centered())


class GdpoConfig(ScaledMethod):
    """GDPO, arXiv:2601.05242: GRPO's advantage of each reward function apart, their weighted sum, whitened over the
    step. The mean and the variance of the whitening are over response tokens, as in the authors' code.
    """

    name: Literal["gdpo"] = "gdpo"

    def advantages(self, inputs: AdvantageInputs) -> Advantages:
        parts, weights = _parts(inputs)
        if inputs.kl is not None:
            raise ValueError("gdpo knows no KL penalty in the reward")
        groups = scored_groups(inputs.scores, inputs.group_ids, inputs.tokens)
        total = np.zeros(len(parts))
        for weight, scores in zip(weights, parts.T, strict=True):
            of_part = scored_groups(np.where(groups.known, scores, np.nan), inputs.group_ids, groups.tokens)
            total += weight * self.scaled(of_part.centered(), of_part)
        return Advantages(groups.whitened_over_tokens(total))

    def teaches(self, inputs: AdvantageInputs) -> np.ndarray:
        """Returns bool [rows], samples above the lowest of their group in any reward that counts."""
        parts, weights = _parts(inputs)
        teaching = np.zeros(len(inputs.scores), bool)
        for scores in parts[:, weights != 0].T:
            teaching |= super().teaches(replace(inputs, scores=np.where(inputs.known, scores, np.nan)))
        return teaching


class RemaxConfig(AdvantageMethod):
    """ReMax, arXiv:2310.10505, algorithm 1: R - score of the greedy response to the same prompt.

    A sample whose greedy response has no score gets 0.
    """

    by_group: ClassVar[bool] = False

    name: Literal["remax"] = "remax"

    def advantages(self, inputs: AdvantageInputs) -> Advantages:
        ids, group = np.unique(inputs.group_ids, return_inverse=True)
        if inputs.baselines is None or len(inputs.baselines) != len(ids):
            raise ValueError(f"remax needs a baseline for each of the {len(ids)} groups")
        return Advantages(np.nan_to_num(_penalized_scores(inputs) - inputs.baselines[group], nan=0.0))


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


class OwnAdvantageConfig(AdvantageMethod):
    """A function of your own: (inputs: AdvantageInputs, **arguments) -> float [rows]. See docs/algorithms.md."""

    name: Annotated[str, Field(pattern=FILE_AND_FUNCTION)]
    """FILE.py:FUNCTION."""

    arguments: dict[str, Any] = {}
    """Keyword arguments of the function."""

    def function(self) -> UserFunction:
        return UserFunction("algorithm.advantage.name", self.name, self.arguments)

    def advantages(self, inputs: AdvantageInputs) -> Advantages:
        """Calls the function. Raises RecipeError if it does not load, fails, or does not return one number per row."""
        result = np.asarray(self.function()(replace(inputs, scores=_penalized_scores(inputs))))
        rows = len(inputs.scores)
        if result.shape != (rows,) or result.dtype.kind not in "fiu":
            given = f"{self.name} returned {result.dtype} {list(result.shape)}"
            needed = f"a number for each of the {rows} rows: float64 [{rows}]"
            raise RecipeError(Problem("algorithm.advantage.name", given, needed, "return an array like inputs.scores"))
        of_rows = np.where(inputs.known, result.astype(np.float64), 0.0)
        if not np.isfinite(of_rows).all():
            given = f"{self.name} returned a number that is not finite for a sample with a score"
            needed = "finite advantages where inputs.scores is not NaN"
            fix = "look at divisions by a standard deviation of 0"
            raise RecipeError(Problem("algorithm.advantage.name", given, needed, fix))
        return Advantages(of_rows)


AdvantageConfig = Annotated[
    GrpoConfig
    | RlooConfig
    | OpoConfig
    | GpgConfig
    | PassKConfig
    | GdpoConfig
    | ReinforcePlusPlusBaselineConfig
    | ReinforcePlusPlusConfig
    | RemaxConfig
    | GaeConfig
    | OwnAdvantageConfig,
    ByName(default="grpo"),
]


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


def whitened_tokens(inputs: AdvantageInputs, values: Ragged) -> Ragged:
    """Whitens the values of the tokens of all rows that are not masked; 0 in the others."""
    return values.with_values(whitened(values.values, inputs.known[values.row_of_token].astype(np.float64)))


def laid_out(values: Ragged, lengths: np.ndarray, rows: np.ndarray) -> Ragged:
    """Spreads the values of the chosen rows (bool [rows]) to a layout of all rows, 0 in the others. Raises
    ValueError if a chosen row does not have `lengths` tokens (int64 [rows])."""
    if not np.array_equal(values.lengths[rows], lengths[rows]):
        raise ValueError(f"{values.lengths[rows]} values for responses of {lengths[rows]} tokens")
    result = ragged_zeros(lengths)
    result.values[rows[result.row_of_token]] = values.values[rows[values.row_of_token]]
    return result


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


def _penalized_scores(inputs: AdvantageInputs) -> np.ndarray:
    """Returns scores less coefficient x KL summed over the response (arXiv:2203.02155, eq. 2); NaN if masked."""
    if inputs.kl is None:
        return inputs.scores
    return inputs.scores - inputs.kl_coefficient * laid_out(inputs.kl, inputs.tokens, inputs.known).sums()


def _parts(inputs: AdvantageInputs) -> tuple[np.ndarray, np.ndarray]:
    if inputs.parts is None or inputs.weights is None:
        raise ValueError("gdpo needs parts and weights")
    return inputs.parts, inputs.weights

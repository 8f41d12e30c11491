"""From the scores of a step to advantages: the methods, each with its settings. R is a sample's score, n the scored
samples of its group.

To add a method: its class here or in token_advantages.py, and its name in AdvantageConfig.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from megagrpo.algorithm.advantage_method import (
    AdvantageInputs,
    AdvantageMethod,
    Advantages,
    ScoredGroups,
    penalized_scores,
    scored_groups,
)
from megagrpo.algorithm.ragged import ragged_zeros
from megagrpo.algorithm.token_advantages import GaeConfig, OtbConfig, ReinforcePlusPlusConfig
from megagrpo.errors import Problem, RecipeError
from megagrpo.section import FILE_AND_FUNCTION, ByName, NonNegativeFloat, Rules
from megagrpo.user_functions import UserFunction


class GroupMethod(AdvantageMethod):
    """Compares whole responses with the others of their prompt."""

    def advantages(self, inputs: AdvantageInputs) -> Advantages:
        groups = scored_groups(penalized_scores(inputs), inputs.group_ids, inputs.tokens)
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
        return Advantages(np.nan_to_num(penalized_scores(inputs) - inputs.baselines[group], nan=0.0))


class OwnAdvantageConfig(AdvantageMethod):
    """A function of your own: (inputs: AdvantageInputs, **arguments) -> float [rows], or a list with an array for each
    row: its tokens' advantages. See docs/algorithms.md.
    """

    name: Annotated[str, Field(pattern=FILE_AND_FUNCTION)]
    """FILE.py:FUNCTION."""

    arguments: dict[str, Any] = {}
    """Keyword arguments of the function."""

    def function(self) -> UserFunction:
        return UserFunction("algorithm.advantage.name", self.name, self.arguments)

    def advantages(self, inputs: AdvantageInputs) -> Advantages:
        """Calls the function. Raises RecipeError if it does not load, fails, or does not return one finite number for
        each row, or for each token."""
        result = self.function()(replace(inputs, scores=penalized_scores(inputs)))
        rows, known = len(inputs.scores), inputs.known
        if not isinstance(result, list | tuple) or not any(np.ndim(one) for one in result):
            return Advantages(self._numbers(result, known, "", f"the {rows} rows"))
        if len(result) != rows:
            needed = f"one for each of the {rows} rows: its tokens' advantages"
            raise self._refusal(f"{len(result)} arrays", needed, "return one for masked rows too")
        of_tokens = ragged_zeros(inputs.tokens)
        for row in np.flatnonzero(known).tolist():
            group, tokens = inputs.group_ids[row], inputs.tokens[row]
            sample = np.count_nonzero(inputs.group_ids[:row] == group)
            which = f" for row {row}, sample {sample} of group {group}"
            of_tokens.row(row)[:] = self._numbers(result[row], np.ones(tokens, bool), which, f"its {tokens} tokens")
        return Advantages(of_tokens.means(), of_tokens)

    def _numbers(self, returned: object, used: np.ndarray, which: str, counted: str) -> np.ndarray:
        """Returns a number for each of `used` (bool), 0 where that is False. Raises RecipeError."""
        numbers = np.asarray(returned)
        if numbers.shape != used.shape or numbers.dtype.kind not in "fiu":
            needed = f"a number for each of {counted}: float64 [{len(used)}]"
            fix = "return an array like inputs.scores, or a list of arrays, one for each row"
            raise self._refusal(f"{numbers.dtype} {list(numbers.shape)}{which}", needed, fix)
        numbers = np.where(used, numbers.astype(np.float64), 0.0)
        if not np.isfinite(numbers).all():
            given = f"a number that is not finite{which or ' for a sample with a score'}"
            needed, fix = (
                "finite advantages where inputs.scores is not NaN",
                "look at divisions by a standard deviation of 0",
            )
            raise self._refusal(given, needed, fix)
        return numbers

    def _refusal(self, returned: str, needed: str, fix: str) -> RecipeError:
        return RecipeError(Problem("algorithm.advantage.name", f"{self.name} returned {returned}", needed, fix))


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
    | OtbConfig
    | OwnAdvantageConfig,
    ByName(default="grpo"),
]


def _parts(inputs: AdvantageInputs) -> tuple[np.ndarray, np.ndarray]:
    if inputs.parts is None or inputs.weights is None:
        raise ValueError("gdpo needs parts and weights")
    return inputs.parts, inputs.weights

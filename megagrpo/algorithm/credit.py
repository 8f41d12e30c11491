"""Assigns the rewards of an agent's rollout to its turns.

A turn's reward is what the agent or its environment gave for it, 0 if nothing; the rollout's score is added to that of
its last turn. A method that compares whole responses then compares turns as it would compare responses, among those
that are chosen here.

To add a way: its class here, and its name in CreditConfig.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np

from megagrpo.algorithm.advantage_method import AdvantageInputs, AdvantageMethod, Advantages
from megagrpo.algorithm.ragged import Ragged, ragged_zeros
from megagrpo.algorithm.token_advantages import discounted_sums
from megagrpo.section import ByName, Fraction, Section


@dataclass(frozen=True)
class Turns:
    """The turns of a step's rollouts, row after row, those of a row in the order of its tokens. Arrays are [turns]."""

    rows: np.ndarray  # int64, rising
    order: np.ndarray  # int64, place in time among the turns of the row, from 0
    tokens: np.ndarray  # int64, sampled in this turn
    rewards: np.ndarray  # float64, without the rollout's score; 0 where none was given

    def by_row(self, values: np.ndarray) -> tuple[Ragged, np.ndarray]:
        """Orders values [turns] by row and by time. Returns them, and their indices in `values`, int64 [turns]."""
        at = np.lexsort((self.order, self.rows))
        counts = np.bincount(self.rows, minlength=int(self.rows.max(initial=-1)) + 1)
        return ragged_zeros(counts).with_values(values[at].astype(np.float64)), at


class CreditMethod(Section):
    """One way to credit turns."""

    name: str

    by_turn: ClassVar[bool] = True
    """True if the turns of a rollout may have different advantages."""

    def advantages(self, method: AdvantageMethod, inputs: AdvantageInputs, turns: Turns | None) -> Advantages:
        """Spreads each turn's advantage over its tokens. Raises ValueError if turns are missing or do not fit."""
        fitting = _fitting(inputs, turns)
        of_tokens = ragged_zeros(inputs.tokens).with_values(
            np.repeat(self.of_turns(method, inputs, fitting), fitting.tokens)
        )
        return Advantages(of_tokens.means(), of_tokens)

    def teaches(self, method: AdvantageMethod, inputs: AdvantageInputs, turns: Turns | None) -> np.ndarray:
        """Returns bool [rows]: rows with a turn that teaches something by AdvantageMethod.teaches."""
        fitting = _fitting(inputs, turns)
        teaching = method.teaches(self.compared(inputs, fitting))
        return np.bincount(fitting.rows[teaching], minlength=len(inputs.scores)) > 0

    def compared(self, inputs: AdvantageInputs, turns: Turns) -> AdvantageInputs:
        """Returns the inputs that the method compares: turns in place of rows."""
        raise NotImplementedError

    def of_turns(self, method: AdvantageMethod, inputs: AdvantageInputs, turns: Turns) -> np.ndarray:
        """Returns advantages by turn, float64 [turns]."""
        return method.advantages(self.compared(inputs, turns)).of_rows


class OutcomeConfig(CreditMethod):
    """All tokens of a rollout have its advantage, made from its score alone. Rewards of turns are not read."""

    by_turn: ClassVar[bool] = False

    name: Literal["outcome"] = "outcome"

    def advantages(self, method: AdvantageMethod, inputs: AdvantageInputs, turns: Turns | None) -> Advantages:
        return method.advantages(inputs)

    def teaches(self, method: AdvantageMethod, inputs: AdvantageInputs, turns: Turns | None) -> np.ndarray:
        return method.teaches(inputs)


class DiscountedConfig(CreditMethod):
    """Every turn has the discounted rewards from it on, compared with those of all turns of its prompt's rollouts.

    return[k] = reward[k] + discount x return[k + 1], in the order of time; with grpo the advantage is
    (return - mean) / (standard deviation + epsilon), both over all turns of the group. `normalized: rewards` is
    DeepSeekMath's process supervision, arXiv:2402.03300, section 4.1.3, with a discount: rewards are compared first,
    and the discounted sum of what that gives is the advantage. There every further turn adds to the sum, below the mean
    or above it.
    """

    name: Literal["discounted"] = "discounted"

    discount: Fraction = 1.0
    """Weight of a reward one turn later (gamma)."""

    normalized: Literal["returns", "rewards"] = "returns"
    """The value compared with that of the other turns of the group."""

    def compared(self, inputs: AdvantageInputs, turns: Turns) -> AdvantageInputs:
        rewards = turn_rewards(inputs, turns)
        values = rewards if self.normalized == "rewards" else discounted_returns(rewards, turns, self.discount)
        return AdvantageInputs(values, inputs.group_ids[turns.rows], turns.tokens)

    def of_turns(self, method: AdvantageMethod, inputs: AdvantageInputs, turns: Turns) -> np.ndarray:
        advantages = super().of_turns(method, inputs, turns)
        return advantages if self.normalized == "returns" else discounted_returns(advantages, turns, self.discount)


class TurnGroupsConfig(CreditMethod):
    """Every turn has the discounted rewards from it on, compared with those of the same turn of the group's rollouts.

    return[k] as in `discounted`; mean and standard deviation are over the rollouts of the prompt that have a k-th turn.
    A turn that only one of them has gets 0. MT-GRPO, arXiv:2505.11821, has such baselines; it normalises the rewards of
    turn and outcome apart, and adds advantages where this adds rewards.
    """

    name: Literal["turn_groups"] = "turn_groups"

    discount: Fraction = 1.0
    """Weight of a reward one turn later (gamma)."""

    def compared(self, inputs: AdvantageInputs, turns: Turns) -> AdvantageInputs:
        _, group = np.unique(inputs.group_ids, return_inverse=True)
        ids = group[turns.rows] * (int(turns.order.max(initial=0)) + 1) + turns.order
        returns = discounted_returns(turn_rewards(inputs, turns), turns, self.discount)
        return AdvantageInputs(returns, ids, turns.tokens)


CreditConfig = Annotated[OutcomeConfig | DiscountedConfig | TurnGroupsConfig, ByName(default="outcome")]


def turn_rewards(inputs: AdvantageInputs, turns: Turns) -> np.ndarray:
    """Returns all turns' rewards, the rollout's score added to its last turn's: float64 [turns], NaN if masked."""
    rewards = np.where(inputs.known[turns.rows], turns.rewards, np.nan)
    by_row, at = turns.by_row(rewards)
    last = at[by_row.offsets[1:][by_row.lengths > 0] - 1]
    rewards[last] += inputs.scores[turns.rows[last]]
    return rewards


def discounted_returns(rewards: np.ndarray, turns: Turns, discount: float) -> np.ndarray:
    """Computes return[k] = reward[k] + discount x return[k + 1] in the order of time, float64 [turns] -> [turns]."""
    by_row, at = turns.by_row(rewards)
    returns = np.empty(len(rewards))
    returns[at] = discounted_sums(by_row, discount).values
    return returns


def _fitting(inputs: AdvantageInputs, turns: Turns | None) -> Turns:
    if turns is None:
        raise ValueError("credit by turn needs turns")
    if not np.array_equal(np.bincount(turns.rows, turns.tokens, minlength=len(inputs.tokens)), inputs.tokens):
        raise ValueError("turns do not have the tokens of their rollouts")
    return turns

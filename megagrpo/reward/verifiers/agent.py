"""The reward that an agent, or its environment, gave for its rollout, with its metrics."""

from __future__ import annotations

from collections.abc import Mapping

from megagrpo.errors import brief
from megagrpo.reward.functions import Outcome, RewardCallable, outcome_of


def make(reward_at_limit: float | None = 0.0) -> RewardCallable:
    """Makes a reward function: the agent's reward. reward_at_limit: the score of a rollout that a limit ended before
    its agent gave one; None leaves it out. Raises ValueError if it is neither None nor a finite number. The function
    raises it if the agent ended by itself without a reward.

    >>> make()({"score": 1.0, "moves": 4.0}, "stop"), make()(None, "length")
    ({'score': 1.0, 'moves': 4.0}, 0.0)
    """
    if reward_at_limit is not None and outcome_of({"score": reward_at_limit}).error:
        raise ValueError(f"reward_at_limit {brief(reward_at_limit)}, not a finite number or null")

    def agent(agent_reward: Mapping[str, float] | None, finish: str) -> Mapping[str, float] | float | Outcome:
        if agent_reward is not None:
            return agent_reward
        if finish != "length":
            raise ValueError("the agent gave no reward")
        if reward_at_limit is None:
            return Outcome(None, masked="the rollout ended before its agent gave a reward")
        return reward_at_limit  # as if it had failed: else not to end would be better than to fail

    return agent

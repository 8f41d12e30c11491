"""From the scores of a step to the advantages of its samples, by the method that the recipe names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megagrpo.algorithm.group_advantage import (
    ScoredGroups,
    gdpo,
    gpg,
    grpo,
    opo,
    pass_k,
    reinforce_plus_plus_baseline,
    remax,
    rloo,
    scored_groups,
)
from megagrpo.algorithm.ragged import Ragged
from megagrpo.algorithm.token_advantage import generalized_advantages, laid_out, reinforce_plus_plus, token_rewards
from megagrpo.recipe import schema


@dataclass(frozen=True)
class AdvantageInputs:
    """A step's samples in one order of rows. A masked sample has the score NaN and whatever else.

    Per-token numbers may be missing (no tokens) or present in rows that are masked; elsewhere there are `tokens`.
    """

    scores: np.ndarray  # float64 [rows]
    group_ids: np.ndarray  # int64 [rows], in any order, groups of any size
    tokens: np.ndarray  # int64 [rows], response tokens
    parts: np.ndarray | None = None  # float64 [rows, rewards], for gdpo: see Score.counted
    weights: np.ndarray | None = None  # float64 [rewards], for gdpo
    # float64 [groups], by sorted id, for remax: greedy scores, NaN where one failed
    baselines: np.ndarray | None = None
    kl: Ragged | None = None  # KL of every response token in nats, where the penalty is in the reward
    kl_coefficient: float = 0.0
    values: Ragged | None = None  # for gae: the critic's estimate before each response token is sampled


@dataclass(frozen=True)
class Advantages:
    """Masked rows have zeros everywhere, and are not to be trained on."""

    of_rows: np.ndarray  # float64 [rows]; where tokens have their own, the mean over the row's
    of_tokens: Ragged | None = None  # float64, where the tokens of a response differ
    returns: Ragged | None = None  # float64, what a critic learns


Method = Callable[[AdvantageInputs, schema.AdvantageConfig], Advantages]


def compute_advantages(inputs: AdvantageInputs, settings: schema.AdvantageConfig) -> Advantages:
    """Advantages by `settings.name`. With a KL penalty, methods that compare whole responses subtract its sum over the
    response from the score; those that work by token subtract it at every token.

    Raises ValueError if the inputs lack what the method needs, or do not fit together.
    """
    rows = len(inputs.scores)
    if len(inputs.group_ids) != rows or len(inputs.tokens) != rows:
        raise ValueError(f"{rows} scores, {len(inputs.group_ids)} group ids and {len(inputs.tokens)} token counts")
    return METHODS[settings.name](inputs, settings)


def is_by_group(name: str) -> bool:
    """Whether a sample is compared with others of its prompt, so that one alone, or equal ones, teach nothing."""
    return name in BY_GROUP


def groups_with_signal(advantages: np.ndarray, group_ids: np.ndarray) -> np.ndarray:
    """Ids, sorted, of the groups in which any advantage differs from 0: only these have a policy gradient."""
    return np.unique(group_ids[advantages != 0])


def groups_that_teach(inputs: AdvantageInputs, settings: schema.AdvantageConfig) -> np.ndarray:
    """Ids, sorted, of the groups that teach something: those whose scored samples are not all equal; for gdpo not in
    every reward that counts; for pass_k those with one sample better than all others. What whitening gives to groups of
    equal scores, all alike, teaches nothing.
    """
    scores = inputs.scores[:, None]
    if settings.name == "gdpo":
        if inputs.parts is None or inputs.weights is None:
            raise ValueError("gdpo needs parts and weights")
        scores = np.where(np.isnan(scores), np.nan, inputs.parts[:, inputs.weights != 0])
    teaches = np.zeros(len(inputs.scores), bool)
    for reward in scores.T:
        groups = scored_groups(reward, inputs.group_ids, inputs.tokens)
        teaches |= (pass_k(groups, PLAIN) if settings.name == "pass_k" else groups.height) > 0
    return np.unique(inputs.group_ids[teaches])


def _method(estimate: Callable[[ScoredGroups, schema.AdvantageConfig], np.ndarray]) -> Method:
    def method(inputs: AdvantageInputs, settings: schema.AdvantageConfig) -> Advantages:
        groups = scored_groups(_penalized_scores(inputs), inputs.group_ids, inputs.tokens)
        return Advantages(estimate(groups, settings))

    return method


def _gdpo(inputs: AdvantageInputs, settings: schema.AdvantageConfig) -> Advantages:
    if inputs.parts is None or inputs.weights is None or inputs.kl is not None:
        raise ValueError("gdpo needs parts and weights, and knows no KL penalty in the reward")
    groups = scored_groups(inputs.scores, inputs.group_ids, inputs.tokens)
    return Advantages(gdpo(groups, inputs.parts, inputs.weights, inputs.group_ids, settings))


def _remax(inputs: AdvantageInputs, settings: schema.AdvantageConfig) -> Advantages:
    ids, group = np.unique(inputs.group_ids, return_inverse=True)
    if inputs.baselines is None or len(inputs.baselines) != len(ids):
        raise ValueError(f"remax needs a baseline for each of the {len(ids)} groups")
    return Advantages(remax(_penalized_scores(inputs), inputs.baselines[group]))


def _reinforce_plus_plus(inputs: AdvantageInputs, settings: schema.AdvantageConfig) -> Advantages:
    rewards = token_rewards(inputs.scores, inputs.tokens, inputs.kl, inputs.kl_coefficient)
    of_tokens = reinforce_plus_plus(rewards, ~np.isnan(inputs.scores), settings.discount)
    return Advantages(_means(of_tokens), of_tokens)


def _gae(inputs: AdvantageInputs, settings: schema.AdvantageConfig) -> Advantages:
    if inputs.values is None:
        raise ValueError("gae needs the critic's values")
    rewards = token_rewards(inputs.scores, inputs.tokens, inputs.kl, inputs.kl_coefficient)
    known = ~np.isnan(inputs.scores)
    of_tokens, returns = generalized_advantages(rewards, inputs.values, known, settings.discount, settings.trace)
    return Advantages(_means(of_tokens), of_tokens, returns)


def _penalized_scores(inputs: AdvantageInputs) -> np.ndarray:
    """Scores less coefficient x KL summed over the response (arXiv:2203.02155, eq. 2). Masked samples stay NaN."""
    if inputs.kl is None:
        return inputs.scores
    kl = laid_out(inputs.kl, inputs.tokens, ~np.isnan(inputs.scores))
    return inputs.scores - inputs.kl_coefficient * kl.sums()


def _means(values: Ragged) -> np.ndarray:
    return values.sums() / np.maximum(values.lengths, 1)


PLAIN = schema.AdvantageConfig(standard_deviation="none")

BY_GROUP: dict[str, Method] = {
    "grpo": _method(grpo),
    "rloo": _method(rloo),
    "opo": _method(opo),
    "gpg": _method(gpg),
    "pass_k": _method(pass_k),
    "reinforce_plus_plus_baseline": _method(reinforce_plus_plus_baseline),
    "gdpo": _gdpo,
}

METHODS: dict[str, Method] = BY_GROUP | {
    "remax": _remax,
    "reinforce_plus_plus": _reinforce_plus_plus,
    "gae": _gae,
}

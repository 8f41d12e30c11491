"""From scored groups to what is trained on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megagrpo.algorithm.advantage import AdvantageInputs
from megagrpo.batching.rank_batches import TrainSequence
from megagrpo.errors import EngineError, Problem
from megagrpo.recipe.schema import Recipe
from megagrpo.types import Group, Prompt, Sample


def flat_scores(groups: Sequence[Group]) -> np.ndarray:
    """Scores of all samples, group by group: float64 [rows], NaN where a sample is masked."""
    return np.array(
        [np.nan if score.value is None else score.value for group in groups for score in group.scores], dtype=np.float64
    )


def counted_scores(groups: Sequence[Group], functions: int) -> np.ndarray:
    """What each reward function counted: float64 [rows, functions], NaN where a sample has no score of them."""
    unknown = (np.nan,) * functions
    rows = [score.counted or unknown for group in groups for score in group.scores]
    return np.array(rows, dtype=np.float64).reshape(len(rows), functions)


def group_of_row(groups: Sequence[Group]) -> np.ndarray:
    """Index of each row's group: int64 [rows]."""
    return np.repeat(np.arange(len(groups)), [len(group.samples) for group in groups])


def response_lengths(groups: Sequence[Group]) -> np.ndarray:
    """Tokens of each row's response: int64 [rows]."""
    return np.array([len(sample.tokens) for group in groups for sample in group.samples], dtype=np.int64)


def advantage_inputs(recipe: Recipe, groups: Sequence[Group], baselines: np.ndarray | None = None) -> AdvantageInputs:
    """What advantages are made from, as far as the driver knows it. baselines: float64 [groups], for remax."""
    functions = recipe.reward.functions
    by_function = recipe.algorithm.advantage.name == "gdpo"
    return AdvantageInputs(
        scores=flat_scores(groups),
        group_ids=group_of_row(groups),
        tokens=response_lengths(groups),
        parts=counted_scores(groups, len(functions)) if by_function else None,
        weights=np.array([function.weight for function in functions]) if by_function else None,
        baselines=baselines,
    )


def trainable_rows(inputs: AdvantageInputs) -> np.ndarray:
    """Samples that have a score, a token and, for remax, a baseline: bool [rows]."""
    rows = ~np.isnan(inputs.scores) & (inputs.tokens > 0)
    return rows if inputs.baselines is None else rows & ~np.isnan(inputs.baselines[inputs.group_ids])


def train_sequences(groups: Sequence[Group], rows: np.ndarray) -> list[TrainSequence]:
    """The chosen rows (bool [rows]) as sequences; each has a response token."""
    samples = [(group.prompt, sample) for group in groups for sample in group.samples]
    return [_sequence(prompt, sample, row) for row, (prompt, sample) in enumerate(samples) if rows[row]]


def require_version(groups: Sequence[Group], version: int) -> None:
    """Raises EngineError unless every token was sampled by the weights of `version`."""
    for group in groups:
        for sample in group.samples:
            if (sample.versions != version).any():
                raise EngineError(
                    Problem(
                        where=f"sample {sample.index} of prompt {sample.prompt_id}",
                        given=f"tokens sampled by weight versions {sorted(set(sample.versions.tolist()))}",
                        needed=f"version {version}, the policy's",
                    )
                )


def _sequence(prompt: Prompt, sample: Sample, row: int) -> TrainSequence:
    start = len(prompt.tokens)
    length = start + len(sample.tokens)
    tokens = np.empty(length, np.int64)
    tokens[:start] = prompt.tokens
    tokens[start:] = sample.tokens
    loss_mask = np.zeros(length, bool)
    loss_mask[start:] = True
    rollout_logprobs = np.zeros(length, np.float32)
    rollout_logprobs[start:] = sample.logprobs
    return TrainSequence(tokens, loss_mask, rollout_logprobs, row)

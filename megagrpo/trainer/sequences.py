"""From scored groups to what is trained on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megagrpo.batching.microbatch import TrainSequence
from megagrpo.errors import EngineError, Problem
from megagrpo.types import Group, Prompt, Sample


def flat_scores(groups: Sequence[Group]) -> np.ndarray:
    """Scores of all samples, group by group: float64 [rows], NaN where a reward failed."""
    return np.array(
        [np.nan if score.value is None else score.value for group in groups for score in group.scores], dtype=np.float64
    )


def group_of_row(groups: Sequence[Group]) -> np.ndarray:
    """Index of each row's group: int64 [rows]."""
    return np.repeat(np.arange(len(groups)), [len(group.samples) for group in groups])


def response_lengths(groups: Sequence[Group]) -> np.ndarray:
    """Tokens of each row's response: int64 [rows]."""
    return np.array([len(sample.tokens) for group in groups for sample in group.samples], dtype=np.int64)


def train_sequences(groups: Sequence[Group], rows: np.ndarray) -> list[TrainSequence]:
    """The chosen rows (bool [rows]) as sequences. Aborted samples without a token are left out."""
    samples = [(index, group.prompt, sample) for index, group in enumerate(groups) for sample in group.samples]
    return [
        _sequence(prompt, sample, group, row)
        for row, (group, prompt, sample) in enumerate(samples)
        if rows[row] and len(sample.tokens)
    ]


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


def _sequence(prompt: Prompt, sample: Sample, group: int, row: int) -> TrainSequence:
    start = len(prompt.tokens)
    length = start + len(sample.tokens)
    tokens = np.empty(length, np.int64)
    tokens[:start] = prompt.tokens
    tokens[start:] = sample.tokens
    loss_mask = np.zeros(length, bool)
    loss_mask[start:] = True
    rollout_logprobs = np.zeros(length, np.float32)
    rollout_logprobs[start:] = sample.logprobs
    return TrainSequence(tokens, loss_mask, rollout_logprobs, group, row)

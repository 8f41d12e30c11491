"""What a training rank computes on: packed sequences without padding between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class TrainSequence:
    """One prompt with one response, as it will be trained on.

    `loss_mask[t]` says whether token t is one that the policy chose (prompt and tool tokens are not).
    `rollout_logprobs[t]` is the engine's logprob of token t, 0 where loss_mask is False.
    """

    tokens: np.ndarray  # int64 [tokens]
    loss_mask: np.ndarray  # bool [tokens]
    rollout_logprobs: np.ndarray  # float32 [tokens]
    row: int  # index of the sample in the step; advantages and per-sequence results use it


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Sequences for one forward pass of one data rank: `rows[i]` indexes the step's sequences."""

    sequences: tuple[TrainSequence, ...]

    @property
    def rows(self) -> tuple[int, ...]:
        return tuple(s.row for s in self.sequences)

    @property
    def tokens(self) -> int:
        return sum(len(s.tokens) for s in self.sequences)


@dataclass(frozen=True, slots=True)
class RankBatch:
    """A step's work for one data rank: minibatches[m] is a sequence of microbatches.

    Every data rank has the same number of microbatches in minibatch m. `tokens[m]` and `sequences[m]` count response
    tokens (True in loss_mask) and sequences with any of them in minibatch m over *all* data ranks: the loss's
    denominators. `work[m]` estimates what this rank computes for minibatch m, in the units of batching/work.py.
    """

    minibatches: tuple[tuple[Microbatch, ...], ...]
    tokens: tuple[int, ...]
    sequences: tuple[int, ...]
    work: tuple[float, ...]


def count_response_tokens(sequences: Sequence[TrainSequence]) -> int:
    return sum(int(s.loss_mask.sum()) for s in sequences)

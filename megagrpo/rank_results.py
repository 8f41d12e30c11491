"""The results that training ranks send the driver. It reads them without megagrpo.megatron: that is slow to import."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from megagrpo.algorithm.mismatch import Mismatch


@dataclass(frozen=True)
class StepMetrics:
    """The metrics of one update over all ranks, minibatches and epochs. Means are over response tokens, or as noted."""

    loss: float  # the minimised sum, mean over optimizer steps
    policy_loss: float  # its policy term, importance weights included
    kl: float | None  # estimate against the reference; None without one, or without a sampled token
    entropy: float | None  # None: not computed, or no token was sampled
    clip_low_fraction: float  # tokens whose gradient the lower bound cut
    clip_high_fraction: float  # tokens whose gradient the upper bound cut
    ratio_mean: float | None  # ratio of the policy's probability to the old one; None: no token was sampled
    mismatch: Mismatch  # between the trainer's logprobs before the update and the engines'
    correction: dict[str, float] | None  # of correction_of; None: the recipe has none
    grad_norm: float  # before clipping, mean over the optimizer steps that were taken; NaN if none was
    skipped_steps: int  # optimizer steps that were not taken: the loss or a gradient was not finite
    route_differences: tuple[float, ...] | None = None  # by layer with experts, tokens that its router sends elsewhere
    own_routes: Mismatch | None = None  # as `mismatch`, if the trainer's routers had chosen; None: not computed


@dataclass(frozen=True)
class TokenNumbers:
    """A number for each of one rank's response tokens, in any order, on its way to the driver."""

    rows: np.ndarray  # int64 [tokens], row of the sample in the step
    index: np.ndarray  # int64 [tokens], index of the token in its response
    values: np.ndarray  # float32 [tokens]


@dataclass(frozen=True)
class CriticMetrics:
    """The metrics of a critic's update over all ranks, minibatches and epochs. Means are over response tokens."""

    loss: float  # what was minimised
    clip_fraction: float  # tokens without gradient: their value has moved far enough
    value_mean: float  # by the critic before the update
    return_mean: float
    explained_variance: float  # share of the returns' variance that these values explain
    grad_norm: float  # as in StepMetrics
    skipped_steps: int


@dataclass(frozen=True)
class TokenLoss:
    """The cross-entropy of the assistant's tokens, over all ranks and microbatches."""

    total: float  # nats
    tokens: int

    def __add__(self, other: TokenLoss) -> TokenLoss:
        return TokenLoss(self.total + other.total, self.tokens + other.tokens)

    @property
    def mean(self) -> float:
        return self.total / max(self.tokens, 1)

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.mean, 700.0))  # beyond it there is no float


@dataclass(frozen=True)
class SftUpdate:
    """One step of supervised fine-tuning."""

    loss: TokenLoss  # before the step
    grad_norm: float  # before clipping; not finite if the step was not taken

"""The data that travels between modules. Axes: [g] groups, [s] samples of a group, [t] tokens of a response."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

FinishReason = Literal["stop", "length", "abort"]
"""Why a response ended: a stop token was sampled, the token limit was reached, or the engine gave it up, at a time
limit or because it was asked to."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, rendered by the chat template. `id` is the same in every epoch and after a restart."""

    id: str
    tokens: tuple[int, ...]
    data_source: str
    ground_truth: str
    ability: str = ""
    extra_info: Mapping[str, Any] = field(default_factory=dict)

    def content(self) -> bytes:
        """Answer and tokens, which must be the same when a run continues."""
        return f"{self.ground_truth}\0{len(self.tokens)}\0".encode() + array("q", self.tokens).tobytes()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. `temperature=0` is greedy; `top_p=1` and `top_k=0` use the whole (unpadded) vocabulary."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Sample:
    """One response as the engine made it: the token ids that are trained on, never re-tokenised text.

    A sampled stop token is part of `tokens` (the policy must learn to stop).
    """

    prompt_id: str
    index: int
    tokens: np.ndarray  # int32 [t]
    logprobs: np.ndarray  # float32 [t], log-probability of each token in the engine's distribution at this temperature
    versions: np.ndarray  # int32 [t], the weight version that sampled each token
    finish: FinishReason
    text: str


@dataclass(frozen=True, slots=True)
class Request:
    """One sample to generate. `seed` is a hash of recipe seed, step, prompt id and index (rollout/requests.py).

    `begun` is what an engine has sampled of it already: the response goes on after its tokens, up to
    `sampling.max_tokens` in all.
    """

    prompt_id: str
    index: int
    tokens: tuple[int, ...]
    seed: int
    sampling: SamplingParams
    begun: Sample | None = None

    @property
    def read(self) -> tuple[int, ...]:
        """All tokens after which the engine samples: of the prompt, and of what has begun."""
        return self.tokens if self.begun is None else (*self.tokens, *map(int, self.begun.tokens))

    @property
    def tokens_left(self) -> int:
        """Most tokens that are still to be sampled."""
        return self.sampling.max_tokens - (0 if self.begun is None else len(self.begun.tokens))


@dataclass(frozen=True, slots=True)
class Score:
    """The rewards of one sample.

    `value` is None if the sample is masked: because a reward raised or timed out (`error` says how; never a score of
    0), or because the recipe leaves the sample out (`masked` says why).
    """

    value: float | None
    parts: Mapping[str, float] = field(default_factory=dict)
    error: str = ""
    masked: str = ""
    counted: tuple[float, ...] = ()  # raw score of each function in order, 0 if its gate was shut; empty if masked
    solved: bool = False  # the functions' weighted sum, before penalties and masks, reached reward.solved_at


@dataclass(frozen=True, slots=True)
class Group:
    """All samples of one prompt in one step, with their scores once they are known."""

    prompt: Prompt
    samples: tuple[Sample, ...]
    scores: tuple[Score, ...] = ()

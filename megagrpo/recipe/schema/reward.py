"""reward: how responses are scored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from megagrpo.errors import Problem
from megagrpo.section import Number, PositiveFloat, Seconds, Section, Tokens


class RewardFunctionConfig(Section):
    """One reward, its weight, and its own arguments."""

    function: str
    """gsm8k, math, format, or FILE.py:FUNCTION, called with data_source, response, ground_truth and extra_info."""

    weight: Number = 1.0
    """The sample's reward is the weighted sum over all functions."""

    counts: Literal["auto", "always", "when_others_score"] = "auto"
    """always: added whatever the others give. when_others_score: only if the functions that always count give a sum
    other than 0, so that a well-formed wrong answer earns nothing. (If a wrong answer costs something, such as -1, the
    function then counts too.) auto: when_others_score for `format` beside others that always count, else always."""

    arguments: dict[str, Any] = {}
    """Keyword arguments of the function, such as method: flexible for gsm8k or pattern for format."""


class OverlongConfig(Section):
    """Penalty that grows over the last tokens before the limit (DAPO, arXiv:2503.14476, eq. 13)."""

    buffer_tokens: Tokens
    """The penalty begins this many tokens before rollout.response_tokens_max."""

    penalty: PositiveFloat = 1.0
    """Subtracted at the limit; between, in proportion to the tokens used of the buffer."""


class RewardConfig(Section):
    """How responses are scored."""

    functions: Annotated[list[RewardFunctionConfig], Field(min_length=1)]
    """One or several functions."""

    workers: Annotated[int, Field(ge=0, le=4096)] = 2
    """Processes that run rewards needing isolation (math, your own functions)."""

    timeout_seconds: Seconds = 10.0
    """Longest time for one response. Past it the sample is masked and counted, never scored 0."""

    memory_gib: Annotated[PositiveFloat, Field(le=2**20)] = 8.0
    """Memory of each of these processes, in GiB. A function that wants more gets a MemoryError."""

    environment: list[str] = []
    """Names of environment variables that the functions see beside harmless ones such as PATH, for example a token."""

    failed_share_max: Annotated[float, Field(ge=0, le=1)] = 0.5
    """The run ends if a larger share of a step's responses has no score because a function failed."""

    solved_at: Number | None = None
    """A response is solved if its functions' weighted sum, before penalties, is at least this. null: full marks of
    every function, the sum of all weights above 0. Give it where a function's full mark is not 1."""

    overlong: OverlongConfig | None = None
    """Penalty for responses near the token limit. Off unless given."""

    non_stop_score: Number | None = None
    """Score of a response that reached the token limit instead of a stop token, whatever its functions say. null: as
    they say."""

    truncated: Literal["score", "mask"] = "score"
    """Responses that reached the token limit. mask: they are neither trained on nor in their group's statistics."""

    def rules(self) -> Iterator[Problem]:
        if all(function.weight == 0 for function in self.functions):
            yield Problem("functions", "only weights of 0", "a reward that differs between samples", "weight: 1.0")
        if all(function.counts == "when_others_score" for function in self.functions):
            needed = "one that always counts, whose score the others wait for"
            yield Problem("functions", "only functions with counts: when_others_score", needed, "counts: always")
        if self.non_stop_score is not None and self.truncated == "mask":
            given = f"{self.non_stop_score}, with truncated: mask"
            needed = "nothing: masked responses have no score"
            yield Problem("non_stop_score", given, needed, "remove it, or write truncated: score")

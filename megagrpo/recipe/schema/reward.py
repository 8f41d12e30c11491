"""reward: how responses are scored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from megagrpo.errors import Problem
from megagrpo.section import NonNegativeInt, PositiveFloat, PositiveInt, Section


class RewardFunctionConfig(Section):
    """One reward, its weight, and its own arguments."""

    function: str
    """gsm8k, math, format, or FILE.py:FUNCTION, called with data_source, response, ground_truth and extra_info."""

    weight: float = 1.0
    """The sample's reward is the weighted sum over all functions."""

    counts: Literal["auto", "always", "when_others_score"] = "auto"
    """always: added whatever the others give. when_others_score: only if the functions that always count give a sum
    other than 0, so that a well-formed wrong answer earns nothing. (If a wrong answer costs something, such as -1, the
    function then counts too.) auto: when_others_score for `format` beside others that always count, else always."""

    arguments: dict[str, Any] = {}
    """Keyword arguments of the function, such as method: flexible for gsm8k or pattern for format."""


class OverlongConfig(Section):
    """Penalty that grows over the last tokens before the limit (DAPO, arXiv:2503.14476, eq. 13)."""

    buffer_tokens: PositiveInt
    """The penalty begins this many tokens before rollout.response_tokens_max."""

    penalty: PositiveFloat = 1.0
    """Subtracted at the limit; between, in proportion to the tokens used of the buffer."""


class RewardConfig(Section):
    """How responses are scored."""

    functions: Annotated[list[RewardFunctionConfig], Field(min_length=1)]
    """One or several functions."""

    workers: NonNegativeInt = 2
    """Processes that run rewards needing isolation (math, your own functions)."""

    timeout_seconds: PositiveFloat = 10.0
    """Longest time for one response. Past it the sample is masked and counted, never scored 0."""

    solved_at: float = 1.0
    """A response is solved if its functions' weighted sum, before penalties, is at least this."""

    overlong: OverlongConfig | None = None
    """Penalty for responses near the token limit. Off unless given."""

    non_stop_score: float | None = None
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

"""The events of a rollout: the shapes of `AgentRun.events`, and the reasons why its branches began."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NotRequired, TypedDict, cast

from megagrpo.track.traces import LEFT_OUT
from megagrpo.types import AgentRun

EVENT_LEVELS_MAX = 32
"""Most levels of lists and objects in an event that an agent reports."""

BranchReason = Literal["history", "tools", "fork", "reasoning", "tools_move", "role", "close", "stop_token", "audit"]
"""Reason for which a turn begins a branch; report/text.py (BRANCHES) has the words for each."""


class TurnEvent(TypedDict):
    """An answer of the policy, written by the gateway. `given` and `said` are the messages themselves, not copies."""

    kind: Literal["turn"]
    at: float  # seconds since the rollout was opened, when the request came
    seconds: float  # until its answer was there
    number: int  # as Turn.number
    parent: int | None  # number of the turn that it continues or shares tokens with; None: it begins with its messages
    branch: BranchReason | Literal[""]  # "": the rollout's first turn, or one that extends its parent
    given: list[Mapping[str, Any]]  # messages behind the parent's answer; all messages if it has none
    said: Mapping[str, Any]  # the answer as the agent got it: content, reasoning_content, tool_calls
    finish: str  # of its tokens, as FinishReason
    prompt_tokens: int
    given_tokens: int  # of prompt_tokens, those that no engine had seen in this conversation
    tokens: int  # sampled
    unreadable: NotRequired[bool]  # a tool call in it cannot be read


class ToolEvent(TypedDict):
    """A call of a tool, reported by the agent: `endpoint.event("tool", name=…, seconds=…, error=…)`."""

    kind: Literal["tool"]
    at: float  # seconds from the rollout's opening to the report, by the host's or the agent process's clock
    name: str
    seconds: float
    error: NotRequired[str]  # why it failed; "" or missing: it did not
    arguments: NotRequired[Any]
    result: NotRequired[str]


def reported(values: Mapping[str, Any], at: float) -> dict[str, Any]:
    """Returns an event that an agent reports. Any program may report anything: an event of a reserved kind, or a tool's
    call without a name or a time, gets a kind that nothing else has. Levels below EVENT_LEVELS_MAX are left out."""
    kind, seconds = str(values.get("kind")), values.get("seconds")
    timed = isinstance(seconds, int | float) and 0 <= seconds < math.inf
    taken = kind in ("turn", LEFT_OUT) or (kind == "tool" and not (timed and isinstance(values.get("name"), str)))
    return {**_shallow(values, EVENT_LEVELS_MAX), "kind": f"told_{kind}" if taken else kind, "at": at}


def _shallow(value: Any, levels: int) -> Any:
    """Returns a value that checkpoints, traces and reports can write: they recurse into it, and JSON has no NaN."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if not isinstance(value, dict | list):
        return value
    if levels == 0:
        return "…"
    if isinstance(value, list):
        return [_shallow(item, levels - 1) for item in value]
    return {name: _shallow(item, levels - 1) for name, item in value.items()}


def turn_events(run: AgentRun) -> list[TurnEvent]:
    """Returns the rollout's answers, in order of time."""
    return [cast(TurnEvent, event) for event in run.events if event["kind"] == "turn"]


def tool_events(run: AgentRun) -> list[ToolEvent]:
    """Returns the tool calls that the agent reported, in order of time."""
    return [cast(ToolEvent, event) for event in run.events if event["kind"] == "tool"]

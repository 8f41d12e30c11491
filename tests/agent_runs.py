"""Rollouts of agents as the gateway and the host leave them, for tests of what becomes of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from megagrpo.types import AgentRun, Branch, Group, Prompt, Sample, Score, Turn

CALL = {"id": "call_0", "type": "function", "function": {"name": "calculator", "arguments": '{"sum": "17 * 23"}'}}


def turn_event(number: int, at: float, seconds: float, said: Mapping[str, Any], **values: Any) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "parent": number - 1 if number else None,
        "branch": "",
        "given": [],
        "finish": "stop",
        "tokens": 4,
    }
    sizes = {"prompt_tokens": 10, "given_tokens": 10}
    return {"kind": "turn", "at": at, "seconds": seconds, "number": number, "said": said, **plain, **sizes, **values}


def tool_event(at: float, seconds: float, name: str = "calculator", **values: Any) -> dict[str, Any]:
    return {"kind": "tool", "at": at, "name": name, "seconds": seconds, **values}


def calculator_run(**values: Any) -> AgentRun:
    """A question, a call of a tool, its result, an answer: 14 tokens given and 8 sampled, in one branch."""
    question, calls = {"role": "user", "content": "What is 17 * 23?"}, {"role": "assistant", "tool_calls": [CALL]}
    result = {"role": "tool", "tool_call_id": "call_0", "content": "391"}
    answer = {"role": "assistant", "content": "It is 391."}
    events = [
        turn_event(0, 0.0, 1.0, calls, given=[question]),
        tool_event(1.5, 0.5, arguments={"sum": "17 * 23"}, result="391"),
        turn_event(1, 1.5, 0.5, answer, given=[result], prompt_tokens=18, given_tokens=4),
    ]
    trained = np.array([False] * 10 + [True] * 4 + [False] * 4 + [True] * 4)
    plain: dict[str, Any] = {
        "branches": (Branch(np.arange(22, dtype=np.int32), trained),),
        "turns": (Turn(0, 0, 4), Turn(1, 0, 4, reward=1.0)),
        "messages": (question, calls, result, answer),
        "reward": {"score": 1.0},
        "counts": {"turns": 2, "tokens_read": 28},
        "events": tuple(events),
    }
    return AgentRun(**plain | values)


def group_of(*runs: AgentRun) -> Group:
    """One prompt's rollouts, each with a reward of 1 unless it failed."""
    samples = []
    for index, run in enumerate(runs):
        size = sum(int(branch.trained.sum()) for branch in run.branches)
        arrays = np.zeros(size, np.int32), np.full(size, -0.5, np.float32), np.zeros(size, np.int32)
        last = str(run.messages[-1].get("content") or "") if run.messages else ""
        samples.append(Sample("sums:0", index, *arrays, "abort" if run.error else "stop", last, run))
    prompt = Prompt("sums:0", (1, 2, 3), "sums", "391", messages=({"role": "user", "content": "What is 17 * 23?"},))
    values = [Score(None, error=run.error) if run.error else Score(1.0) for run in runs]
    return Group(prompt, tuple(samples), tuple(values))

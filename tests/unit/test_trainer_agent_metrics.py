"""Metrics of a step's agent rollouts."""

from __future__ import annotations

import math
from typing import Any

import pytest

from megagrpo.agents.turns import reported
from megagrpo.track.metrics import undocumented
from megagrpo.trainer.step_metrics import TOOLS_MAX, agent_metrics
from megagrpo.types import Group, Prompt
from tests.agent_runs import CALL, calculator_run, group_of, tool_event, turn_event


def test_a_step_without_agents_reports_nothing_of_them() -> None:
    assert agent_metrics([Group(Prompt("a", (1,), "a", ""), ())]) == {}


def test_turns_tools_and_tokens_of_rollouts() -> None:
    three = calculator_run(counts={"turns": 4, "turns_unused": 1}, branches=calculator_run().branches * 3)
    metrics = agent_metrics([group_of(calculator_run(), three)])
    assert metrics["agent/turns/mean"] == 3
    assert metrics["agent/turns/max"] == 4
    assert metrics["agent/turns_unused"] == 1
    assert metrics["agent/branches/mean"] == 2
    assert metrics["agent/given_tokens/mean"] == 28
    assert metrics["agent/given_tokens/share"] == pytest.approx(14 / 22)
    assert metrics["agent/prefix_reuse"] == pytest.approx(1 - 14 / 28)
    assert metrics["agent/tool_calls/mean"] == 1
    assert metrics["agent/tools/calculator/calls"] == 2
    assert metrics["agent/tools/calculator/seconds_mean"] == 0.5
    assert metrics["agent/tool_failures/share"] == metrics["agent/tools/calculator/failure_share"] == 0
    assert metrics["agent/seconds/mean"] == metrics["agent/seconds/max"] == 2.0
    assert metrics["agent/seconds/outside_mean"] == 0.5
    assert not undocumented(metrics)


def test_what_goes_wrong_is_counted_by_what_it_is() -> None:
    counts = {
        "branch/history": 2,
        "branch/reasoning": 1,
        "ignored/temperature": 3,
        "refused/context_length_exceeded": 1,
    }
    counts |= {"unreadable_calls": 2, "retries": 1, "tokens_rerendered": 40}
    process = "the agent's process ended (signal 9)"
    failed = calculator_run(error=process, counts={"failed": 1}, reward=None)
    aborted = calculator_run(error="the engine gave up on a turn", reward=None)
    late = calculator_run(error="took longer than 60 s", counts={"turns": 2, "late": 1}, reward=None)
    broken = tool_event(3.0, 2.5, error="TimeoutError: took longer than 2 s")
    run = calculator_run(counts=counts | {"turns": 2}, events=(*calculator_run().events, broken))
    metrics = agent_metrics([group_of(run, run, failed, late, aborted)])
    assert metrics["agent/branches/history"] == 4
    assert metrics["agent/branches/reasoning"] == 2
    assert metrics["agent/ignored/temperature"] == 6
    assert metrics["agent/refused/context_length_exceeded"] == 2
    assert metrics["agent/unreadable_calls"] == 4
    assert metrics["agent/retries"] == 2
    assert metrics["agent/tokens_rerendered"] == 80
    assert (metrics["agent/failed"], metrics["agent/late"]) == (1, 1), "nor is an engine's abort a failure"
    assert metrics["agent/tool_failures/share"] == pytest.approx(2 / 7)
    assert metrics["agent/tools/calculator/seconds_max"] == 2.5
    assert not undocumented(metrics)


def test_agents_may_tell_anything_and_make_up_any_number_of_tools() -> None:
    given: list[dict[str, Any]] = [{"kind": "tool"}, {"kind": "turn", "said": "x"}]
    given += [{"kind": "tool", "name": name, "seconds": at} for name, at in ((3, 1.0), ("x", "1"), ("x", math.nan))]
    odd = tuple(reported(event, 0.0) for event in given)
    many = tuple(tool_event(0.0, 1.0, f"tool{number}") for number in range(3 * TOOLS_MAX))
    metrics = agent_metrics([group_of(calculator_run(events=(*odd, *many, tool_event(0.0, 1.0, ""))))])
    tools = [name for name in metrics if name.startswith("agent/tools/") and name.endswith("/calls")]
    assert len(tools) <= TOOLS_MAX + 1
    assert sum(metrics[name] for name in tools) == 3 * TOOLS_MAX + 1
    assert not undocumented(metrics)


def test_turns_at_the_same_time_are_not_counted_twice() -> None:
    said = {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]}
    turns = (turn_event(0, 1.0, 2.0, said), turn_event(1, 2.0, 2.0, said), turn_event(2, 6.0, 1.0, said))
    metrics = agent_metrics([group_of(calculator_run(events=turns))])
    assert metrics["agent/seconds/mean"] == 7
    assert metrics["agent/seconds/outside_mean"] == 3
    assert metrics["agent/tool_calls/mean"] == 6


def test_a_rollout_that_never_asked_has_metrics() -> None:
    failed = calculator_run(
        branches=(), turns=(), messages=(), events=(), counts={"failed": 1.0}, error="ImportError", reward=None
    )
    metrics = agent_metrics([group_of(failed)])
    assert metrics["agent/failed"] == 1
    assert metrics["agent/turns/max"] == 0

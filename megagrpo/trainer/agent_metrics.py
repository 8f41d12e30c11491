"""Metrics of a step's agent rollouts: turns, tools, branches, failures."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megagrpo.agents.seen import ToolEvent, TurnEvent, tool_events, turn_events
from megagrpo.types import AgentRun, Group

TOOLS_MAX = 30
"""Number of tools with metrics of their own: the most called."""
OTHER = "other"
NAME_CHARACTERS = 64
BY_NAME = {"branch": "branches", "ignored": "ignored", "refused": "refused"}
SUMS = (
    "turns_unused", "tokens_rerendered", "unreadable_calls", "retries", "given_up", "audited", "audit_differs", "late",
    "failed",
)  # fmt: skip
"""Counts of rollouts (AgentRun.counts) that are reported under their own names, summed over the step."""


def agent_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Returns means and sums over the rollouts that agents made in these groups; {} without any."""
    runs = [sample.agent for group in groups for sample in group.samples if sample.agent is not None]
    if not runs:
        return {}
    counts: Counter[str] = Counter()
    for run in runs:
        counts.update(run.counts)
    turns = np.array([_turns(run) for run in runs])
    given, trained = (np.array([_tokens(run, trained=of) for run in runs]) for of in (False, True))
    metrics = {
        "agent/turns/mean": float(turns.mean()),
        "agent/turns/max": float(turns.max()),
        "agent/branches/mean": float(np.mean([len(run.branches) for run in runs])),
        "agent/given_tokens/mean": float(given.mean()),
        **{f"agent/{name}": float(counts[name]) for name in SUMS},
    }
    if whole := given.sum() + trained.sum():
        metrics["agent/given_tokens/share"] = float(given.sum() / whole)
    for name, value in sorted(counts.items()):
        of, _, what = name.partition("/")
        if of in BY_NAME:
            metrics[f"agent/{BY_NAME[of]}/{what}"] = float(value)
    return metrics | _of_events(runs)


def _of_events(runs: Sequence[AgentRun]) -> dict[str, float]:
    """Returns metrics of tool calls, prefix reuse and seconds."""
    turns, tools = [turn_events(run) for run in runs], [event for run in runs for event in tool_events(run)]
    calls = Counter(name for run in turns for event in run for name in called(event["said"]))
    metrics = {"agent/tool_calls/mean": sum(calls.values()) / len(runs)}
    if tools:
        metrics["agent/tool_failures/share"] = float(np.mean([bool(event.get("error")) for event in tools]))
    metrics |= _by_tool(calls, tools)
    if read := sum(event["prompt_tokens"] for run in turns for event in run):
        new = sum(event["given_tokens"] for run in turns for event in run)
        metrics["agent/prefix_reuse"] = 1 - new / read
    if spans := [_spans(run) for run in turns if run]:
        whole, outside = (np.array(values) for values in zip(*spans, strict=True))
        metrics["agent/seconds/mean"] = float(whole.mean())
        metrics["agent/seconds/max"] = float(whole.max())
        metrics["agent/seconds/outside_mean"] = float(outside.mean())
    return metrics


def _by_tool(calls: Counter[str], told: Sequence[ToolEvent]) -> dict[str, float]:
    """Returns metrics of the TOOLS_MAX most called tools; the others count as OTHER: agents may invent any name."""
    times: dict[str, list[ToolEvent]] = defaultdict(list)
    for event in told:
        times[event["name"]].append(event)
    made = Counter({name: max(calls[name], len(times[name])) for name in sorted({*calls, *times})})
    names = {name: name[:NAME_CHARACTERS] or OTHER for name, _ in made.most_common(TOOLS_MAX)}
    metrics: dict[str, float] = {}
    for tool in sorted({names.get(name, OTHER) for name in made}):
        own = [name for name in made if names.get(name, OTHER) == tool]
        metrics[f"agent/tools/{tool}/calls"] = float(sum(made[name] for name in own))
        if events := [event for name in own for event in times[name]]:
            seconds = [event["seconds"] for event in events]
            metrics[f"agent/tools/{tool}/failure_share"] = float(np.mean([bool(e.get("error")) for e in events]))
            metrics[f"agent/tools/{tool}/seconds_mean"] = float(np.mean(seconds))
            metrics[f"agent/tools/{tool}/seconds_max"] = float(np.max(seconds))
    return metrics


def called(said: Mapping[str, Any]) -> list[str]:
    """Returns the names of the tools that an answer calls."""
    calls = said.get("tool_calls") or []
    return [call["function"]["name"] for call in calls]


def _turns(run: AgentRun) -> float:
    return run.counts.get("turns", len(run.turns))


def _tokens(run: AgentRun, *, trained: bool) -> int:
    return sum(int((branch.trained == trained).sum()) for branch in run.branches)


def _spans(turns: Sequence[TurnEvent]) -> tuple[float, float]:
    """Returns seconds from a rollout's start to the end of its last turn, and the part of them in which no turn ran."""
    end, busy, until = 0.0, 0.0, 0.0
    for event in sorted(turns, key=lambda event: event["at"]):
        begin, end = event["at"], max(end, event["at"] + event["seconds"])
        busy += max(0.0, begin + event["seconds"] - max(begin, until))
        until = max(until, begin + event["seconds"])
    return end, end - busy

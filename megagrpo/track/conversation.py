"""A rollout as a conversation to read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from megagrpo.errors import printable
from megagrpo.track.rollout_files import TRAIN
from megagrpo.track.traces import LEFT_OUT

Json = Mapping[str, Any]
BRANCHES = {
    "history": "these messages do not go on from an answer of this rollout",  # edited, compacted, or a sub-agent's
    "tools": "the answer that these messages go on from had other tools",
    "fork": "an answer that was gone on with already is gone on with again",  # tokens up to it are trained once
    "reasoning": "the chat template leaves out earlier reasoning",
    "tools_move": "the chat template writes the tools, or the system message, elsewhere",
    "role": "the chat template cannot add such a message",  # or none has been added
    "close": "the chat template ends an answer with no stop token",
    "stop_token": "the answer before ended with another stop token than the chat template writes",
    "audit": "an audit has shown that the chat template writes what follows the answer otherwise",
}
"""Reasons for which a turn begins another sequence, by BranchReason of agents/seen.py."""


CONVERSATION = (
    "step", "set", "prompt_id", "sample", "response", "ground_truth", "score", "parts", "error", "masked", "finish",
    "prompt_tokens", "tokens", "agent",
)  # fmt: skip
"""Columns of rollout_files.SCHEMA that a conversation is made of."""


def conversation(row: Json) -> str:
    """Renders a rollout as text: messages by role, tool calls with their times and failures, tokens, rewards.

    row: the columns of CONVERSATION.
    """
    return "\n".join(_lines(row))


def _lines(row: Json) -> Iterator[str]:
    agent = None if row["agent"] is None else json.loads(row["agent"])
    of = "" if row["set"] == TRAIN else f", evaluation {printable(row['set'])}"
    yield f"step {row['step']}{of}, prompt {printable(row['prompt_id'])}, response {row['sample']}"
    score = row["score"]
    scored = f"score {score:g}" if score is not None else f"no score: {printable(_why(row))}"
    yield f"{scored}; ended with {row['finish']}; {row['tokens']} tokens sampled"
    if parts := ", ".join(f"{printable(name)} {value:g}" for name, value in row["parts"]):
        yield f"rewards: {parts}"
    if agent is not None:
        yield from _of_agent(agent)
    yield f"ground truth: {printable(row['ground_truth'])}"
    if agent is None:
        yield from ("", _head(f"policy, after a prompt of {row['prompt_tokens']} tokens"), _text(row["response"]))
        return
    for event in agent["events"]:
        yield ""
        yield from _event(event)


def _why(row: Json) -> str:
    return str(row["error"] or row["masked"] or "not scored")


def _of_agent(agent: Json) -> Iterator[str]:
    if agent["error"]:
        yield f"the agent failed: {printable(agent['error'])}"
    if agent["reward"]:
        yield f"from the agent: {', '.join(f'{printable(k)} {v:g}' for k, v in agent['reward'].items())}"
    sizes = [f"{of['tokens']} tokens, {of['trained']} of them trained" for of in agent["sequences"]]
    yield f"sequences: {'; '.join(sizes) or 'none'}"
    if counts := {name: value for name, value in agent["counts"].items() if value}:
        yield f"counts: {', '.join(f'{printable(name)} {value:g}' for name, value in counts.items())}"


def _event(event: Json) -> Iterator[str]:
    match event["kind"]:
        case "turn":
            if event.get("branch"):
                yield f"(another sequence begins: {BRANCHES[event['branch']]})"
            yield from _messages(event["given"])
            parts = [f"turn {event['number']}", f"at {event['at']:.1f} s", f"{event['seconds']:.1f} s"]
            parts.append(f"{event['prompt_tokens']} tokens read, {event['given_tokens']} of them new")
            parts.append(f"{event['tokens']} sampled" + (", cut off" if event["finish"] == "length" else ""))
            if event.get("reward") is not None:
                parts.append(f"reward {event['reward']:g}")
            if "sequence" not in event:
                parts.append("not trained on")
            yield _head(f"policy: {', '.join(parts)}")
            yield from _said(event["said"])
        case "tool":
            failed = f", failed: {event['error']}" if event.get("error") else ""
            yield _head(f"the tool {event['name']} ran: {event['seconds']:.2f} s{failed}")
        case kind if kind == LEFT_OUT:
            yield f"... {event['events']} events are left out ..."
        case kind:
            rest = {name: value for name, value in event.items() if name not in ("kind", "at")}
            yield _head(f"{kind} at {event['at']:.1f} s")
            yield _text(_json(rest))


def _messages(messages: Any) -> Iterator[str]:
    """Yields the messages in front of a turn; a text where they did not fit into the trace."""
    if not isinstance(messages, list):
        yield _text(messages)
        return
    for message in messages:
        if not isinstance(message, dict):
            yield _text(message)
            continue
        name = message.get("name")
        yield _head(f"{message.get('role')}{f' {name}' if name else ''}")
        yield from _said(message)
        yield ""


def _said(message: Any) -> Iterator[str]:
    if not isinstance(message, dict):
        yield _text(message)
        return
    if thought := message.get("reasoning_content"):
        yield _text(f"(thinks) {thought}")
    if content := message.get("content"):
        yield _text(content)
    for call in message.get("tool_calls") or ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            yield _text(f"calls {function.get('name')} {_json(function.get('arguments'))}")


def _head(text: str) -> str:
    return printable(f"── {text}").replace("\n", " ")


def _text(value: Any) -> str:
    return printable(_json(value).expandtabs(4))


def _json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

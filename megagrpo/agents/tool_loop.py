"""The built-in agent: asks the policy, runs the tools that it calls, and goes on until it answers without a call.

It runs in agent processes and asks the gateway over HTTP, like any other agent.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from megagrpo.agents.runner import reward_of as read_reward
from megagrpo.agents.tools.load import loaded, opened
from megagrpo.agents.tools.tool import Provider, Session, Tool
from megagrpo.agents.tools.tool import answer as run_tool

TRIES_MAX = 3
WAIT_SECONDS = 0.2
ENDS = ("turn_limit_exceeded", "context_length_exceeded", "turn_aborted", "rollout_aborted", "rollout_closed")
"""Codes of the gateway's refusals when the rollout is at a limit, was given up, or has ended. The loop ends without an
error, since the gateway knows which."""
UNREADABLE = (
    "Error: your tool call could not be read, so nothing was called. Check that its name is one of {tools}, and that "
    "its arguments are a complete JSON object."
)

_providers: list[Provider] = []
"""Loaded once in a process, for all rollouts."""


async def prepare(*, tools: Sequence[str | Mapping[str, Any]]) -> None:
    """Loads the tools, before any rollout begins."""
    _providers[:] = await loaded(tools)


async def rollout(task: Any, endpoint: Any, *, tools: Sequence[str | Mapping[str, Any]]) -> Any:
    """Runs one conversation with the prepared tools. Returns the reward of tools with a `reward` at its end, or None.

    It ends when an answer has no call, when a tool is done, at limits of turns and tokens, which the gateway keeps, and
    at the limit of seconds, which the host keeps. Raises RuntimeError for an answer of the gateway that is none.
    """
    messages: list[Any] = [dict(message) for message in task.messages]
    no_limit = aiohttp.ClientTimeout(total=None)  # a turn takes as long as it takes; the host ends rollouts
    async with opened(_providers, task) as (offered, sessions), aiohttp.ClientSession(timeout=no_limit) as client:
        schemas = [tool.schema for tool in offered.values()]
        while True:
            body = {"model": endpoint.model, "messages": messages, **({"tools": schemas} if schemas else {})}
            choice = await ask_policy(client, endpoint, body)
            if choice is None:
                break
            answer = choice["message"]
            messages.append({key: value for key, value in answer.items() if value is not None})
            calls = answer.get("tool_calls") or []
            if not calls and not choice.get("unreadable"):
                break
            if choice["finish_reason"] == "length":  # it was cut off: the intended call is unknown
                break
            if calls:
                messages += await asyncio.gather(*(run_call(call, offered, endpoint) for call in calls))
            else:  # no template has a tool's message without a call
                messages.append({"role": "user", "content": UNREADABLE.format(tools=", ".join(offered))})
            if any(session.done() for session in sessions):
                break
        return await reward_of(sessions)


async def ask_policy(client: aiohttp.ClientSession, endpoint: Any, body: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the first choice of the policy's answer; None if the gateway gives no more.

    Retries after a lost connection: the gateway joins the same request to the turn that runs.
    """
    data = json.dumps(body).encode()
    for number in range(TRIES_MAX):
        headers = {
            "Authorization": f"Bearer {endpoint.api_key}",
            "Content-Type": "application/json",
            "x-stainless-retry-count": str(number),
        }
        try:
            async with client.post(f"{endpoint.base_url}/chat/completions", data=data, headers=headers) as response:
                text = await response.text()
                if response.status == 200:
                    return json.loads(text)["choices"][0]  # type: ignore[no-any-return]
                if code_of(text) in ENDS:
                    return None
                failure = f"the gateway answered {response.status} {text[:500]}"
                if response.status < 500:
                    break
        except aiohttp.ClientError as error:
            failure = f"the gateway cannot be reached: {type(error).__name__} {error}"
        await asyncio.sleep(WAIT_SECONDS * 2**number)
    raise RuntimeError(failure)


def code_of(text: str) -> str:
    """Returns the code of OpenAI's error body, "" if there is none."""
    try:
        return str(json.loads(text)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return ""


async def run_call(call: Any, tools: Mapping[str, Tool], endpoint: Any) -> dict[str, Any]:
    """Runs a call, and reports it as an event. Returns the message with its result."""
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    # The gateway makes no call of an unknown tool, and none whose arguments are no object.
    called = await run_tool(tools[name], json.loads(arguments))
    seconds = round(called.seconds, 6)
    endpoint.event("tool", name=name, seconds=seconds, error=called.error, arguments=arguments, result=called.text)
    return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": called.text}


async def reward_of(sessions: Sequence[Session]) -> Any:
    """Returns the sum of the sessions' scores and of their metrics by name, and the rewards of turns, which one session
    may give. None if no session has a reward. Raises TypeError or ValueError for an invalid reward, or if two sessions
    reward turns."""
    total: dict[str, Any] = {}
    for session in sessions:
        reward, turn_rewards = read_reward(await session.score() if session.score is not None else None)
        for name, value in (reward or {}).items():
            total[name] = total.get(name, 0.0) + value
        if turn_rewards is not None and "turn_rewards" in total:
            raise ValueError("two tools give turn_rewards")
        total |= {} if turn_rewards is None else {"turn_rewards": turn_rewards}
    return total or None

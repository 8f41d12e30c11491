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
from megagrpo.agents.tools.tool import Called, Provider, Session, Tool, answer

TRIES_MAX = 3
WAIT_SECONDS = 0.2
ENDS = ("turn_limit_exceeded", "context_length_exceeded", "turn_aborted", "rollout_aborted", "rollout_closed")
"""Codes of the gateway's refusals when the rollout is at a limit, was given up, or has ended. The loop ends without an
error, since the gateway knows which."""


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
    async with opened(_providers, task) as (offered, sessions):
        await converse(task, endpoint, offered, sessions)
        return await reward_of(sessions)


async def converse(task: Any, endpoint: Any, tools: Mapping[str, Tool], sessions: Sequence[Session]) -> list[Any]:
    """Runs all turns. Returns the messages."""
    messages: list[Any] = [dict(message) for message in task.messages]
    schemas = [tool.schema for tool in tools.values()]
    no_limit = aiohttp.ClientTimeout(total=None)  # a turn takes as long as it takes; the host ends rollouts
    async with aiohttp.ClientSession(timeout=no_limit) as client:
        while True:
            body = {"model": endpoint.model, "messages": messages, **({"tools": schemas} if schemas else {})}
            choice = await asked(client, endpoint, body)
            if choice is None:
                return messages
            said = choice["message"]
            messages.append({key: value for key, value in said.items() if value is not None})
            calls = said.get("tool_calls") or []
            if not calls and not choice.get("unreadable"):
                return messages
            if choice["finish_reason"] == "length":
                return messages  # it was cut off: what it meant to call is not known
            if calls:
                messages += await run_calls(calls, tools, endpoint)
            else:
                messages.append(what_to_write(tools))
            if any(session.done() for session in sessions):
                return messages


async def asked(client: aiohttp.ClientSession, endpoint: Any, body: Mapping[str, Any]) -> dict[str, Any] | None:
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


async def run_calls(calls: Sequence[Any], tools: Mapping[str, Tool], endpoint: Any) -> list[dict[str, Any]]:
    """Runs the calls at the same time. Returns the messages with the results, in the calls' order."""
    results = await asyncio.gather(*(run_call(call, tools, endpoint) for call in calls))
    return [
        {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": called.text}
        for call, called in zip(calls, results, strict=True)
    ]


async def run_call(call: Any, tools: Mapping[str, Tool], endpoint: Any) -> Called:
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    # The gateway makes no call of an unknown tool, and none whose arguments are no object.
    called = await answer(tools[name], json.loads(arguments))
    seconds = round(called.seconds, 6)
    endpoint.event("tool", name=name, seconds=seconds, error=called.error, arguments=arguments, result=called.text)
    return called


def what_to_write(tools: Mapping[str, Tool]) -> dict[str, Any]:
    """Returns the message to the policy after an unreadable call. No template has a tool's message without a call."""
    text = (
        "Error: your tool call could not be read, so nothing was called. Check that its name is one of "
        f"{', '.join(tools)}, and that its arguments are a complete JSON object."
    )
    return {"role": "user", "content": text}


async def reward_of(sessions: Sequence[Session]) -> Any:
    """Returns the sum of the sessions' scores and of their metrics by name, and the rewards of turns, which one of them
    may give. None if none has a reward. Raises TypeError or ValueError for what is no reward, or two for turns."""
    total: dict[str, Any] = {}
    for session in sessions:
        reward, turn_rewards = read_reward(await session.score() if session.score is not None else None)
        for name, value in (reward or {}).items():
            total[name] = total.get(name, 0.0) + value
        if turn_rewards is not None and "turn_rewards" in total:
            raise ValueError("two tools give turn_rewards")
        total |= {} if turn_rewards is None else {"turn_rewards": turn_rewards}
    return total or None

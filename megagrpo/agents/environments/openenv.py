"""An environment of an OpenEnv server as an agent (https://github.com/meta-pytorch/OpenEnv).

Runs in the interpreter that has the package (agent.python), with the standard library and that only. A rollout is an
episode: reset, then the policy's answers as actions, until the environment is done. The row's prompt stands before the
first observation; its extra_info.reset (an object) and a seed that is the same for all of a prompt's rollouts go to
`reset`.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import importlib.util
import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


async def rollout(
    task: Any,
    endpoint: Any,
    url: str,
    arguments: Mapping[str, Any],
    observation: str | None = None,
    action: str | None = None,
    timeout_seconds: float = 60.0,
) -> dict[str, Any]:
    """Returns the sum of the steps' rewards, and each step's own. `action` names what turns texts into actions, and
    `observation` what turns observations into texts (see OpenEnvConfig). An answer that is no action gets 0, and the
    next message says so. Raises RefusedError if the gateway refuses the first request."""
    from openenv.core.generic_client import GenericEnvClient

    text_of, action_of = observation_text(observation), text_action(action)
    messages = [dict(message) for message in task.messages]
    rewards: list[float] = []
    no_action = 0
    async with GenericEnvClient(base_url=url, message_timeout_s=timeout_seconds) as environment:
        reset = task.extra_info.get("reset")
        reset = json.loads(reset) if isinstance(reset, str) else reset or {}
        result = await environment.reset(**{"seed": seed_of(task), **arguments, **reset})
        say(messages, text_of(result.observation))
        while not result.done:
            try:
                answer = await asyncio.to_thread(ask, endpoint, messages)
            except RefusedError:
                if not rewards:
                    raise
                break
            start, error = time.perf_counter(), ""
            try:
                result = await environment.step(action_of(answer.get("content") or ""))
            except (ValueError, RuntimeError) as raised:  # of `action`, or the server's: it is the policy's fault
                if isinstance(raised, RuntimeError) and "VALIDATION_ERROR" not in str(raised):
                    raise
                error = (str(raised).splitlines() or [type(raised).__name__])[0][:300]
            endpoint.event("tool", name="step", seconds=time.perf_counter() - start, error=error)
            rewards.append(0.0 if error else float(result.reward or 0.0))
            no_action += bool(error)
            messages.append(answer)
            say(messages, f"That is no action: {error}" if error else text_of(result.observation))
    return {
        "score": sum(rewards),
        "turn_rewards": rewards,
        "steps": len(rewards) - no_action,
        "no_action": no_action,
        "done": float(bool(result.done)),
    }


def seed_of(task: Any) -> int:
    """Returns the row's seed or index, or a seed made of its id: all rollouts of a prompt are of the same episode."""
    seed = task.extra_info.get("seed", task.extra_info.get("index"))
    if isinstance(seed, int):
        return seed
    return int.from_bytes(hashlib.blake2b(str(task.id).encode(), digest_size=3).digest(), "big")


def say(messages: list[dict[str, Any]], text: str) -> None:
    """Appends an observation as a user's message, or to the last message if that is a user's (the prompt's own)."""
    if messages and messages[-1]["role"] == "user":
        before = messages[-1]["content"]
        messages[-1] = {"role": "user", "content": f"{before}\n\n{text}" if before else text}
    else:
        messages.append({"role": "user", "content": text})


@functools.cache
def observation_text(observation: str | None) -> Callable[[Mapping[str, Any]], str]:
    """Returns the reader of observations: a field, FILE.py:FUNCTION, or (None) the only text, else all as JSON."""
    if observation is not None and ".py:" in observation:
        return function_of(observation)
    if observation is not None:
        return lambda seen: str(seen[observation])

    def text(seen: Mapping[str, Any]) -> str:
        texts = [value for value in seen.values() if isinstance(value, str) and value]
        return texts[0] if len(texts) == 1 else json.dumps(seen, ensure_ascii=False)

    return text


@functools.cache
def text_action(action: str | None) -> Callable[[str], dict[str, Any]]:
    """Returns the maker of actions: a field for the answer, FILE.py:FUNCTION, or (None) the last JSON object in it."""
    if action is not None and ".py:" in action:
        return function_of(action)
    return last_object if action is None else lambda answer: {action: answer}


def last_object(answer: str) -> dict[str, Any]:
    """Returns the last JSON object in a text. {} if there is none: the environment judges it."""
    last: dict[str, Any] = {}
    decoder, at = json.JSONDecoder(), answer.find("{")
    while at >= 0:
        try:
            value, end = decoder.raw_decode(answer, at)
        except (json.JSONDecodeError, RecursionError):
            end = at + 1
        else:
            last = value
        at = answer.find("{", end)
    return last


@functools.cache
def function_of(named: str) -> Callable[[Any], Any]:
    """Returns the function that FILE.py:FUNCTION names. Its file may import its neighbours."""
    file, _, function = named.rpartition(":")
    path = Path(file).resolve()
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(f"openenv_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{file} is no file of Python")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, function)  # type: ignore[no-any-return]


class RefusedError(Exception):
    """A refusal of the gateway, as at a limit of turns or tokens. The steps before it count."""


def ask(endpoint: Any, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the policy's answer. Raises RefusedError."""
    request = urllib.request.Request(
        f"{endpoint.base_url}/chat/completions",
        json.dumps({"model": endpoint.model, "messages": messages}).encode(),
        {"Authorization": f"Bearer {endpoint.api_key}", "Content-Type": "application/json"},
    )
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as response:
            return json.load(response)["choices"][0]["message"]  # type: ignore[no-any-return]
    except urllib.error.HTTPError as error:
        if not 400 <= error.code < 500:
            raise
        reply = error.read(2000).decode(errors="replace")
        raise RefusedError(f"the gateway refused a turn: {error.code} {reply}") from None

"""The interface of a tool to the loop, and the answer of one call. The policy reads the error of a call that fails."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from megagrpo.errors import first_line
from megagrpo.recipe.schema.agent import ToolConfig

Arguments = dict[str, Any]
"""The arguments of the policy's call: the object of its JSON."""


class CallError(Exception):
    """A call that failed. The text is what the policy reads."""


@dataclass(frozen=True)
class Tool:
    """One function that the policy may call, as one rollout has it."""

    config: ToolConfig
    """Its entry, with its limits."""
    gate: asyncio.Semaphore
    """Semaphore of the calls that run at once."""
    own_name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of an object."""
    call: Callable[[Arguments], Awaitable[str]]
    """Raises CallError, or whatever a user's code raises."""

    @property
    def name(self) -> str:
        """Returns the name by which the policy calls it."""
        return self.config.call_name or self.own_name

    @property
    def schema(self) -> dict[str, Any]:
        """Returns the schema as OpenAI's chat completions and chat templates write it."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class Called:
    """The result of one call."""

    text: str
    seconds: float = 0.0
    """Excludes the wait for other calls."""
    error: str = ""
    """The cause of a failure, one line."""


@dataclass(frozen=True)
class Session:
    """One entry of agent.tools in one rollout: its tools, score and end."""

    tools: Sequence[Tool]
    score: Callable[[], Awaitable[Any]] | None = None
    """Called at the end. Returns a reward, or a mapping with `score`, or None."""
    done: Callable[[], bool] = lambda: False
    """Called after each turn's calls. Returns whether the rollout is over."""


class Provider(Protocol):
    """One entry of agent.tools in an agent process: loaded once, with a session for each rollout."""

    def session(self, task: Any) -> AbstractAsyncContextManager[Session]: ...


async def answer(tool: Tool, given: Arguments) -> Called:
    """Calls a tool with what the policy gave. Never raises an Exception."""
    async with tool.gate:
        start = time.monotonic()
        failure = ""
        try:
            async with asyncio.timeout(tool.config.timeout_seconds) as limit:
                text = await tool.call(given)
        except CallError as raised:
            failure, text = first_line(raised), f"Error: {raised}"
        except Exception as raised:  # noqa: BLE001  (a tool may be a user's code, and one call ends no rollout)
            # A time-out that the tool itself raises is not this one.
            late = isinstance(raised, TimeoutError) and limit.expired()
            limit_text = f"took longer than {tool.config.timeout_seconds:g} s"
            cause = limit_text if late else f"{type(raised).__name__}: {raised}".strip(": ")
            failure, text = cause.splitlines()[0], f"Error: {tool.name} {cause}." if late else f"Error: {cause}"
        seconds = time.monotonic() - start
    # Half of a surrogate pair, which Python's texts can have, is no text for a tokenizer.
    text = text.encode(errors="replace").decode()
    return Called(shortened(text, tool.config.result_characters_max), seconds, failure)


def shortened(text: str, most: int) -> str:
    """Returns the text, or its beginning and its end with a line between them, of at most `most` characters in all.

    >>> shortened("0123456789" * 10, 40)
    '01234567\\n[… 84 characters more]\\n23456789'
    """
    if len(text) <= most:
        return text
    room = most - len(f"\n[… {len(text)} characters more]\n")
    if room < 2:
        return text[:most]
    left = len(text) - (room - room // 2) - room // 2
    return f"{text[: room - room // 2]}\n[… {left} characters more]\n{text[len(text) - room // 2 :]}"


def written(result: object) -> str:
    """Returns a tool's result as text: texts unchanged, anything else as JSON, or as Python writes it."""
    if isinstance(result, str):
        return result
    if result is None:
        return "done"
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return str(result)

"""An agent process and its keeper, as the host sees them: messages to it, messages from it, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megagrpo.agents.tools.load import variables
from megagrpo.errors import AgentError, Problem, first_line
from megagrpo.recipe.schema.agent import AgentConfig
from megagrpo.reward.keeper import ENVIRONMENT, KeptProcess, environment_of

MESSAGE_BYTES_MAX = 1 << 24
"""Longest line from an agent process."""
LOG_BYTES_MAX = 1 << 26
"""Most bytes of one process's log; the rest is read and dropped."""
RUNNER = Path(__file__).parent / "runner.py"
BUILT_IN = {
    "tools": "tool_loop.py",
    "verifiers": "environments/verifiers.py",
    "openenv": "environments/openenv.py",
    "reasoning_gym": "environments/reasoning_gym.py",
}
"""The files beside this one that have `rollout`, by kind of agent."""


@dataclass(frozen=True)
class Program:
    """The program of agent processes: a function of a file, and its arguments."""

    file: str
    source: str
    """The text of the file, read once: whatever becomes of the file, all processes run the same."""
    function: str
    arguments: Mapping[str, Any]
    python: str | None = None
    """null: the run's interpreter, with what it can import."""
    environment: Sequence[str] = ()
    """Environment variables that it gets in addition to ENVIRONMENT of reward/keeper.py."""


def program_of(agent: AgentConfig) -> Program:
    """Returns the agents' program. Raises AgentError if the file cannot be read, RecipeError for arguments of tools."""
    if agent.function:
        name, _, function = agent.function.rpartition(":")
        file, arguments = Path(name).absolute(), agent.arguments
    else:
        file, function = Path(__file__).parent / BUILT_IN[agent.kind], "rollout"
        written = [tool.model_dump(mode="json") for tool in agent.tool_configs]
        arguments = {"tools": written} if agent.tools else getattr(agent, agent.kind).model_dump(mode="json")
    try:
        source = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise AgentError(Problem(f"agent.{agent.kind}", f"{file}: {first_line(error)}", "a file to read")) from None
    environment = [*agent.environment, *variables(agent.tool_configs)]
    return Program(str(file), source, function, arguments, agent.python, environment)


class AgentProcess:
    """An agent process that `start` has started. Its methods are for one event loop."""

    def __init__(self, process: KeptProcess, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._process, self._reader, self._writer = process, reader, writer

    @classmethod
    async def start(cls, program: Program, log: Path) -> AgentProcess:
        """Starts the process, whose message `ready` says when it is ready. Raises OSError."""
        command = [program.python or sys.executable, str(RUNNER)]
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            kept = KeptProcess(command, environment_of_program(program), output, LOG_BYTES_MAX)
        kept.socket.setblocking(False)
        process = cls(kept, *await asyncio.open_connection(sock=kept.socket, limit=MESSAGE_BYTES_MAX))
        process.send({"start": {
            "path": None if program.python else [entry for entry in sys.path if entry],
            "file": program.file,
            "source": program.source,
            "function": program.function,
            "arguments": dict(program.arguments),
        }})  # fmt: skip
        return process

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends a message. Values that JSON lacks become texts. A message to a process that is gone is lost."""
        data = json.dumps(message, default=str, skipkeys=True).encode(errors="surrogatepass") + b"\n"
        self._writer.write(data)

    async def messages(self) -> AsyncIterator[dict[str, Any]]:
        """Yields the process's messages until it ends. Raises ValueError for a line that is no message."""
        while True:
            try:
                line = await self._reader.readline()
            except OSError:
                return
            if not line.endswith(b"\n"):
                return
            try:
                message = json.loads(line)
            except RecursionError:
                raise ValueError("lists in lists without end") from None
            if not isinstance(message, dict):
                raise ValueError("JSON, but no object")
            yield message

    def stop(self) -> None:
        """Tells its keeper to end the process and all that it started."""
        self._process.tell_to_end()

    async def end(self) -> str:
        """Ends the process and all that it started. Returns how it ended, in words."""
        self.stop()
        how = await asyncio.to_thread(self._process.end)
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
        return how


def environment_of_program(program: Program) -> dict[str, str]:
    names = {*ENVIRONMENT, *program.environment}
    if program.python:  # variables of this interpreter
        names -= {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX"} - {*program.environment}
    return environment_of(names)

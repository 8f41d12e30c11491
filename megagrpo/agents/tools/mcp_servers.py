"""MCP servers: a command that speaks on its standard input and output, or a URL (streamable HTTP), by the package mcp.

One connection serves all rollouts of an agent process, or, with a state, each rollout has its own. One that is lost is
made again by the next call.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any, TextIO

from megagrpo.agents.tools.tool import Arguments, CallError, Session, Tool
from megagrpo.errors import AgentError, MachineError, Problem, first_line
from megagrpo.recipe.schema.agent import McpArguments, ToolConfig

START_SECONDS = 60.0
PAGES_MAX = 100
LINES_KEPT, LINE_CHARACTERS_MAX = 10, 300
"""Limits of what is kept of a server's standard error, for the error if it cannot be started."""
VARIABLE = re.compile(r"\$(?:(\w+)|\{([^}]*)\})", re.ASCII)
"""Variables as os.path.expandvars reads them."""


class McpServer:
    """The tools of one server."""

    def __init__(self, config: ToolConfig, arguments: McpArguments, inherited: Mapping[str, str] = os.environ) -> None:
        """Raises MachineError without mcp. inherited: the environment variables that a server gets beside its own."""
        if find_spec("mcp") is None:
            fix = "pip install megagrpo[mcp]"
            raise MachineError(Problem(f"agent.tools, {config.name}", "mcp is not installed", "mcp 2", fix))
        self.config = config
        self.only = arguments.tools
        self.headers = {name: os.path.expandvars(value) for name, value in arguments.headers.items()}
        self.env = {**inherited, **{name: os.path.expandvars(value) for name, value in arguments.env.items()}}
        self.gate = asyncio.Semaphore(config.calls_at_once)
        self._where = f"the MCP server {config.mcp}"
        self._offered: list[Any] | None = None
        self._listing = asyncio.Lock()
        self.shared = Connection(self._client, self._where)
        """The connection of all rollouts, unless each has its own."""

    @asynccontextmanager
    async def session(self, task: Any) -> AsyncIterator[Session]:
        """Opens a rollout's session. Raises AgentError if the server cannot be started or reached."""
        connection = Connection(self._client, self._where) if self.config.stateful else self.shared
        try:
            async with self._listing:  # asked once in a process: all rollouts of a group must have the same tools
                if self._offered is None:
                    self._offered = await self._listed(await connection.client())
            if self.config.stateful:
                await connection.client()  # a failure to start is the rollout's, not the first call's
            yield Session([
                Tool(
                    self.config, self.gate, offered.name, offered.description or "", offered.input_schema,
                    partial(connection.call, offered.name),
                )
                for offered in self._offered
            ])  # fmt: skip
        finally:
            if connection is not self.shared:
                await asyncio.shield(connection.close())

    async def _listed(self, client: Any) -> list[Any]:
        tools: list[Any] = []
        cursor = None
        for _ in range(PAGES_MAX):
            page = await client.list_tools(cursor=cursor)
            tools += page.tools
            cursor = page.next_cursor
            if not cursor:
                break
        names = [tool.name for tool in tools]
        if missing := [name for name in self.only or () if name not in names]:
            given = f"{', '.join(missing)}; it has {', '.join(names) or 'none'}"
            raise AgentError(Problem(self._where, given, "names of its tools", "correct arguments.tools"))
        if not tools:
            raise AgentError(Problem(self._where, "no tools", "a server with tools"))
        if self.config.call_name and len(self.only or names) > 1:
            given = f"call_name: {self.config.call_name}, for {', '.join(self.only or names)}"
            raise AgentError(Problem(self._where, given, "one tool", "name one in arguments.tools"))
        return [tool for tool in tools if self.only is None or tool.name in self.only]

    @asynccontextmanager
    async def _client(self, errors: ServerErrors) -> AsyncIterator[Any]:
        import httpx2  # mcp brings it
        from mcp.client import Client
        from mcp.client.stdio import StdioServerParameters, stdio_client
        from mcp.client.streamable_http import streamable_http_client

        server = self.config.mcp or ""
        if is_url(server):
            times = httpx2.Timeout(START_SECONDS, read=self.config.timeout_seconds + START_SECONDS)
            async with (
                httpx2.AsyncClient(headers=self.headers, timeout=times) as http,
                Client(streamable_http_client(server, http_client=http)) as client,
            ):
                yield client
        else:
            command, *arguments = shlex.split(server)
            parameters = StdioServerParameters(command=command, args=arguments, env=self.env)
            with errors.open() as file:
                async with Client(stdio_client(parameters, errlog=file)) as client:
                    yield client


class ServerErrors:
    """The standard error of a server: copied to this process's, with its last lines kept."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=LINES_KEPT)
        self._thread: threading.Thread | None = None

    @contextmanager
    def open(self) -> Iterator[TextIO]:
        """Opens the file that the server writes into."""
        read, write = os.pipe()
        self._thread = threading.Thread(target=self._read, args=(read,), name="reads a server's errors", daemon=True)
        self._thread.start()
        with os.fdopen(write, "w") as file:
            yield file

    def _read(self, read: int) -> None:
        with os.fdopen(read, errors="replace") as lines:
            for line in lines:
                self._lines.append(line.rstrip()[:LINE_CHARACTERS_MAX])
                print(line, end="", file=sys.stderr)

    def last(self) -> str:
        """Returns its last lines, to append to the text of an error."""
        if self._thread is not None:
            self._thread.join(1.0)  # it ends with the server
        return "".join(f"\n{line}" for line in [*self._lines] if line)


class Connection:
    """A client that connects on first use. A task of its own enters and leaves it, as its library demands."""

    def __init__(self, make: Callable[[ServerErrors], AbstractAsyncContextManager[Any]], where: str) -> None:
        self._make, self._where, self._errors = make, where, ServerErrors()
        self._task: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[Any] | None = None
        self._leave = asyncio.Event()

    async def client(self) -> Any:
        """Returns the connected client. Raises AgentError if the server cannot be started or reached."""
        if self._ready is None or (self._task is not None and self._task.done()):
            self._ready = asyncio.get_running_loop().create_future()
            self._leave = asyncio.Event()
            self._task = asyncio.create_task(self._live(self._ready, self._leave))
        try:
            async with asyncio.timeout(START_SECONDS):
                return await asyncio.shield(self._ready)
        except TimeoutError:
            given = f"it did not answer in {START_SECONDS:g} s{self._errors.last()}"
            raise AgentError(Problem(self._where, given, "a server that answers")) from None

    async def call(self, name: str, arguments: Arguments) -> str:
        """Calls a tool and returns its text. Raises CallError for an error of the server."""
        from mcp.shared.exceptions import MCPError
        from mcp_types import CONNECTION_CLOSED

        try:
            answer = await (await self.client()).call_tool(name, arguments)
        except MCPError as error:
            if error.error.code == CONNECTION_CLOSED:
                await self.close()
                raise CallError("the tool's server ended") from None
            raise CallError(error.error.message) from None
        except AgentError as error:
            raise CallError(error.problems[0].given.splitlines()[0]) from None
        text = text_of(answer)
        if answer.is_error:
            raise CallError(text)
        return text

    async def close(self) -> None:
        task, ready, self._task, self._ready = self._task, self._ready, None, None
        if task is not None:
            self._leave.set()
            if ready is not None and not ready.done():  # a server that does not answer
                task.cancel()
            await asyncio.wait([task])

    async def _live(self, ready: asyncio.Future[Any], leave: asyncio.Event) -> None:
        try:
            self._errors = ServerErrors()
            async with self._make(self._errors) as client:
                ready.set_result(client)
                await leave.wait()
        except Exception as error:  # noqa: BLE001  (a server can be wrong in every way: its calls fail)
            if not ready.done():
                reason: BaseException = error
                while isinstance(reason, BaseExceptionGroup):
                    reason = reason.exceptions[0]
                cause = f"{type(reason).__name__}: {first_line(reason)}{self._errors.last()}"
                given = f"it cannot be started or reached: {cause}"
                ready.set_exception(AgentError(Problem(self._where, given, "a server that answers")))


def text_of(answer: Any) -> str:
    """Returns the texts of a server's result; its structure as JSON if it has no text."""
    texts = []
    for content in answer.content:
        text = content.text if content.type == "text" else getattr(getattr(content, "resource", None), "text", None)
        texts.append(text if isinstance(text, str) else f"[{content.type}, which cannot be shown]")
    if not texts and answer.structured_content is not None:
        return json.dumps(answer.structured_content, ensure_ascii=False)
    return "\n".join(texts) or "done"


def variables_in(text: str) -> list[str]:
    """Returns the names of the environment variables that a text of headers or env has.

    >>> variables_in("Bearer $KEY, ${OTHER}")
    ['KEY', 'OTHER']
    """
    return [plain or braced for plain, braced in VARIABLE.findall(text)]


def is_url(server: str) -> bool:
    return server.startswith(("http://", "https://"))

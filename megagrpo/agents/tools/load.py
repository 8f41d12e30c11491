"""The tools of the recipe's agent.tools: loaded once in a process, opened for each rollout."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

from pydantic import ValidationError

from megagrpo.agents.tools.mcp_servers import McpServer, variables_in
from megagrpo.agents.tools.own import OwnClass, own_tools
from megagrpo.agents.tools.python_program import PythonTool
from megagrpo.agents.tools.tool import Provider, Session, Tool
from megagrpo.errors import AgentError, Problem, RecipeError
from megagrpo.recipe.problems import schema_problems
from megagrpo.recipe.schema.tools import McpArguments, PythonArguments, ToolConfig
from megagrpo.section import Section, broken_rules

Arguments = TypeVar("Arguments", bound=Section)
log = logging.getLogger(__name__)
SLOW_SECONDS = 1.0
"""Tools that took longer to load are logged."""


async def loaded(tools: Sequence[str | Mapping[str, Any]]) -> list[Provider]:
    """Loads and prepares the providers of these entries.

    Raises AgentError, RecipeError, RewardError or MachineError, and what a class's `prepare` raises.
    """
    configs = [ToolConfig(name=tool) if isinstance(tool, str) else ToolConfig.model_validate(tool) for tool in tools]
    providers = [await provider(config, f"agent.tools.{number}") for number, config in enumerate(configs)]
    for each in providers:
        if isinstance(each, OwnClass):
            await each.prepare()
    return providers


async def provider(config: ToolConfig, where: str) -> Provider:
    """Loads the provider of one entry of agent.tools."""
    start = time.monotonic()
    made: Provider
    if config.mcp is not None:
        made = McpServer(config, arguments_of(config, McpArguments, where))
        async with made.session(None):  # what cannot be started is found before any rollout
            pass
    elif config.own:
        made = own_tools(config, where)
    elif config.name == "python":
        made = PythonTool(config, arguments_of(config, PythonArguments, where))
    else:
        raise AgentError(Problem(where, config.name, "python, or FILE.py:NAME"))
    if (seconds := time.monotonic() - start) > SLOW_SECONDS:
        log.warning("the tool %s was loaded in %.1f s", config.name, seconds)
    return made


async def offered(config: ToolConfig, where: str, environment: Mapping[str, str]) -> list[Tool]:
    """Returns one entry's tools for display: no object of a user's class is made. An MCP server is started with these
    environment variables, or reached, and left. Raises what `provider` raises."""
    if config.mcp is not None:
        server = McpServer(config, arguments_of(config, McpArguments, where), environment)
        try:
            async with server.session(None) as session:
                return list(session.tools)
        finally:
            await server.close()
    made = await provider(config, where)
    if isinstance(made, OwnClass):
        return made.tools_of(made.made)
    async with made.session(None) as session:
        return list(session.tools)


def arguments_of(config: ToolConfig, section: type[Arguments], where: str) -> Arguments:
    """Returns the entry's arguments. Raises RecipeError with a problem for each that is wrong."""
    try:
        read = section.model_validate(config.arguments)
    except ValidationError as error:
        problems = schema_problems(config.arguments, error.errors(), section)
    else:
        problems = broken_rules(read)
        if not problems:
            return read
    raise RecipeError(replace(problem, where=f"{where}.arguments.{problem.where}") for problem in problems)


def variables(configs: Sequence[ToolConfig]) -> list[str]:
    """Returns the environment variables that MCP servers' headers and env name. Raises RecipeError for arguments that
    cannot be read."""
    names: list[str] = []
    for number, config in enumerate(configs):
        if config.mcp is not None:
            given = arguments_of(config, McpArguments, f"agent.tools.{number}")
            names += [name for text in (*given.headers.values(), *given.env.values()) for name in variables_in(text)]
    return sorted(set(names))


@asynccontextmanager
async def opened(providers: Sequence[Provider], task: Any) -> AsyncIterator[tuple[dict[str, Tool], list[Session]]]:
    """Opens one rollout's sessions, which end with it. Yields its tools by the policy's names, and the sessions.

    Raises AgentError if two have the same name.
    """
    async with AsyncExitStack() as stack:
        sessions = [await stack.enter_async_context(provider.session(task)) for provider in providers]
        tools: dict[str, Tool] = {}
        for tool in (tool for session in sessions for tool in session.tools):
            if tool.name in tools:
                given, fix = f"two tools are called {tool.name}", "give one a call_name"
                raise AgentError(Problem("agent.tools", given, "a name for each", fix))
            tools[tool.name] = tool
        yield tools, sessions

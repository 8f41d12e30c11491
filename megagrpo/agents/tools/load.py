"""The tools of the recipe's agent.tools: checked before the run, loaded once in a process, opened for each rollout."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from megagrpo.agents.tools.mcp_servers import McpServer, is_url, variables_in
from megagrpo.agents.tools.own import OwnClass, own_tools
from megagrpo.agents.tools.python_program import PythonTool
from megagrpo.agents.tools.tool import Provider, Session, Tool
from megagrpo.errors import AgentError, MegagrpoError, Problem, RecipeError
from megagrpo.recipe.problems import schema_problems
from megagrpo.recipe.schema.agent import AgentConfig, McpArguments, PythonArguments, ToolConfig
from megagrpo.reward.sandbox.programs import checked_kind
from megagrpo.section import Section, broken_rules
from megagrpo.user_functions import file_problem

Arguments = TypeVar("Arguments", bound=Section)
log = logging.getLogger(__name__)
SLOW_SECONDS = 1.0
"""Tools that took longer to load are logged."""
KNOWN = "python, or FILE.py:NAME"
NOT_HERE = {
    "generic_mcp": "mcp: COMMAND or URL",
    "dr_agent_mcp": "mcp: the URL of its server",
    "search": "examples/agents/bm25_search.py:Search, or dense_search.py:Search",
    "s2_search": "examples/agents/web.py:SemanticScholar",
    "serper_search": "examples/agents/web.py:Serper",
    "massive_ds": "examples/agents/web.py:MassiveDs",
    "jina_browse": "examples/agents/web.py:Jina",
    "crawl4ai_browse": "examples/agents/web.py:Crawl4ai",
}
"""Names of tools that another field or a file of examples/ gives: open-instruct's, and `search`."""


async def loaded(tools: Sequence[str | Mapping[str, Any]]) -> list[Provider]:
    """Loads and prepares the providers of these entries.

    Raises AgentError, RecipeError, RewardError or MachineError, and what a class's `prepare` raises.
    """
    configs = [ToolConfig(name=tool) if isinstance(tool, str) else ToolConfig.model_validate(tool) for tool in tools]
    providers = []
    for number, config in enumerate(configs):
        start = time.monotonic()
        providers.append(made := provider(config, f"agent.tools.{number}"))
        if isinstance(made, McpServer):
            async with made.session(None):  # a server that cannot be started is found before any rollout
                pass
        if (seconds := time.monotonic() - start) > SLOW_SECONDS:
            log.warning("the tool %s was loaded in %.1f s", config.name, seconds)
    for made in providers:
        if isinstance(made, OwnClass):
            await made.prepare()
    return providers


def provider(config: ToolConfig, where: str, environment: Mapping[str, str] = os.environ) -> Provider:
    """Returns the provider of one entry of agent.tools. An MCP server is started by its first session, with these
    environment variables."""
    if config.mcp is not None:
        return McpServer(config, arguments_of(config, McpArguments, where), environment)
    if config.own:
        return own_tools(config, where)
    if config.name == "python":
        return PythonTool(config, arguments_of(config, PythonArguments, where))
    raise AgentError(Problem(where, config.name, KNOWN))


async def offered(config: ToolConfig, where: str, environment: Mapping[str, str]) -> list[Tool]:
    """Returns one entry's tools for display: no object of a user's class is made. An MCP server is started, or
    reached, and left. Raises what `loaded` raises, except for `prepare`."""
    made = provider(config, where, environment)
    if isinstance(made, OwnClass):
        return made.tools_of(made.made)
    try:
        async with made.session(None) as session:
            return list(session.tools)
    finally:
        if isinstance(made, McpServer):
            await made.shared.close()


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


# --- before the run ---------------------------------------------------------------------------------------------------


def tool_problems(agent: AgentConfig, *, elsewhere: bool = False) -> list[Problem]:
    """Returns every problem; `where` starts with agent.tools. Runs the files of own tools, and tries the sandbox. No
    server is started or reached.

    elsewhere: the run may start on another machine, so files, packages, keys and a sandbox that are not here are fine.
    """
    problems, of_names = list[Problem](), list[Problem]()
    numbers: dict[str, int] = {}
    for number, config in enumerate(agent.tool_configs):
        where = f"agent.tools.{number}"
        problems += _problems(config, where, elsewhere)
        # The names of servers' and own tools are known when the run starts.
        if name := config.call_name or ("" if config.mcp is not None or config.own else config.name):
            if name in numbers:
                given = f"{name}, which agent.tools.{numbers[name]} is called too"
                of_names.append(Problem(where, given, "a name for each", "give one a call_name"))
            numbers.setdefault(name, number)
    return problems + of_names


def _problems(config: ToolConfig, where: str, elsewhere: bool) -> Iterator[Problem]:
    try:
        if config.mcp is not None:
            yield from _mcp_problems(config.mcp, arguments_of(config, McpArguments, where), where, elsewhere)
        elif config.own:
            if not (problem := file_problem(config.name, f"{where}.name")):
                own_tools(config, where)
            elif not elsewhere or Path(config.name.rpartition(":")[0]).is_file():
                yield problem
        elif config.name == "python":
            given = arguments_of(config, PythonArguments, where)
            if elsewhere:
                return
            try:
                checked_kind(given.isolation)
            except ValueError as error:
                yield Problem(where, str(error), "a sandbox that works on this machine", "see docs/security.md")
            for name in given.imports:
                if find_spec(name.partition(".")[0]) is None:
                    yield Problem(f"{where}.arguments.imports", name, "modules that are installed", "install it")
        else:
            fix = "correct it (docs/agents_tools.md lists the tools)"
            yield Problem(f"{where}.name", config.name, NOT_HERE.get(config.name, KNOWN), fix)
    except MegagrpoError as error:
        yield from error.problems


def _mcp_problems(server: str, given: McpArguments, where: str, elsewhere: bool) -> Iterator[Problem]:
    if find_spec("mcp") is None and not elsewhere:
        yield Problem(f"{where}.mcp", "the package mcp is not installed", "mcp 2", "pip install megagrpo[mcp]")
    for part, values in {"headers": given.headers, "env": given.env}.items():
        for name, text in values.items():
            if not elsewhere and (missing := [one for one in variables_in(text) if one not in os.environ]):
                needed = "environment variables that are set"
                yield Problem(f"{where}.arguments.{part}.{name}", ", ".join(missing), needed, "set it before the run")
    if is_url(server):
        return
    try:
        command = shlex.split(server)
    except ValueError as error:
        yield Problem(f"{where}.mcp", f"{server}: {error}", "a command as a shell reads it, or a URL", "correct it")
        return
    if not command:
        yield Problem(f"{where}.mcp", "nothing", "a command, or a URL", "give one")
    elif shutil.which(command[0]) is None and not elsewhere:
        yield Problem(f"{where}.mcp", f"{command[0]}, which is no program here", "a command", "install it")

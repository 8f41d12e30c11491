"""Problems of agent.tools that are found before the run. No server is started or reached."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from megagrpo.agents.tools.load import arguments_of
from megagrpo.agents.tools.mcp_servers import is_url, variables_in
from megagrpo.agents.tools.own import own_tools
from megagrpo.errors import MegagrpoError, Problem
from megagrpo.recipe.schema.agent import AgentConfig
from megagrpo.recipe.schema.tools import McpArguments, PythonArguments, ToolConfig
from megagrpo.reward.sandbox.programs import checked_kind
from megagrpo.user_functions import file_problem

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


def tool_problems(agent: AgentConfig, *, elsewhere: bool = False) -> list[Problem]:
    """Returns every problem; `where` starts with agent.tools. Runs the files of own tools, and tries the sandbox.

    elsewhere: the run may start on another machine, so files, packages, keys and a sandbox that are not here are fine.
    """
    configs = agent.tool_configs
    problems = [
        problem
        for number, config in enumerate(configs)
        for problem in _problems(config, f"agent.tools.{number}", elsewhere)
    ]
    names: dict[str, int] = {}
    for number, config in enumerate(configs):
        name = _certain_name(config)
        if name and name in names:
            given = f"{name}, which agent.tools.{names[name]} is called too"
            problems.append(Problem(f"agent.tools.{number}", given, "a name for each", "give one a call_name"))
        names.setdefault(name, number)
    return problems


def _problems(config: ToolConfig, where: str, elsewhere: bool) -> Iterator[Problem]:
    try:
        if config.mcp is not None:
            yield from _mcp_problems(config.mcp, arguments_of(config, McpArguments, where), where, elsewhere)
        elif config.own:
            yield from _own_problems(config, where, elsewhere)
        elif config.name == "python":
            yield from _python_problems(arguments_of(config, PythonArguments, where), where, elsewhere)
        else:
            needed = NOT_HERE.get(config.name, "python, or FILE.py:NAME")
            yield Problem(f"{where}.name", config.name, needed, "correct it (docs/agents_tools.md lists the tools)")
    except MegagrpoError as error:
        yield from error.problems


def _certain_name(config: ToolConfig) -> str:
    """Returns the tool's name for the policy, "" if it is only known when the run starts."""
    if config.call_name:
        return config.call_name
    return config.name if config.mcp is None and not config.own else ""


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


def _own_problems(config: ToolConfig, where: str, elsewhere: bool) -> Iterator[Problem]:
    """Yields the problem of the file, or runs it. Raises MegagrpoError."""
    problem = file_problem(config.name, f"{where}.name")
    if not problem:
        own_tools(config, where)
    elif not elsewhere or ".py:" not in config.name or Path(config.name.rpartition(":")[0]).is_file():
        yield problem


def _python_problems(given: PythonArguments, where: str, elsewhere: bool) -> Iterator[Problem]:
    if elsewhere:
        return
    try:
        checked_kind(given.isolation)
    except ValueError as error:
        yield Problem(where, str(error), "a sandbox that works on this machine", "see docs/security.md")
    for name in given.imports:
        if find_spec(name.partition(".")[0]) is None:
            yield Problem(f"{where}.arguments.imports", name, "modules that are installed", "install it")

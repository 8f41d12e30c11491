"""Checks of the recipe's agent: its file and interpreter, its packages, tools in the chat template, and the parser of
tool calls."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stderr
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megagrpo.errors import AgentError, MegagrpoError, ModelError, Problem, RecipeError, first_line
from megagrpo.recipe.schema import Recipe
from megagrpo.recipe.schema.agent import KINDS, AgentConfig
from megagrpo.recipe.schema.rollout import has_host
from megagrpo.section import problem
from megagrpo.user_functions import file_problem

if TYPE_CHECKING:
    from megagrpo.agents.chat import Facts

PYTHON_MIN = (3, 10)
PACKAGES = {"verifiers": "verifiers", "openenv": "openenv", "reasoning_gym": "reasoning_gym"}
"""Packages that agents of a kind import, beside the standard library."""
START_SECONDS = 120.0
ASKED = (
    "import importlib.util, sys; print(*sys.version_info[:2]);"
    "print(*[name for name in sys.argv[1:] if importlib.util.find_spec(name) is None])"
)
"""The interpreter's version, and which packages it lacks."""
ROLES = {"tools": "tool", "openenv": "user", "reasoning_gym": "user"}
"""Roles of the messages that agents of a kind append to an answer. Other agents are free in that."""


@dataclass
class AgentChecks:
    """The problems, the items that a plan could not check here, and lines about the agent for a plan, by name."""

    problems: list[Problem] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    lines: dict[str, str] = field(default_factory=dict)

    def report(self, rule: str, /, **values: object) -> None:
        self.problems.append(problem(rule, **values))


def check_agent(recipe: Recipe, tokenizer: Path | None, plan_only: bool) -> AgentChecks:
    """Checks the agent. tokenizer: a directory; None if it is not here, and then its template is not checked.

    plan_only: the run may start on another machine, so an interpreter that is not here is unchecked, not wrong.
    """
    agent = recipe.agent
    if agent is None or not any(getattr(agent, kind) for kind in KINDS):  # none: a broken rule of the section
        return AgentChecks()
    from megagrpo.agents.tools.load import tool_problems

    checks = AgentChecks()
    files = {
        "agent.function": agent.function,
        "agent.verifiers.environment": getattr(agent.verifiers, "environment", None),
    }
    files |= {f"agent.openenv.{name}": getattr(agent.openenv, name, None) for name in ("observation", "action")}
    for where, given in files.items():
        if given and ".py:" in given and (of_file := file_problem(given, where)):
            checks.problems.append(of_file)
    if agent.openenv and not has_host(agent.openenv.url):
        checks.report("url_of_openenv", url=agent.openenv.url)
    checks.problems += tool_problems(agent, elsewhere=plan_only)
    if agent.python is None or shutil.which(agent.python) is not None:
        _check_interpreter(checks, agent)
        if agent.function and not checks.problems:
            checks.problems += _function_problems(agent)
    elif plan_only:
        checks.unchecked.append(f"agent.python: {agent.python} is not on this machine")
    else:
        checks.report("python_of_an_agent", python=agent.python)
    right = not checks.problems
    try:
        if tokenizer:
            _check_template(checks, recipe, agent, tokenizer, plan_only)
        if agent.tools and right:
            _check_tools(checks, recipe, agent, tokenizer, plan_only)
    except (ModelError, RecipeError) as error:
        checks.problems += error.problems
    return checks


# --- the program ------------------------------------------------------------------------------------------------------


def _check_interpreter(checks: AgentChecks, agent: AgentConfig) -> None:
    """Runs the interpreter, and reports what is wrong with it, its version or its packages."""
    python, where = agent.python or sys.executable, "agent.python" if agent.python else f"agent.{agent.kind}"
    packages = [PACKAGES[agent.kind]] if agent.kind in PACKAGES else []
    given = ""
    try:
        done = subprocess.run(
            [python, "-c", ASKED, *packages], capture_output=True, text=True, errors="replace", timeout=START_SECONDS
        )
        version, lacking, *_ = done.stdout.splitlines()
        numbers = tuple(map(int, version.split()))
    except subprocess.TimeoutExpired:
        given = f"{python}, which says nothing in {START_SECONDS:.0f} s"
    except OSError as error:
        given = f"{python}: {error.strerror}"
    except ValueError:
        given = f"{python}, which is no Python: exit status {done.returncode}, {_last_line(done.stderr)}"
    if given:
        checks.report("no_interpreter", field=where, given=given)
    elif numbers < PYTHON_MIN:
        versions = {"version": ".".join(map(str, numbers)), "least": ".".join(map(str, PYTHON_MIN))}
        checks.report("old_interpreter", field=where, python=python, **versions)
    elif lacking:
        checks.report("interpreter_without_a_package", field=where, python=python, package=lacking, kind=agent.kind)


def _function_problems(agent: AgentConfig) -> Iterator[Problem]:
    """Starts an agent process, which imports the file. Yields a problem if that fails."""
    from megagrpo.agents.processes import AgentProcess, program_of

    async def failure() -> str:
        program = program_of(agent)
        with tempfile.TemporaryDirectory() as logs:
            log = Path(logs) / "log"
            process = await AgentProcess.start(program, log)
            try:
                async with asyncio.timeout(START_SECONDS):
                    async for message in process.messages():
                        return str(message.get("failed", ""))
            except TimeoutError:
                return f"importing it takes more than {START_SECONDS:.0f} s"
            finally:
                ended = await process.end()
            return f"its process ended: {ended}, {_last_line(log.read_text(errors='replace'))}"

    try:
        failed = asyncio.run(failure())
    except AgentError as error:  # the file cannot be read
        yield from error.problems
        return
    except (OSError, ValueError) as error:
        failed = first_line(error)
    if failed:
        name, arguments = str(agent.function).rpartition(":")[2], ["task", "endpoint", *agent.arguments]
        yield problem("function_of_an_agent", function=agent.function, failed=failed, name=name, arguments=arguments)


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["and it said nothing"])[-1]


# --- the tools --------------------------------------------------------------------------------------------------------


def _check_tools(
    checks: AgentChecks, recipe: Recipe, agent: AgentConfig, tokenizer: Path | None, plan_only: bool
) -> None:
    """Asks every entry for its tools, and counts their tokens with those of the system prompt and an empty message of
    the user's; 0 if the template refuses that. MCP servers are started. Raises ModelError."""
    from megagrpo.agents.processes import environment_of_program, program_of
    from megagrpo.agents.tools.load import offered

    environment = environment_of_program(program_of(agent))
    schemas: dict[str, dict[str, Any]] = {}
    for number, config in enumerate(agent.tool_configs):
        where = f"agent.tools.{number}"
        try:
            with redirect_stderr(StringIO()):  # the servers' messages are in their errors
                tools = asyncio.run(offered(config, where, environment))
        except MegagrpoError as error:
            if plan_only:
                checks.unchecked.append(f"{where}: {error.problems[0].given.splitlines()[0]}")
            else:
                server = f"{config.mcp}: " if config.mcp else ""
                checks.problems += [replace(p, where=where, given=f"{server}{p.given}") for p in error.problems]
            continue
        for tool in tools:
            if tool.name in schemas:
                checks.report("tools_of_one_name", field=where, name=tool.name)
            schemas[tool.name] = tool.schema
    if tokenizer is None or not schemas:
        return
    from megagrpo.agents.chat import chat_of

    chat, system = chat_of(recipe, agent, tokenizer), recipe.data.system_prompt
    messages, most = [{"role": "system", "content": system}] if system else [], recipe.sequence_tokens_max
    try:
        text = chat.render([*messages, {"role": "user", "content": ""}], list(schemas.values()))
        tokens = len(chat.encode(text))
    except Exception:  # noqa: BLE001  templates raise what they like
        tokens = 0
    described = f"{len(schemas)}, which take {tokens:,} of a conversation's {most:,} tokens, with the system prompt"
    checks.lines["tools"] = described
    if tokens >= most:
        checks.report("tools_without_room", most=most, tokens=tokens)


# --- the chat template ------------------------------------------------------------------------------------------------


def _check_template(checks: AgentChecks, recipe: Recipe, agent: AgentConfig, directory: Path, plan_only: bool) -> None:
    """Checks roles and parser by the chat template. Raises ModelError and RecipeError."""
    from megagrpo.agents.chat import chat_of  # imports transformers, which takes seconds
    from megagrpo.agents.tool_calls import BUILT_IN, parser_of, style_of

    chat = chat_of(recipe, agent, directory)
    shown, role = style_of(chat), ROLES.get(agent.kind, "")
    name = shown if agent.parser == "auto" else agent.parser
    if elsewhere := plan_only and name and name not in BUILT_IN and find_spec("sglang") is None:
        checks.unchecked.append(f"agent.parser: {name} is SGLang's, which is not on this machine")
    known = elsewhere or parser_of(agent.parser, chat) is not None
    if role and role not in chat.facts.roles:
        refusal = f": it says {chat.facts.refused[role]!r}" if role in chat.facts.refused else ""
        checks.report("role_of_no_template", role=role, refusal=refusal, kind=agent.kind)
    elif agent.tools and not known:
        checks.report("parser_of_calls", forms=", ".join(BUILT_IN))
    described = f"{shown or 'none'}, by what the chat template shows of calls" if agent.parser == "auto" else name
    checks.lines |= {"template": template_described(chat.facts, agent.history), "parser": described}


def template_described(facts: Facts, history: str) -> str:
    """Describes the messages that may follow an answer in a chat template, and those that start another sequence."""
    if not facts.closes_with:
        return "ends an answer with no stop token: each turn is a sequence of its own"
    described = [f"{_listed(facts.roles)} messages may follow an answer, which ends with {facts.closes_with}"]
    if facts.drops_reasoning:
        after = f"reasoning is left out once a {_listed(facts.drops_reasoning, 'or')} message follows"
        then = "kept, as agent.history says" if history == "append" else "another sequence then begins"
        described.append(f"{after}: {then}")
    else:
        described.append("reasoning stays")
    moves = {"messages": facts.moves, "the tools": facts.moves_tools, "the system message": facts.moves_system}
    for what, roles in moves.items():
        if roles:
            described.append(f"a {_listed(roles, 'or')} message moves {what}: another sequence then begins")
    described += [f"{role} messages are refused: {refusal}" for role, refusal in sorted(facts.refused.items())]
    return "; ".join(described)


def _listed(names: frozenset[str], joined: str = "and") -> str:
    return f" {joined} ".join(sorted(names)) or "no"

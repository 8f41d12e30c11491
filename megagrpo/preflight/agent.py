"""Checks of the recipe's agent: its file and interpreter, its packages, tools in the chat template, and the parser of
tool calls."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from megagrpo.errors import AgentError, MegagrpoError, ModelError, Problem, RecipeError, first_line
from megagrpo.recipe.schema import Recipe
from megagrpo.recipe.schema.agent import KINDS, AgentConfig
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


@dataclass(frozen=True)
class AgentChecks:
    """The problems, the items that a plan could not check here, and lines about the agent for a plan, by name."""

    problems: tuple[Problem, ...] = ()
    unchecked: tuple[str, ...] = ()
    lines: dict[str, str] = field(default_factory=dict)


def check_agent(recipe: Recipe, tokenizer: Path | None, plan_only: bool) -> AgentChecks:
    """Checks the agent. tokenizer: a directory; None if it is not here, and then its template is not checked.

    plan_only: the run may start on another machine, so an interpreter that is not here is unchecked, not wrong.
    """
    agent = recipe.agent
    if agent is None or not any(getattr(agent, kind) for kind in KINDS):  # none: a broken rule of the section
        return AgentChecks()
    from megagrpo.agents.tools.load import tool_problems

    problems, unchecked = [*_settings(agent), *tool_problems(agent, elsewhere=plan_only)], []
    here = agent.python is None or shutil.which(agent.python) is not None
    if not here and plan_only:
        unchecked.append(f"agent.python: {agent.python} is not on this machine")
    elif not here:
        fix = "check the path; relative paths start at the working directory"
        problems.append(Problem("agent.python", f"{agent.python}, which is no program here", "an interpreter", fix))
    elif of_interpreter := list(_interpreter(agent)):
        problems += of_interpreter
    elif agent.function and not problems:
        problems += _function(agent)
    lines: dict[str, str] = {}
    try:
        checks = [_template(recipe, agent, tokenizer, plan_only)] if tokenizer else []
        checks += [_tools(recipe, agent, tokenizer, plan_only)] if agent.tools and not problems else []
        for one in checks:
            problems, unchecked, lines = [*problems, *one.problems], [*unchecked, *one.unchecked], lines | one.lines
    except (ModelError, RecipeError) as error:
        problems += error.problems
    return AgentChecks(tuple(problems), tuple(unchecked), lines)


# --- the program ------------------------------------------------------------------------------------------------------


def _settings(agent: AgentConfig) -> Iterator[Problem]:
    if agent.function and (problem := file_problem(agent.function, "agent.function")):
        yield problem
    files = {"agent.verifiers.environment": agent.verifiers and agent.verifiers.environment}
    files |= {f"agent.openenv.{name}": getattr(agent.openenv, name, None) for name in ("observation", "action")}
    for where, given in files.items():
        if given and ".py:" in given and (problem := file_problem(given, where)):
            yield problem
    if agent.openenv and urlsplit(agent.openenv.url).scheme not in ("http", "https"):
        yield Problem(
            "agent.openenv.url", agent.openenv.url, "http:// or https://, and a host", "write http://host:8000"
        )


def _interpreter(agent: AgentConfig) -> Iterator[Problem]:
    """Runs the interpreter, and yields a problem of it, its version or its packages."""
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
        yield Problem(where, given, "a Python interpreter", "check the path")
    elif numbers < PYTHON_MIN:
        needed = f"Python {'.'.join(map(str, PYTHON_MIN))} or newer"
        yield Problem(where, f"{python}, Python {'.'.join(map(str, numbers))}", needed, "another interpreter")
    elif lacking:
        fix = f"install {lacking} there, or set agent.python to an interpreter that has it"
        yield Problem(where, f"{python}, without the package {lacking}", f"{lacking}, for agent.{agent.kind}", fix)


def _function(agent: AgentConfig) -> Iterator[Problem]:
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
        function, called = str(agent.function).rpartition(":")[2], ", ".join(["task", "endpoint", *agent.arguments])
        needed = f"a file that can be imported, with a function that can be called as {function}({called})"
        yield Problem("agent.function", f"{agent.function}: {failed}", needed, "correct the file, or agent.arguments")


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["and it said nothing"])[-1]


# --- the tools --------------------------------------------------------------------------------------------------------


def _tools(recipe: Recipe, agent: AgentConfig, tokenizer: Path | None, plan_only: bool) -> AgentChecks:
    """Asks every entry for its tools, and counts their tokens with those of the system prompt. MCP servers are started.

    Raises ModelError.
    """
    from megagrpo.agents.processes import environment_of_program, program_of
    from megagrpo.agents.tools.load import offered

    environment = environment_of_program(program_of(agent))
    schemas: dict[str, dict[str, Any]] = {}
    problems, unchecked = list[Problem](), list[str]()
    for number, config in enumerate(agent.tool_configs):
        where = f"agent.tools.{number}"
        try:
            with redirect_stderr(StringIO()):  # what servers say is in their errors
                tools = asyncio.run(offered(config, where, environment))
        except MegagrpoError as error:
            if plan_only:
                unchecked.append(f"{where}: {error.problems[0].given.splitlines()[0]}")
            else:
                server = f"{config.mcp}: " if config.mcp else ""
                problems += [replace(each, where=where, given=f"{server}{each.given}") for each in error.problems]
            continue
        for tool in tools:
            if tool.name in schemas:
                given, fix = f"a tool called {tool.name}, as another one is", "give one a call_name"
                problems.append(Problem(where, given, "a name for each", fix))
            schemas[tool.name] = tool.schema
    if tokenizer is None or not schemas:
        return AgentChecks(tuple(problems), tuple(unchecked))
    tokens, most = _tokens_before_prompts(recipe, agent, tokenizer, list(schemas.values())), recipe.sequence_tokens_max
    described = f"{len(schemas)}, which take {tokens:,} of a conversation's {most:,} tokens, with the system prompt"
    if tokens >= most:
        needed, fix = "room for a prompt and an answer", "raise agent.tokens_max, or offer fewer tools"
        problems.append(Problem("agent.tokens_max", f"{most}; {tokens} are tools and the system prompt", needed, fix))
    return AgentChecks(tuple(problems), tuple(unchecked), {"tools": described})


def _tokens_before_prompts(
    recipe: Recipe, agent: AgentConfig, tokenizer: Path, tools: Sequence[Mapping[str, Any]]
) -> int:
    """Returns the tokens of a conversation with an empty user message, by the template. 0 if it refuses that."""
    from megagrpo.agents.chat import chat_of

    chat, system = chat_of(recipe, agent, tokenizer), recipe.data.system_prompt
    said = [{"role": "system", "content": system}] if system else []
    try:
        return len(chat.encode(chat.render([*said, {"role": "user", "content": ""}], tools)))
    except Exception:  # noqa: BLE001  templates raise what they like
        return 0


# --- the chat template ------------------------------------------------------------------------------------------------


def _template(recipe: Recipe, agent: AgentConfig, directory: Path, plan_only: bool) -> AgentChecks:
    """Checks roles and parser by the chat template. Raises ModelError and RecipeError."""
    from megagrpo.agents.chat import chat_of  # imports transformers, which takes seconds
    from megagrpo.agents.tool_calls import BUILT_IN, parser_of, style_of

    chat = chat_of(recipe, agent, directory)
    shown, role = style_of(chat), ROLES.get(agent.kind, "")
    name, problems, unchecked = (shown if agent.parser == "auto" else agent.parser), list[Problem](), list[str]()
    if plan_only and name and name not in BUILT_IN and find_spec("sglang") is None:
        unchecked.append(f"agent.parser: {name} is SGLang's, which is not on this machine")
        known = True
    else:
        known = parser_of(agent.parser, chat) is not None
    if role and role not in chat.facts.roles:
        said = f": it says {chat.facts.refused[role]!r}" if role in chat.facts.refused else ""
        given = f"one that writes no {role} message behind an answer{said}"
        fix = "set model.chat_template to a template that does, or use a model that was trained with one"
        problems.append(Problem("model.chat_template", given, f"{role} messages, for agent.{agent.kind}", fix))
    elif agent.tools and not known:
        given = f"auto, and the chat template shows {shown or 'no call that is known here'}"
        needed = "hermes or llama3 of megagrpo, or a parser of SGLang, where it is installed"
        problems.append(Problem("agent.parser", given, needed, "install SGLang, or name how the model writes calls"))
    described = (
        agent.parser if agent.parser != "auto" else f"{shown or 'none'}, by what the chat template shows of calls"
    )
    lines = {"template": template_described(chat.facts, agent.history), "parser": described}
    return AgentChecks(tuple(problems), tuple(unchecked), lines)


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
    described += [f"{role} messages are refused: {said}" for role, said in sorted(facts.refused.items())]
    return "; ".join(described)


def _listed(names: frozenset[str], joined: str = "and") -> str:
    return f" {joined} ".join(sorted(names)) or "no"

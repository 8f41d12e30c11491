"""Tools of the user's own: FILE.py:NAME of a function, or of a class whose objects are the state of one rollout.

Signature and type hints make a tool's JSON schema, by pydantic; the docstring describes the function and its
parameters, in the style of Google, NumPy or reST.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError

from megagrpo.agents.tools.tool import Arguments, CallError, Session, Tool, written
from megagrpo.errors import Problem, RecipeError, first_line
from megagrpo.recipe.schema.agent import ToolConfig
from megagrpo.user_functions import load_function, refused_call

Result = TypeVar("Result")
Lock = contextlib.AbstractAsyncContextManager[None]
TASK = "task"
"""A parameter of this name gets the rollout's task. The policy does not see it."""
NOT_TOOLS = ("reward", "close")
"""Methods of a class that the loop calls itself, at the end."""
SECTIONS = re.compile(r"(args|arguments|parameters|params|returns?|raises|yields|examples?|notes?)\s*:?\s*$", re.I)
PARAMETERS = ("args", "arguments", "parameters", "params")


def own_tools(config: ToolConfig, where: str) -> OwnFunction | OwnClass:
    """Returns the provider of FILE.py:NAME. Runs the file. Raises RecipeError for what can be no tool."""
    made = load_function(config.name, where, RecipeError)
    return (OwnClass if inspect.isclass(made) else OwnFunction)(config, made, where)


class _Own:
    """The common part of functions and classes. Coroutines run in an event loop of the tool's own, in a thread: one
    that blocks delays that tool's others, and no rollout's turns."""

    def __init__(self, config: ToolConfig, made: Callable[..., Any], where: str) -> None:
        """Raises RecipeError if the recipe's arguments do not fit the parameters."""
        self.config, self.made = config, made
        signature = inspect.signature(made)
        self._takes_task = TASK in signature.parameters
        self._gate = asyncio.Semaphore(config.calls_at_once)
        self._loop: asyncio.AbstractEventLoop | None = None
        if unknown := [name for name in config.arguments if name not in signature.parameters]:
            given = f"{', '.join(unknown)}, for {made.__name__}{signature}"
            raise RecipeError(Problem(f"{where}.arguments", given, "names of its parameters", "correct the names"))
        if inspect.isclass(made) and (refusal := refused_call(made, **self._fixed(None))):
            given = f"{made.__name__}{signature}: {refusal}"
            raise RecipeError(Problem(f"{where}.arguments", given, "all that it is made with", "add them"))

    def _fixed(self, task: Any) -> dict[str, Any]:
        """Returns the arguments that the policy does not choose."""
        return {**self.config.arguments, **({TASK: task} if self._takes_task else {})}

    def _tool(
        self, name: str, function: Callable[..., Any], schema: FunctionSchema, fixed: Mapping[str, Any], in_turn: Lock
    ) -> Tool:
        """Returns a tool that calls `function` off the rollouts' loop, while it holds the lock."""

        async def call(given: Arguments) -> str:
            named = {**schema.read(given), **fixed}
            async with in_turn:
                return written(await self._called(function, **named))

        return Tool(self.config, self._gate, name, schema.description, schema.parameters, call)

    async def _called(self, function: Callable[..., Any], /, **named: Any) -> Any:
        if inspect.iscoroutinefunction(inspect.unwrap(function)):
            return await self._run(function(**named))
        result = await in_thread(lambda: function(**named))
        return await self._run(_awaited(result)) if inspect.isawaitable(result) else result

    async def _run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Runs the coroutine in the tool's event loop. Cancels it with the caller."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name=self.config.name, daemon=True).start()
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))


class OwnFunction(_Own):
    """A function: the same for all rollouts, but for its parameter `task` if it has one."""

    def __init__(self, config: ToolConfig, made: Callable[..., Any], where: str) -> None:
        super().__init__(config, made, where)
        self._schema = function_schema(made, where, {*config.arguments, TASK})

    @asynccontextmanager
    async def session(self, task: Any) -> AsyncIterator[Session]:
        no_lock = contextlib.nullcontext()
        yield Session([self._tool(self.made.__name__, self.made, self._schema, self._fixed(task), no_lock)])


class OwnClass(_Own):
    """A class: an object for each rollout, made with the recipe's arguments. Its public methods are tools.

    `prepare()`, if it is a class method, is called once in an agent process, before any rollout begins.
    `reward()`, if there is one, is called at the end, then `close()`. If its attribute `done` is true after a turn's
    calls, the rollout ends. The methods of one object run one after another.
    """

    def __init__(self, config: ToolConfig, made: Any, where: str) -> None:
        super().__init__(config, made, where)
        # In the order in which they are written, a base class's first.
        names = {name: None for part in reversed(made.__mro__) if part is not object for name in vars(part)}
        methods = {name: getattr(made, name) for name in names if not name.startswith("_") and name not in NOT_TOOLS}
        self._schemas = {
            name: function_schema(method, f"{where}, method {name}", {"self"})
            for name, method in methods.items()
            if inspect.isfunction(method)
        }
        if not self._schemas:
            given = f"{made.__name__} has no public method"
            raise RecipeError(Problem(where, given, "methods, each a tool, or a function", "add a method"))
        if config.call_name and len(self._schemas) > 1:
            given = f"{config.call_name}, for {', '.join(self._schemas)}"
            raise RecipeError(Problem(f"{where}.call_name", given, "null: methods have their own names", "remove it"))

    async def prepare(self) -> None:
        """Calls the class's class method `prepare`, if it has one, with the recipe's arguments."""
        if inspect.ismethod(prepare := getattr(self.made, "prepare", None)):
            await self._called(prepare, **self.config.arguments)

    @asynccontextmanager
    async def session(self, task: Any) -> AsyncIterator[Session]:
        state = await in_thread(partial(self.made, **self._fixed(task)))
        reward = getattr(state, "reward", None)
        score = (lambda: self._called(reward)) if callable(reward) else None
        try:
            yield Session(self.tools_of(state), score, lambda: bool(getattr(state, "done", False)))
        finally:
            if callable(close := getattr(state, "close", None)):
                async with asyncio.timeout(self.config.timeout_seconds):
                    await self._called(close)

    def tools_of(self, state: Any) -> list[Tool]:
        """Returns the tools of `state`: an object, or the class, whose tools can be shown and not called."""
        in_turn = asyncio.Lock()
        return [self._tool(name, getattr(state, name), schema, {}, in_turn) for name, schema in self._schemas.items()]


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


async def in_thread(function: Callable[[], Result]) -> Result:
    """Calls the function in a thread of its own and returns its result.

    The thread is not waited for if the caller is cancelled: nothing can end it, but it ends with the process. (A pool's
    threads would be waited for at the process's end.)
    """
    future: Future[Result] = Future()
    future.set_running_or_notify_cancel()  # from here on only the caller's own future can be cancelled

    def work() -> None:
        try:
            future.set_result(function())
        except (StopIteration, SystemExit) as error:  # a future refuses one, and one call ends no agent process
            future.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
        except BaseException as error:  # noqa: BLE001  (it is the caller's)
            future.set_exception(error)

    threading.Thread(target=work, name="tool call", daemon=True).start()
    return await asyncio.wrap_future(future)


# --- schemas ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FunctionSchema:
    """A function as a tool."""

    description: str
    parameters: Mapping[str, Any]
    model: type[BaseModel]
    names: tuple[str, ...]

    def read(self, given: Arguments) -> dict[str, Any]:
        """Returns the function's keyword arguments, converted to the types of the hints where possible ("3" to 3).

        Raises CallError that says what is wrong with each argument.
        """
        try:
            read = self.model.model_validate(given)
        except ValidationError as error:
            wrong = [f"{'.'.join(map(str, one['loc'])) or 'arguments'}: {one['msg']}" for one in error.errors()]
            raise CallError(f"wrong arguments. {'; '.join(wrong)}") from None
        given_ones = read.model_fields_set
        return {name: getattr(read, f"p{i}") for i, name in enumerate(self.names) if f"p{i}" in given_ones}


def function_schema(function: Callable[..., Any], where: str, hidden: Collection[str] = ()) -> FunctionSchema:
    """Returns the schema of a function's parameters without `hidden` ones. Raises RecipeError for a function that can
    be no tool: parameters without names, or hints that no JSON can be."""
    name = getattr(function, "__name__", type(function).__name__)
    described, texts = read_docstring(inspect.getdoc(function) or "")
    fields: dict[str, Any] = {}
    names: list[str] = []
    try:
        # The hints of a bound method are at its function.
        hints = get_type_hints(inspect.unwrap(getattr(function, "__func__", function)), include_extras=True)
        for parameter in inspect.signature(function).parameters.values():
            if parameter.name in hidden:
                continue
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                given = f"{name}{inspect.signature(function)}"
                raise RecipeError(Problem(where, given, "parameters that all have names", f"change {parameter}"))
            default = ... if parameter.default is parameter.empty else parameter.default
            text: dict[str, Any] = {"description": texts[parameter.name]} if texts.get(parameter.name) else {}
            fields[f"p{len(names)}"] = (hints.get(parameter.name, Any), Field(default, alias=parameter.name, **text))
            names.append(parameter.name)
        config = ConfigDict(extra="forbid", coerce_numbers_to_str=True)
        model = create_model("Arguments", __config__=config, **fields)
        schema = without_titles(model.model_json_schema(by_alias=True))
    except (NameError, TypeError, PydanticUserError) as error:
        given = f"{name}: {first_line(error)}"
        needed = "hints that JSON can carry: str, int, float, bool, list, dict, Literal, dataclasses, pydantic models"
        raise RecipeError(Problem(where, given, needed, "change the hints")) from None
    schema.pop("additionalProperties", None)
    return FunctionSchema(described, schema, model, tuple(names))


def without_titles(schema: Any, *, named: bool = False) -> Any:
    """Returns a JSON schema without the titles that pydantic makes of names. named: its keys are names of schemas."""
    if isinstance(schema, list):
        return [without_titles(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: value
        if not named and key in ("default", "const", "enum", "examples")
        else without_titles(value, named=not named and key in ("properties", "$defs"))
        for key, value in schema.items()
        if named or key != "title"
    }


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Returns a docstring's description of the function (all paragraphs before its sections) and of each parameter.

    >>> read_docstring("Adds.\\n\\nArgs:\\n    a (int): One number.\\n        Any.\\n\\nReturns:\\n    The sum.")
    ('Adds.', {'a': 'One number. Any.'})
    """
    described: list[str] = []
    texts: dict[str, str] = {}
    section, name = "", ""
    indent = 0  # of parameters in Google's style: lines that are indented further continue the last one
    lines = text.splitlines()
    for line, after in zip(lines, [*lines[1:], ""], strict=False):
        stripped = line.strip()
        if parameter := re.match(r":(?:param|parameter|arg)\s+(?:[\w\[\], ]+\s)?(\w+)\s*:\s*(.*)", stripped):
            section, name = "args", parameter[1]
            texts[name] = parameter[2]
        elif stripped.startswith(":") and re.match(r":(return|returns|raises|rtype|type)\b", stripped):
            section = "returns"
        elif SECTIONS.fullmatch(stripped) and (stripped.endswith(":") or re.fullmatch(r"\s*-{3,}\s*", after)):
            section, name, indent = stripped.rstrip(": ").lower(), "", 0
        elif not section:
            described.append(line.rstrip())
        elif section in PARAMETERS and stripped and not re.fullmatch(r"-{3,}", stripped):
            parameter = re.match(r"(\s*)(\w+)\s*(?:\([^)]*\))?\s*:\s+(\S.*)$", line)
            if parameter and parameter[1] and len(parameter[1]) <= (indent or len(line)):
                name, indent = parameter[2], len(parameter[1])
                texts[name] = parameter[3].strip()
            elif not line.startswith(" ") and (parameter := re.match(r"(\w+)\s*(:.*)?$", line)):  # NumPy: text follows
                name = parameter[1]
                texts[name] = ""
            elif name:
                texts[name] = f"{texts[name]} {stripped}".strip()
    return "\n".join(described).strip(), texts

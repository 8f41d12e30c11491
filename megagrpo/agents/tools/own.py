"""Tools of the user's own: FILE.py:NAME of a function, or of a class whose objects are the state of one rollout."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from megagrpo.agents.tools.function_schema import FunctionSchema, function_schema
from megagrpo.agents.tools.tool import Arguments, Session, Tool, written
from megagrpo.errors import Problem, RecipeError
from megagrpo.recipe.schema.tools import ToolConfig
from megagrpo.user_functions import load_function, refused_call

Result = TypeVar("Result")
Lock = contextlib.AbstractAsyncContextManager[None]
TASK = "task"
"""A parameter of this name gets the rollout's task. The policy does not see it."""
NOT_TOOLS = ("reward", "close")
"""Methods of a class that the loop calls itself, at the end."""


def own_tools(config: ToolConfig, where: str) -> OwnFunction | OwnClass:
    """Returns the provider of FILE.py:NAME. Runs the file. Raises RecipeError for what can be no tool."""
    made = load_function(config.name, where, RecipeError)
    return (OwnClass if inspect.isclass(made) else OwnFunction)(config, made, where)


class _Own:
    """The common part of functions and classes."""

    def __init__(self, config: ToolConfig, made: Callable[..., Any], where: str) -> None:
        """Raises RecipeError if the recipe's arguments do not fit."""
        _check(made, config.arguments, where)
        self.config, self.made = config, made
        self._takes_task = TASK in inspect.signature(made).parameters
        self._gate = asyncio.Semaphore(config.calls_at_once)
        self._loop = OwnLoop(config.name)

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
                return written(await _called(self._loop, function, **named))

        return Tool(self.config, self._gate, name, schema.description, schema.parameters, call)


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
        self._schemas = {
            name: function_schema(function, f"{where}, method {name}", {"self"}) for name, function in _methods(made)
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
            await _called(self._loop, partial(prepare, **self.config.arguments))

    @asynccontextmanager
    async def session(self, task: Any) -> AsyncIterator[Session]:
        state = await in_thread(partial(self.made, **self._fixed(task)))
        reward = getattr(state, "reward", None)
        score = (lambda: _called(self._loop, reward)) if callable(reward) else None
        try:
            yield Session(self.tools_of(state), score, lambda: bool(getattr(state, "done", False)))
        finally:
            if callable(close := getattr(state, "close", None)):
                async with asyncio.timeout(self.config.timeout_seconds):
                    await _called(self._loop, close)

    def tools_of(self, state: Any) -> list[Tool]:
        """Returns the tools of `state`: an object, or the class, whose tools can be shown and not called."""
        in_turn = asyncio.Lock()
        return [self._tool(name, getattr(state, name), schema, {}, in_turn) for name, schema in self._schemas.items()]


async def _called(loop: OwnLoop, function: Callable[..., Any], **named: Any) -> Any:
    if inspect.iscoroutinefunction(inspect.unwrap(function)):
        return await loop.run(function(**named))
    result = await in_thread(lambda: function(**named))
    return await loop.run(_awaited(result)) if inspect.isawaitable(result) else result


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


def _methods(made: type[Any]) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yields public methods in the order in which they are written, a base class's first."""
    names = {name: None for part in reversed(made.__mro__) if part is not object for name in vars(part)}
    for name in names:
        function = getattr(made, name)
        if not name.startswith("_") and name not in NOT_TOOLS and inspect.isfunction(function):
            yield name, function


def _check(function: Callable[..., Any], fixed: Mapping[str, Any], where: str) -> None:
    """Raises RecipeError if the recipe's arguments do not fit the function's parameters."""
    known = inspect.signature(function).parameters
    if unknown := [name for name in fixed if name not in known]:
        given = f"{', '.join(unknown)}, for {function.__name__}{inspect.signature(function)}"
        raise RecipeError(Problem(f"{where}.arguments", given, "names of its parameters", "correct the names"))
    if inspect.isclass(function):
        task = {TASK: None} if TASK in known else {}
        if refusal := refused_call(function, **{**fixed, **task}):
            given = f"{function.__name__}{inspect.signature(function)}: {refusal}"
            raise RecipeError(Problem(f"{where}.arguments", given, "all that it is made with", "add them"))


# --- threads and an event loop for users' code, so that it blocks no rollout of an agent process ----------------------


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


class OwnLoop:
    """A thread with an event loop for the coroutines of one tool. A coroutine that blocks delays that tool's
    others, and no rollout's turns."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Runs the coroutine and returns its result. Cancels it with the caller."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name=self._name, daemon=True).start()
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

"""The tool `python`: runs what the policy writes in the sandbox of reward programs (reward/sandbox).

Each call is a program of its own, or, with a state, one more cell of the rollout's notebook: one process that keeps its
variables until the rollout ends. A notebook's process waits in a sandbox for it alone.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from typing import Any

from megagrpo.agents.tools.tool import Arguments, CallError, Session, Tool
from megagrpo.recipe.schema.agent import PythonArguments, ToolConfig
from megagrpo.reward.sandbox.harness import IMPORTED_FIRST
from megagrpo.reward.sandbox.programs import Program, working_kind
from megagrpo.reward.sandbox.sandbox import Limits, Sandbox, installed_packages

DESCRIPTION = """Runs Python code and returns what it prints, and the value of the last line if that is an expression. \
There is no network, and no file can be kept."""
STATEFUL = """Runs Python code and returns what it prints, and the value of the last line if that is an expression. \
Variables, functions and imports are kept for later calls. There is no network."""
PARAMETERS = {
    "type": "object",
    "properties": {"code": {"type": "string", "description": "The code. Use print(...) to see values."}},
    "required": ["code"],
}
FOREVER = 1e6
"""Timeout in seconds of a notebook's process; its rollout ends it sooner."""
CELL = """
import sys
def _run_cell():
    import ast, io, linecache, traceback, types
    text = sys.stdin.read()
    cell = sys.modules.get("megagrpo_cell")
    if cell is None:
        cell = sys.modules["megagrpo_cell"] = types.ModuleType("__main__")
    sys.modules["__main__"] = cell
    sys.stdin = io.StringIO()
    sys.stderr = sys.stdout
    linecache.cache["code.py"] = (len(text), None, text.splitlines(True), "code.py")
    try:
        parts = ast.parse(text, "code.py")
        last = parts.body.pop() if parts.body and isinstance(parts.body[-1], ast.Expr) else None
        exec(compile(parts, "code.py", "exec"), vars(cell))
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "code.py", "eval"), vars(cell))
            if value is not None:
                print(repr(value))
    except SystemExit:
        pass
    except BaseException as raised:
        traceback.print_exception(type(raised), raised, _in_cell(raised.__traceback__))
def _in_cell(trace):
    while trace is not None and trace.tb_frame.f_code.co_filename != "code.py":
        trace = trace.tb_next
    return trace
_run_cell()
"""
"""Runs in the sandbox: one cell, which it reads from standard input. An exception is output as any other, so that the
policy can read it."""
GRACE_SECONDS = 30.0
"""The sandbox ends a call in its time. The loop waits longer by this, so that it never leaves one that runs."""
FAILURES = {
    "took too long": "the code took too long",
    "printed too much": "the code printed too much",
    "failed": "the code ended its process",
}


class PythonTool:
    """One process's sandboxes: `calls_at_once` for calls, or one for each rollout that has a notebook.

    Raises RewardError if this machine has no such sandbox.
    """

    def __init__(self, config: ToolConfig, arguments: PythonArguments) -> None:
        self.config = config
        self.limit = config.model_copy(update={"timeout_seconds": config.timeout_seconds + GRACE_SECONDS})
        self.kind = working_kind(arguments.isolation)
        self.limits = Limits(memory_bytes=arguments.memory_mib << 20)
        self.packages = installed_packages() if arguments.packages or arguments.imports else []
        # Under seccomp alone no module can be imported later.
        first = IMPORTED_FIRST.split() if self.kind.isolation == "seccomp" else []
        lines = [f"import {name}" for name in (*first, *arguments.imports)]
        self.preload = "\n".join([*lines, "def prepare(): pass"])
        self.gate = asyncio.Semaphore(config.calls_at_once)
        # The kernel ends a sandbox with the thread that started it: these stay.
        self._threads = ThreadPoolExecutor(config.calls_at_once, thread_name_prefix="sandbox")
        self.free: deque[Sandbox] = deque()

    @asynccontextmanager
    async def session(self, task: Any) -> AsyncIterator[Session]:
        notebook = Notebook(self)
        in_turn = asyncio.Lock()

        async def call(given: Arguments) -> str:
            code = code_of(given)
            if not self.config.stateful:
                return await self._blocking(self._program, code)
            async with in_turn:
                try:
                    return await self._blocking(notebook.run, code)
                except CallError as error:
                    raise CallError(f"{error}. The variables of earlier calls are gone.") from None

        described = STATEFUL if self.config.stateful else DESCRIPTION
        try:
            yield Session([Tool(self.limit, self.gate, "python", described, PARAMETERS, call)])
        finally:
            await asyncio.shield(self._blocking(notebook.close))

    async def _blocking(self, function: Any, *arguments: object) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    def take(self) -> Sandbox:
        """Returns a sandbox that is free, or a new one."""
        try:
            return self.free.pop()
        except IndexError:
            return Sandbox(self.kind, self.limits, self.packages, self.preload)

    def _program(self, code: str) -> str:
        notebook = Notebook(self, self.config.timeout_seconds)
        try:
            return notebook.run(code)
        finally:
            notebook.close()


class Notebook:
    """The state of one rollout: a process that runs one cell after another."""

    def __init__(self, tool: PythonTool, seconds: float = FOREVER) -> None:
        self.tool, self.seconds = tool, seconds
        self._program: Program | None = None
        self._closed = False
        # A rollout that is given up leaves the thread of its last call running; `close` waits for that.
        self._one_at_a_time = threading.Lock()

    def run(self, code: str) -> str:
        """Runs one cell and returns its output. Raises CallError if the process ended: the next cell starts anew."""
        with self._one_at_a_time:
            if self._closed:
                raise CallError("the rollout has ended")
            if self._program is None:
                with ExitStack() as failing:
                    failing.callback(self.tool.free.append, sandbox := self.tool.take())
                    self._program = Program(sandbox, CELL, deadline=time.monotonic() + self.seconds)
                    failing.pop_all()
            ran = self._program.run(code, self.tool.config.timeout_seconds)
            if ran.failure:
                self._program.stop()
                raise CallError(FAILURES.get(ran.failure, f"the code ended: {ran.failure}"))
            return str(ran.value).rstrip() or "(no output)"

    def close(self) -> None:
        with self._one_at_a_time:
            self._closed = True
            if self._program is not None:
                self._program.stop()
                self.tool.free.append(self._program.sandbox)
                self._program = None


def code_of(given: Arguments) -> str:
    """Returns the code of a call, without the fences that some policies write around it. Raises CallError."""
    code = given.get("code")
    if not isinstance(code, str) or not code.strip():
        raise CallError('give the code to run: {"code": "print(1)"}')
    lines = code.strip().splitlines()
    if lines[0].startswith("```") and lines[-1].strip() == "```":
        return "\n".join(lines[1:-1])
    return code

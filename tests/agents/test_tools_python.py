"""The tool `python` in real sandboxes: programs of their own, and notebooks of rollouts."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from megagrpo.agents.tools.load import provider
from megagrpo.agents.tools.python_program import PythonTool
from megagrpo.agents.tools.tool import Called, answer
from megagrpo.recipe.schema.agent import ToolConfig

Run = Callable[[str], Awaitable[Called]]
KINDS = (pytest.param("bubblewrap", marks=pytest.mark.needs("bubblewrap")), "seccomp")


def notebooks(config: ToolConfig, count: int, use: Callable[[list[Run], PythonTool], Awaitable[Any]]) -> Any:
    """Returns the result of `use`, called with `count` notebooks, one for each rollout."""

    async def run() -> Any:
        tool: Any = provider(config, "agent.tools.0")
        async with contextlib.AsyncExitStack() as stack:
            runs: list[Run] = []
            for _ in range(count):
                session = await stack.enter_async_context(tool.session(None))
                tools = {one.name: one for one in session.tools}
                runs.append(lambda code, tools=tools: answer(tools["python"], {"code": code}))
            return await use(runs, tool)

    return asyncio.run(run())


def python(stateful: bool, isolation: str = "auto", **more: Any) -> ToolConfig:
    return ToolConfig(name="python", stateful=stateful, arguments={"isolation": isolation, **more}, timeout_seconds=20)


@pytest.mark.parametrize("isolation", KINDS)
@pytest.mark.parametrize("stateful", [False, True])
def test_code_says_what_it_prints_its_last_value_and_its_errors(stateful: bool, isolation: str) -> None:
    async def use(runs: list[Run], _: PythonTool) -> None:
        (run,) = runs
        assert (await run("print('a')\n1 + 1")).text == "a\n2"
        assert (await run("x = 1")).text == "(no output)"
        assert (await run("```python\nprint('fenced')\n```")).text == "fenced"
        wrong = await run("def f():\n    return 1 / 0\nf()")
        assert wrong.text.splitlines()[-1] == "ZeroDivisionError: division by zero"
        assert "line 2, in f" in wrong.text
        assert "_run_cell" not in wrong.text
        assert wrong.error == ""  # the policy's mistake, not the tool's
        assert "SyntaxError" in (await run("def f(:")).text
        assert (await run("import argparse, statistics; statistics.mean([1, 3])")).text == "2"
        assert "PermissionError" in (await run("import socket; socket.socket()")).text
        assert (await run("")).error
        assert (await run("print('x' * 50_000)")).text.count("x") < 10_000

    notebooks(python(stateful, isolation), 1, use)


@pytest.mark.parametrize("isolation", KINDS)
def test_a_notebook_keeps_its_variables_and_sees_no_other_rollouts(isolation: str) -> None:
    async def use(runs: list[Run], _: PythonTool) -> None:
        for number, run in enumerate(runs):
            await run(f"import math\nx = {number}\ndef f(): return x + 1")
        assert [(await run("math.floor(f())")).text for run in runs] == ["1", "2", "3"]
        both = await asyncio.gather(runs[0]("x += 10; print(x)"), runs[0]("x += 10; print(x)"))
        assert [result.text for result in both] == ["10", "20"]
        raised = await runs[0]("y = 5\nx = 7\nraise ValueError")
        assert "ValueError" in raised.text
        assert (await runs[0]("x, y")).text == "(7, 5)"

    notebooks(python(stateful=True, isolation=isolation), 3, use)


def test_programs_without_a_state_see_no_earlier_ones() -> None:
    async def use(runs: list[Run], _: PythonTool) -> None:
        await runs[0]("x = 1\nopen('left', 'w').write('x')")
        assert "NameError" in (await runs[0]("x")).text
        assert "FileNotFoundError" in (await runs[0]("open('left')")).text

    notebooks(python(stateful=False), 1, use)


def test_a_notebook_that_hangs_or_ends_its_process_is_told_that_its_variables_are_gone() -> None:
    async def use(runs: list[Run], _: PythonTool) -> None:
        one, other = runs
        assert (await other("kept = 3")).error == ""
        for code in ("while True: pass", "import os; os._exit(3)", "print('x' * 10**7)"):
            await one("x = 1")
            late = await one(code)
            assert late.error
            assert "variables of earlier calls are gone" in late.text
            assert "NameError" in (await one("x")).text
        assert (await other("kept")).text == "3"

    config = python(stateful=True).model_copy(update={"timeout_seconds": 1.0})
    notebooks(config, 2, use)


def test_a_rollout_that_is_given_up_leaves_no_process_and_its_sandbox_to_others() -> None:
    async def use(runs: list[Run], tool: PythonTool) -> None:
        async with tool.session(None) as session:
            tools = {one.name: one for one in session.tools}
            await answer(tools["python"], {"code": "x = 1"})
            call = asyncio.create_task(answer(tools["python"], {"code": "while True: pass"}))
            await asyncio.sleep(0)
            call.cancel()
        assert len(tool.free) == 1
        assert "NameError" in (await runs[0]("x")).text
        assert len(tool.free) == 0

    notebooks(python(stateful=True).model_copy(update={"timeout_seconds": 1.0}), 1, use)


def test_installed_packages_can_be_imported_if_the_recipe_says_so() -> None:
    async def use(runs: list[Run], _: PythonTool) -> str:
        return (await runs[0]("import numpy; int(numpy.arange(4).sum())")).text

    assert "ModuleNotFoundError" in notebooks(python(stateful=False), 1, use)
    assert notebooks(python(stateful=False, imports=["numpy"]), 1, use) == "6"

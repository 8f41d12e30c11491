"""Functions and classes of the user's own as tools: what the policy is told of them, and how calls run and fail."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megagrpo.agents.tools.load import loaded, provider
from megagrpo.agents.tools.own import read_docstring
from megagrpo.agents.tools.tool import Called, Tool, answer, shortened
from megagrpo.errors import RecipeError
from megagrpo.recipe.schema.agent import ToolConfig
from megagrpo.user_functions import load_function
from tests.agents.own_tools import Counter

FILE = Path(__file__).with_name("own_tools.py")
TASK = SimpleNamespace(id="task 7", ground_truth="42", messages=[])
Call = Callable[[str, Any], Awaitable[Called]]


def with_tools(config: ToolConfig | str, use: Callable[[dict[str, Tool], Call], Awaitable[Any]]) -> Any:
    """Returns the result of `use`, called with the tools of an entry and a function that calls one."""
    if isinstance(config, str):
        config = ToolConfig(name=f"{FILE}:{config}")

    async def run() -> Any:
        made = provider(config, "agent.tools.0")
        async with made.session(TASK) as session:
            tools = {tool.name: tool for tool in session.tools}
            return await use(tools, lambda name, arguments: answer(tools[name], arguments))

    return asyncio.run(run())


def called(config: ToolConfig | str, name: str, **arguments: Any) -> Called:
    async def use(_: dict[str, Tool], call: Call) -> Called:
        return await call(name, arguments)

    return with_tools(config, use)


def schema_of(function: str) -> dict[str, Any]:
    async def use(tools: dict[str, Tool], _: Call) -> dict[str, Any]:
        return tools[function].schema["function"]

    return with_tools(function, use)


def test_a_function_is_told_with_its_types_defaults_and_docstring() -> None:
    assert schema_of("add") == {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "description": "The first one, which is: a whole number."},
                "b": {"type": "integer", "default": 1, "description": "The second one."},
            },
            "required": ["a"],
        },
    }
    assert schema_of("later")["parameters"]["properties"]["seconds"] == {
        "type": "number", "default": 0.0, "description": "How long to wait.",
    }  # fmt: skip


def test_any_types_that_json_can_carry_make_a_schema_that_holds() -> None:
    told = schema_of("many")
    properties = told["parameters"]["properties"]
    assert told["description"] == "Takes many kinds."
    assert properties["kind"] == {"type": "string", "enum": ["a", "b"], "description": "One of two."}
    assert properties["names"] == {"type": "array", "items": {"type": "string"}, "description": "Some names."}
    assert properties["weight"]["description"] == "In kilograms."
    assert told["parameters"]["required"] == ["kind", "names", "place", "weight"]
    jsonschema.Draft202012Validator.check_schema(told["parameters"])
    jsonschema.validate({"kind": "a", "names": ["x"], "place": {"x": 1}, "weight": 0.5}, told["parameters"])


def test_arguments_are_read_as_what_is_meant_and_wrong_ones_are_told_by_name() -> None:
    assert called("add", "add", a="3", b=4).text == "7"
    good = called("many", "many", kind="b", names=["x"], place={"x": 3}, weight=2)
    assert json.loads(good.text) == {
        "kind": "b", "names": ["x"], "x": 3, "weight": 2.0, "more": None, "anything": None,
    }  # fmt: skip
    wrong = called("many", "many", kind="c", place={}, weight=-1, other=1)
    assert wrong.error
    for name in ("kind", "names", "place.x", "weight", "other"):
        assert name in wrong.text
    assert "a" in called("add", "add").error


def test_the_recipes_arguments_and_the_task_are_hidden_from_the_policy() -> None:
    config = ToolConfig(name=f"{FILE}:of_task", arguments={"suffix": "!"}, call_name="ask")
    assert called(config, "ask", text="x").text == "42 x!"

    async def parameters(tools: dict[str, Tool], _: Call) -> list[str]:
        return list(tools["ask"].parameters["properties"])

    assert with_tools(config, parameters) == ["text"]


def test_what_a_tool_raises_is_told_and_ends_nothing() -> None:
    assert called("raises", "raises", text="no such row").error == "KeyError: 'no such row'"
    assert "SystemExit" in called("exits", "exits").error


@pytest.mark.parametrize("function", ["blocks", "blocks_loop"])
def test_calls_that_block_hold_up_neither_the_loop_nor_each_other(function: str) -> None:
    async def use(_: dict[str, Tool], call: Call) -> tuple[float, list[Called]]:
        calls = [asyncio.create_task(call(function, {"seconds": 9})) for _ in range(3)]
        ticks = 0
        while not all(task.done() for task in calls):
            await asyncio.sleep(0.01)
            ticks += 1
        return ticks, [task.result() for task in calls]

    ticks, results = with_tools(ToolConfig(name=f"{FILE}:{function}", timeout_seconds=0.4), use)
    assert ticks > 5
    assert all("longer than 0.4 s" in result.error and result.seconds < 20 for result in results)


def test_a_class_has_an_object_for_each_rollout_whose_methods_run_one_after_another() -> None:
    config = ToolConfig(name=f"{FILE}:Counter", arguments={"start": 10, "goal": 14})

    async def run() -> None:
        made = provider(config, "agent.tools.0")
        one, other = SimpleNamespace(id="one"), SimpleNamespace(id="other")
        async with made.session(one) as first, made.session(other) as second:
            tools = {tool.name: tool for tool in first.tools}
            assert list(tools) == ["up", "look"]
            assert not first.done()
            results = await asyncio.gather(*(answer(tools["up"], {"by": 1}) for _ in range(4)))
            assert [result.text for result in results] == ["11", "12", "13", "14"]
            assert (await answer(tools["look"], {})).text == "one: 14"
            others = {tool.name: tool for tool in second.tools}
            assert (await answer(others["look"], {})).text == "other: 10"
            assert first.done()
            assert not second.done()
            assert first.score is not None
            assert await first.score() == {"score": 1.0, "count": 14}

    counter: Any = load_function(config.name, "agent.tools.0", RecipeError)
    counter.closed.clear()
    asyncio.run(run())
    assert sorted(counter.closed) == ["one", "other"]
    assert Counter.closed == []  # the test's own copy


def test_a_class_method_prepare_is_called_when_a_process_loads_its_tools() -> None:
    counter: Any = load_function(f"{FILE}:Counter", "agent.tools.0", RecipeError)
    counter.prepared.clear()
    asyncio.run(loaded([{"name": f"{FILE}:Counter", "arguments": {"start": 10}}, f"{FILE}:Walk", f"{FILE}:add"]))
    assert counter.prepared == [{"start": 10}]


def test_calls_that_wait_for_others_are_not_late() -> None:
    async def use(_: dict[str, Tool], call: Call) -> list[Called]:
        return await asyncio.gather(*(call("blocks", {"seconds": 0.2}) for _ in range(4)))

    start = time.monotonic()
    results = with_tools(ToolConfig(name=f"{FILE}:blocks", calls_at_once=1, timeout_seconds=5), use)
    assert time.monotonic() - start >= 0.8
    assert not any(result.error for result in results)


@given(st.text(max_size=300), st.integers(16, 120))
def test_a_result_is_cut_to_its_limit_and_keeps_its_ends(text: str, most: int) -> None:
    cut = shortened(text, most)
    assert len(cut) <= most
    assert cut == text or (len(text) > most and cut[0] == text[0])


@given(st.text())
def test_any_docstring_can_be_read(text: str) -> None:
    described, parameters = read_docstring(text)
    assert isinstance(described, str)
    assert all(name.isidentifier() or name[0].isdigit() for name in parameters)

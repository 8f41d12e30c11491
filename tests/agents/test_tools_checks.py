"""Errors in agent.tools are reported before the run, and correct entries pass."""

import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from megagrpo.agents.processes import environment_of_program, program_of
from megagrpo.agents.tools.load import NOT_HERE, tool_problems
from megagrpo.recipe.schema.agent import AgentConfig
from megagrpo.section import broken_rules

OWN = Path(__file__).with_name("own_tools.py")
REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "examples" / "agents"


def problems_of(*tools: Any, **how: bool) -> list[str]:
    return [problem.where for problem in tool_problems(AgentConfig.model_validate({"tools": list(tools)}), **how)]


def test_tools_that_can_run_have_no_problem() -> None:
    pytest.importorskip("mcp")
    found = problems_of(
        "python",
        f"{OWN}:add",
        {"name": f"{OWN}:Counter", "arguments": {"start": 2}},
        {"name": f"{OWN}:of_task", "arguments": {"suffix": "!"}},
        {"name": f"{EXAMPLES}/bm25_search.py:Search", "arguments": {"corpus": "a.jsonl", "results": 5, "k1": 1.2}},
        {"name": f"{EXAMPLES}/dense_search.py:Search", "arguments": {"corpus": "a.jsonl", "encoder": "absent"}},
        {"name": "server", "mcp": f"{shlex.quote(sys.executable)} server.py"},
        {"name": "other server", "mcp": "https://mcp.example.com/mcp"},
        {"name": f"{EXAMPLES}/web.py:MassiveDs", "arguments": {"url": "http://localhost:1/search"}},
    )
    assert found == []


@pytest.mark.parametrize(
    ("tool", "where"),
    [
        ("pyton", "name"),
        ("generic_mcp", "name"),
        ("absent.py:f", "name"),
        (f"{OWN}:absent", ""),
        (f"{OWN}:variadic", ""),
        (f"{OWN}:no_json", ""),
        ({"name": f"{OWN}:add", "arguments": {"c": 1}}, "arguments"),
        ({"name": f"{OWN}:Counter", "arguments": {"c": 1}}, "arguments"),
        ({"name": f"{OWN}:Counter", "call_name": "count"}, "call_name"),
        ({"name": "python", "arguments": {"memory": 3}}, "arguments.memory"),
        ({"name": "python", "arguments": {"memory_mib": "lots"}}, "arguments.memory_mib"),
        ({"name": "python", "arguments": {"packages": 1}}, "arguments.packages"),
        ({"name": "python", "arguments": {"memory": 3, "packages": 1}}, "arguments.packages"),
        ({"name": "python", "arguments": {"imports": "numpy"}}, "arguments.imports"),
        ({"name": "python", "arguments": {"isolation": "docker"}}, "arguments.isolation"),
        ({"name": "python", "arguments": {"imports": ["no_such_module"]}}, "arguments.imports"),
        (f"{EXAMPLES}/bm25_search.py:Search", "arguments"),
        ({"name": f"{EXAMPLES}/bm25_search.py:Search", "arguments": {"corpus": "a", "kind": "dense"}}, "arguments"),
        ({"name": f"{EXAMPLES}/dense_search.py:Search", "arguments": {"corpus": "a.jsonl"}}, "arguments"),
        (f"{EXAMPLES}/web.py:MassiveDs", "arguments"),
        ({"name": f"{EXAMPLES}/web.py:Jina", "arguments": {"key": "a secret"}}, "arguments"),
        ({"name": "server", "mcp": "no-such-program --port 1"}, "mcp"),
        ({"name": "server", "mcp": "python 'unclosed"}, "mcp"),
        ({"name": "server", "mcp": ""}, "mcp"),
        ({"name": "server", "mcp": "http://x", "arguments": {"header": {}}}, "arguments.header"),
        ({"name": "server", "mcp": "http://x", "arguments": {"headers": {"a": 1}}}, "arguments.headers.a"),
        ({"name": "server", "mcp": "http://x", "arguments": {"env": {"a": "${ABSENT_}"}}}, "arguments.env.a"),
        ({"name": "server", "mcp": "http://x", "arguments": {"headers": {"a": "$ABSENT_"}}}, "arguments.headers.a"),
    ],
)  # fmt: skip
def test_a_tool_that_cannot_run_is_told_with_its_field(tool: Any, where: str) -> None:
    found = problems_of("python", tool)
    expected = "agent.tools.1" + (f".{where}" if where else "")
    assert any(field == expected or (not where and field.startswith(expected)) for field in found), found
    assert not any(field.startswith("agent.tools.0") for field in found)


def test_two_tools_of_one_name_are_told() -> None:
    assert problems_of("python", {"name": "python", "stateful": True}) == ["agent.tools.1"]
    assert problems_of("python", {"name": "python", "stateful": True, "call_name": "notebook"}) == []


@pytest.mark.parametrize("name", [name for name, needed in NOT_HERE.items() if "examples/" in needed])
def test_a_tool_that_was_built_in_is_told_with_the_example_in_its_place(name: str) -> None:
    tool = {"name": name, "arguments": {"corpus": "corpus.jsonl"}}
    (problem,) = tool_problems(AgentConfig.model_validate({"tools": [tool]}))
    file, _, made = problem.needed.partition(",")[0].partition(":")
    assert problem.where == "agent.tools.0.name"
    assert f"\nclass {made}" in (REPOSITORY / file).read_text("utf-8")


def test_what_tools_read_from_the_environment_reaches_their_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEATHER_KEY", "a secret")
    headers = {"headers": {"Authorization": "Bearer $WEATHER_KEY"}, "env": {"A": "${OTHER_KEY}x"}}
    tools: list[Any] = ["python", {"name": "weather", "mcp": "http://x", "arguments": headers}]
    agent = AgentConfig.model_validate({"tools": tools, "environment": ["MINE"]})
    program = program_of(agent)
    assert sorted(program.environment) == ["MINE", "OTHER_KEY", "WEATHER_KEY"]
    assert environment_of_program(program)["WEATHER_KEY"] == "a secret"


def test_a_run_elsewhere_may_have_what_is_not_here() -> None:
    tools = [
        "absent.py:f",
        {"name": "server", "mcp": "no-such-program"},
        {"name": "python", "arguments": {"imports": ["no_such_module"]}},
    ]
    assert problems_of(*tools, elsewhere=True) == []
    assert len(problems_of(*tools)) >= len(tools)


def test_a_state_that_a_tool_cannot_have_breaks_a_rule() -> None:
    assert broken_rules(AgentConfig.model_validate({"tools": [{"name": "a.py:Search", "stateful": True}]}))

"""What is wrong with agent.tools is said before the run, and what is right is not."""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from megagrpo.agents.host_settings import program_of
from megagrpo.agents.processes import environment_of
from megagrpo.agents.tools.checks import tool_problems
from megagrpo.recipe.schema.agent import AgentConfig
from megagrpo.section import broken_rules

OWN = Path(__file__).with_name("own_tools.py")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    file = tmp_path / "corpus.jsonl"
    file.write_text('{"text": "a"}\n')
    return file


def problems_of(*tools: Any, **how: bool) -> list[str]:
    return [problem.where for problem in tool_problems(AgentConfig.model_validate({"tools": list(tools)}), **how)]


def test_tools_that_can_run_have_no_problem(corpus: Path) -> None:
    pytest.importorskip("bm25s")
    pytest.importorskip("mcp")
    found = problems_of(
        "python",
        f"{OWN}:add",
        {"name": f"{OWN}:Counter", "arguments": {"start": 2}},
        {"name": f"{OWN}:of_task", "arguments": {"suffix": "!"}},
        {"name": "search", "arguments": {"corpus": str(corpus), "results": 5, "k1": 1.2}},
        {"name": "server", "mcp": f"{shlex.quote(sys.executable)} server.py"},
        {"name": "other server", "mcp": "https://mcp.example.com/mcp"},
        {"name": "massive_ds", "arguments": {"url": "http://localhost:1/search"}},
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
        ("search", "arguments.corpus"),
        ({"name": "search", "arguments": {"corpus": "absent.jsonl"}}, "arguments.corpus"),
        ({"name": "search", "arguments": {"corpus": "absent.jsonl", "kind": "splade"}}, "arguments.kind"),
        ({"name": "search", "arguments": {"corpus": str(OWN)}}, "arguments.corpus"),
        ({"name": "search", "arguments": {"corpus": "CORPUS", "encoder": "x"}}, "arguments.encoder"),
        ({"name": "search", "arguments": {"corpus": "CORPUS", "kind": "dense", "encoder": "x", "b": 1}}, "arguments.b"),
        ({"name": "search", "arguments": {"corpus": "CORPUS", "text": "absent"}}, "arguments.corpus"),
        ({"name": "search", "arguments": {"corpus": "CORPUS", "results": 0}}, "arguments.results"),
        ({"name": "search", "arguments": {"corpus": "CORPUS", "kind": "dense"}}, "arguments.encoder"),
        ({"name": "search", "arguments": {"corpus": "CORPUS", "index": str(OWN.parent)}}, "arguments.index"),
        ({"name": "server", "mcp": "no-such-program --port 1"}, "mcp"),
        ({"name": "server", "mcp": "python 'unclosed"}, "mcp"),
        ({"name": "server", "mcp": ""}, "mcp"),
        ({"name": "server", "mcp": "http://x", "arguments": {"header": {}}}, "arguments.header"),
        ({"name": "server", "mcp": "http://x", "arguments": {"headers": {"a": 1}}}, "arguments.headers.a"),
        ({"name": "server", "mcp": "http://x", "arguments": {"env": {"a": "${ABSENT_}"}}}, "arguments.env.a"),
        ({"name": "server", "mcp": "http://x", "arguments": {"headers": {"a": "$ABSENT_"}}}, "arguments.headers.a"),
        ("massive_ds", "arguments"),
        ({"name": "jina_browse", "arguments": {"url": "localhost"}}, "arguments.url"),
        ({"name": "jina_browse", "arguments": {"results": "many"}}, "arguments.results"),
    ],
)  # fmt: skip
def test_a_tool_that_cannot_run_is_told_with_its_field(tool: Any, where: str, corpus: Path) -> None:
    tool = json.loads(json.dumps(tool).replace("CORPUS", str(corpus)))
    found = problems_of("python", tool)
    expected = "agent.tools.1" + (f".{where}" if where else "")
    assert any(field == expected or (not where and field.startswith(expected)) for field in found), found
    assert not any(field.startswith("agent.tools.0") for field in found)


def test_two_tools_of_one_name_are_told() -> None:
    assert problems_of("python", {"name": "python", "stateful": True}) == ["agent.tools.1"]
    assert problems_of("python", {"name": "python", "stateful": True, "call_name": "notebook"}) == []


def test_a_service_without_its_key_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SERPER_API_KEY", raising=False)
    assert problems_of("serper_search") == ["agent.tools.0"]
    monkeypatch.setenv("SERPER_API_KEY", "key")
    assert problems_of("serper_search") == []


def test_what_tools_read_from_the_environment_reaches_their_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("S2_API_KEY", "a secret")
    headers = {"headers": {"Authorization": "Bearer $WEATHER_KEY"}, "env": {"A": "${OTHER_KEY}x"}}
    tools: list[Any] = ["s2_search", "python", {"name": "weather", "mcp": "http://x", "arguments": headers}]
    agent = AgentConfig.model_validate({"tools": tools, "environment": ["MINE"]})
    program = program_of(agent)
    assert sorted(program.environment) == ["MINE", "OTHER_KEY", "S2_API_KEY", "WEATHER_KEY"]
    assert environment_of(program)["S2_API_KEY"] == "a secret"


def test_a_run_elsewhere_may_have_what_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SERPER_API_KEY", raising=False)
    tools = [
        "absent.py:f",
        "serper_search",
        {"name": "search", "arguments": {"corpus": "absent.jsonl", "kind": "dense", "encoder": "absent"}},
        {"name": "server", "mcp": "no-such-program"},
        {"name": "python", "arguments": {"imports": ["no_such_module"]}},
    ]
    assert problems_of(*tools, elsewhere=True) == []
    assert len(problems_of(*tools)) >= len(tools)


def test_a_state_that_a_tool_cannot_have_breaks_a_rule() -> None:
    assert broken_rules(AgentConfig.model_validate({"tools": [{"name": "search", "stateful": True}]}))

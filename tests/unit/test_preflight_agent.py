"""Errors in a recipe's agent, before a run starts, and a plan's report on its chat template."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megagrpo.cli import main
from megagrpo.preflight.agent import AgentChecks, check_agent, template_described
from megagrpo.recipe.schema import Recipe
from tests.agents.families import FAMILIES, chat_of, chatml, tokenizer_of
from tests.tiny_run import make_run, recipe

OWN = Path(__file__).parents[1] / "agents" / "own_tools.py"
GOOD = """
from neighbour import LIMIT

async def rollout(task, endpoint, depth=LIMIT):
    return 1.0
"""


def asked(directory: Path, *, family: str = "", plan_only: bool = False, **agent: Any) -> AgentChecks:
    """family: whose tokenizer is the model's; none: it is not here."""
    tokenizer = None
    if family:
        tokenizer = directory / family
        own = tokenizer_of(family)
        own.save_pretrained(tokenizer)
        stops = own.convert_tokens_to_ids(list(FAMILIES[family].stops))
        (tokenizer / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    made = Recipe.model_validate({**recipe(directory), "agent": {"tokens_max": 4096, **agent}})
    return check_agent(made, tokenizer, plan_only)


def fields(checks: AgentChecks) -> list[str]:
    return [problem.where for problem in checks.problems]


@pytest.fixture
def function(tmp_path: Path) -> str:
    (tmp_path / "neighbour.py").write_text("LIMIT = 3\n")
    (tmp_path / "mine.py").write_text(GOOD)
    return f"{tmp_path / 'mine.py'}:rollout"


# --- the program ------------------------------------------------------------------------------------------------------


def test_a_recipe_without_an_agent_has_nothing_to_check(tmp_path: Path) -> None:
    assert check_agent(Recipe.model_validate(recipe(tmp_path)), None, plan_only=False) == AgentChecks()


def test_an_agent_that_says_nothing_is_refused_by_its_rule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path)
    assert main(["plan", str(run), "agent={}"]) == 2
    assert "given: none of tools, function," in capsys.readouterr().err


def test_a_function_is_imported_where_it_will_run(function: str, tmp_path: Path) -> None:
    assert asked(tmp_path, function=function, arguments={"depth": 2}).problems == []


@pytest.mark.parametrize(
    ("text", "arguments", "told"),
    [
        ("import no_such_package", {}, "no_such_package"),
        ("def rollout(task, endpoint): return (", {}, "SyntaxError"),
        ("def other(task, endpoint): ...", {}, "rollout"),
        ("async def rollout(task, endpoint): ...", {"depth": 1}, "depth"),
        ("import os; os._exit(7)", {}, "exit status 7"),
    ],
)
def test_a_function_that_cannot_be_called_is_told_with_why(
    text: str, arguments: dict[str, Any], told: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(text)
    checks = asked(tmp_path, function=f"{tmp_path / 'mine.py'}:rollout", arguments=arguments)
    assert fields(checks) == ["agent.function"]
    assert told in checks.problems[0].given
    assert "rollout(task, endpoint" in checks.problems[0].needed


def test_files_and_urls_are_looked_at_without_running_anything(tmp_path: Path) -> None:
    assert fields(asked(tmp_path, function=str(tmp_path / "none.py:rollout"))) == ["agent.function"]
    openenv = asked(tmp_path, plan_only=True, python="/no/python", openenv={"url": "host:8000", "action": "x.py:act"})
    assert fields(openenv) == ["agent.openenv.action", "agent.openenv.url"]


def test_an_interpreter_is_run_and_asked_for_its_packages(function: str, tmp_path: Path) -> None:
    missing: dict[str, Any] = {"function": function, "python": str(tmp_path / "python")}
    assert fields(asked(tmp_path, **missing)) == ["agent.python"]
    planned = asked(tmp_path, plan_only=True, **missing)
    assert (planned.problems, len(planned.unchecked)) == ([], 1)

    other = tmp_path / "other"
    other.write_text("#!/bin/sh\necho no python >&2\nexit 3\n")
    other.chmod(0o755)
    checks = asked(tmp_path, function=function, python=str(other))
    assert fields(checks) == ["agent.python"]
    assert "no python" in checks.problems[0].given

    other.write_text("#!/bin/sh\necho 3 8\necho\n")
    assert "3.8" in asked(tmp_path, function=function, python=str(other)).problems[0].given
    other.write_text("#!/bin/sh\necho 3 12\necho verifiers\n")
    checks = asked(tmp_path, verifiers={"environment": "words"}, python=str(other))
    assert fields(checks) == ["agent.python"]
    assert "without the package verifiers" in checks.problems[0].given


# --- the chat template ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_tools_need_a_template_that_has_tool_messages(family: str, tmp_path: Path) -> None:
    checks = asked(tmp_path, family=family, tools=["python"], parser="hermes")
    with_tools = "tool" in chat_of(family).facts.roles
    assert fields(checks) == ([] if with_tools else ["model.chat_template"])
    assert with_tools == (family != "zephyr")
    assert checks.lines["template"]


def test_tools_are_checked_too(tmp_path: Path) -> None:
    tools = [{"name": "search", "arguments": {"corpus": str(tmp_path / "none.jsonl")}}, "no_such_tool"]
    assert {where.rpartition(".")[0] for where in fields(asked(tmp_path, tools=tools))} >= {"agent.tools.1"}


def test_tools_that_leave_no_room_for_a_prompt_are_told_with_their_tokens(tmp_path: Path) -> None:
    tools = ["python", f"{OWN}:add", f"{OWN}:Counter"]
    fits = asked(tmp_path, family="chatml", tools=tools, tokens_max=4096)
    assert fits.problems == []
    assert fits.lines["tools"].startswith("4, which take ")
    tokens = int(fits.lines["tools"].split()[3])
    assert fields(asked(tmp_path, family="chatml", tools=tools, tokens_max=tokens)) == ["agent.tokens_max"]
    assert asked(tmp_path, family="chatml", tools=tools, tokens_max=tokens + 1).problems == []


def test_an_mcp_server_is_started_before_the_run(tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    (tmp_path / "server.py").write_text("raise ImportError('no trains here')\n")
    tools = [{"name": "trains", "mcp": shlex.join([sys.executable, str(tmp_path / "server.py")])}]
    (problem,) = asked(tmp_path, tools=tools).problems
    assert problem.where == "agent.tools.0"
    assert "ImportError: no trains here" in problem.given
    planned = asked(tmp_path, plan_only=True, tools=tools)
    assert (planned.problems, len(planned.unchecked)) == ([], 1)


def test_parsers_are_known_or_found_in_the_template(tmp_path: Path) -> None:
    found = asked(tmp_path, family="chatml", tools=["python"])
    assert (found.problems, found.lines["parser"].split(",")[0]) == ([], "hermes")
    wrong = asked(tmp_path, family="chatml", tools=["python"], parser="harmes")
    assert fields(wrong) == ["agent.parser"]
    assert "hermes" in wrong.problems[0].needed


@pytest.mark.parametrize("plan_only", [False, True])
def test_tools_are_refused_if_no_parser_reads_what_the_template_writes(
    plan_only: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)
    monkeypatch.setitem(FAMILIES, "silent", replace(FAMILIES["chatml"], template=chatml(call="")))
    for family in ("mistral", "deepseek", "pythonic"):
        assert asked(tmp_path, family=family, plan_only=plan_only, tools=["python"]).problems == []
    silent = asked(tmp_path, family="silent", plan_only=plan_only, tools=["python"])
    assert (fields(silent), silent.unchecked) == (["agent.parser"], [])
    assert "hermes" in silent.problems[0].needed
    assert asked(tmp_path, family="silent", plan_only=plan_only, tools=["python"], parser="hermes").problems == []
    named = asked(tmp_path, family="silent", plan_only=plan_only, tools=["python"], parser="gemma4")
    assert (fields(named), len(named.unchecked)) == (([], 1) if plan_only else (["agent.parser"], 0))


def test_a_plan_tells_what_the_template_does() -> None:
    plain, thinking = (chat_of(name).facts for name in ("chatml", "thinking"))
    assert "tool and user messages may follow" in template_described(plain, "template")
    assert "reasoning stays" in template_described(plain, "template")
    assert "another sequence then begins" in template_described(thinking, "template")
    assert "kept, as agent.history says" in template_described(thinking, "append")
    assert "moves the tools" in template_described(chat_of("mistral").facts, "template")


def test_plan_and_train_refuse_a_wrong_agent(function: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_run(tmp_path / "run")
    assert main(["plan", str(path), f"agent.function={function}", "agent.tokens_max=64"]) == 0
    shown = capsys.readouterr().out
    for line in ("agent", "turns", "template", "parser"):
        assert any(text.startswith(f"{line} ") for text in shown.splitlines()), line
    for command in ("plan", "train"):
        wrong = [f"agent.function={function}s", "agent.tokens_max=64", "cluster.device=cpu"]
        assert main([command, str(path), *wrong]) == 2
        assert "agent.function" in capsys.readouterr().err

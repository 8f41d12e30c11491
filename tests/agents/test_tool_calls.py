"""Calls are read as the template writes them, and what cannot be read is given back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from megagrpo.agents.chat import TOOL
from megagrpo.agents.tool_calls import BUILT_IN, SHOWN, Calls, Parser, llama3_calls, parse_answer, parser_of, style_of
from megagrpo.errors import RecipeError
from tests.agents.families import FAMILIES, chat_of

hermes_calls = BUILT_IN["hermes"]
SECOND = {**TOOL, "function": {**TOOL["function"], "name": "g"}}
WRITTEN = {
    "qwen25": ('<tool_call>\n{"name": "f", "arguments": {"k": "v"}}\n</tool_call>', "\n"),
    "mistral": ('[TOOL_CALLS] [{"name": "f", "arguments": {"k": "v"}}]', ""),
    "deepseekv3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
        '{"k": "v"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "",
    ),
    "deepseekv31": (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"k": "v"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "",
    ),
}
"""One call, and what stands between two, "" if two are written otherwise."""


def read(parser: Parser, text: str, *, thinking: bool = False, separate: bool = True, several: bool = True) -> Calls:
    facts = replace(chat_of("thinking").facts, reasoning_field=separate, several_calls=several)
    said = parse_answer(text, [TOOL, SECOND], parser, facts, thinking=thinking, identity=str)
    calls = [(one["function"]["name"], one["function"]["arguments"]) for one in said.message.get("tool_calls", ())]
    return Calls(said.message["content"], tuple(calls), said.unreadable)


def test_auto_is_what_the_chat_template_writes() -> None:
    assert {name: style_of(chat_of(name)) for name in FAMILIES} == {
        "chatml": "hermes", "thinking": "hermes", "llama": "llama3", "glm": "glm45", "mistral": "mistral", "zephyr": "",
        "function": "qwen3_coder", "python": "olmo3", "glm47": "glm47", "invoke": "minimax-m2", "kimi": "kimi_k2",
        "channels": "gpt-oss", "pythonic": "pythonic", "compact": "mistral", "deepseek": "deepseekv3",
        "deepseek31": "deepseekv31",
    }  # fmt: skip
    assert parser_of("auto", chat_of("zephyr")) is None
    assert {name for name, _ in SHOWN} == set(BUILT_IN)


@pytest.mark.long  # to import SGLang takes seconds
def test_a_parser_that_does_not_exist_is_a_recipe_error() -> None:
    with pytest.raises(RecipeError, match="hermes"):
        parser_of("no such parser", chat_of("chatml"))


def test_hermes_calls_in_any_json() -> None:
    one = '<tool_call>{"arguments":{"k":"v"},"name":"f"}</tool_call>'
    quoted = f'<tool_call>\n{{"name": "g", "arguments": {json.dumps(json.dumps({"k": 1}))}}}\n</tool_call>'
    made = read(hermes_calls, f"Two: {one}\n{quoted}")
    assert made == Calls("Two:", (("f", {"k": "v"}), ("g", {"k": 1})))


@pytest.mark.parametrize(
    "bad", ['{"name": "f"', '{"name": "h"}', '{"name": "f", "arguments": []}', "[1]", "", "1" * 5000]
)
def test_hermes_calls_that_cannot_be_read_stay_in_the_content(bad: str) -> None:
    good = '<tool_call>{"name": "f"}</tool_call>'
    assert read(hermes_calls, f"<tool_call>{bad}</tool_call>") == Calls(f"<tool_call>{bad}</tool_call>", (), True)
    made = read(hermes_calls, f"{good}<tool_call>{bad}</tool_call>")
    assert made == Calls(f"<tool_call>{bad}</tool_call>", (("f", {}),), True)


@pytest.mark.parametrize(
    ("text", "content", "names", "unreadable"),
    [
        ('{"name": "f", "parameters": {"k": "v"}}', "", ["f"], False),
        ('So.<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', "So.", ["f", "g"], False),
        ('{"answer": 4}', '{"answer": 4}', [], False),
        ('{"name": "f", "parameters": {', '{"name": "f", "parameters": {', [], True),
        ("<|python_tag|>f(k=1)", "<|python_tag|>f(k=1)", [], True),
        ("It is 4.", "It is 4.", [], False),
    ],
)
def test_llama3_calls(text: str, content: str, names: Sequence[str], unreadable: bool) -> None:
    made = read(llama3_calls, text)
    assert (made.content, [name for name, _ in made.calls], made.unreadable) == (content, names, unreadable)


def test_several_calls_that_the_template_cannot_write_are_given_back() -> None:
    two = '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}'
    assert read(llama3_calls, two, several=False) == Calls(two, (), True)


def test_reasoning_has_its_own_field_where_the_template_reads_it_and_calls_in_it_are_thoughts() -> None:
    call = '<tool_call>{"name": "f"}</tool_call>'
    text = f"<think>\nor {call}?\n</think>\n\n{call}"
    assert read(hermes_calls, text) == Calls("", (("f", {}),))
    assert read(hermes_calls, text.removeprefix("<think>\n"), thinking=True) == Calls("", (("f", {}),))
    assert read(hermes_calls, f"<think>\nnever ends {call}") == Calls("")
    kept = read(hermes_calls, text, separate=False)
    assert kept == Calls(f"<think>\nor {call}?\n</think>", (("f", {}),))
    assert read(hermes_calls, "<think>\nnever ends", separate=False).content == "<think>\nnever ends"


OF_SGLANG = pytest.param("qwen25", marks=pytest.mark.long)  # to import SGLang takes seconds


@pytest.mark.parametrize("name", ["mistral", "deepseekv3", "deepseekv31", OF_SGLANG])
def test_parsers_lose_nothing(name: str) -> None:
    if name not in BUILT_IN:
        pytest.importorskip("sglang")
    parser, (call, between) = parser_of(name, chat_of("chatml")), WRITTEN[name]
    assert parser is not None
    assert read(parser, f"I call.{call}") == Calls("I call.", (("f", {"k": "v"}),))
    assert read(parser, "No call at all.") == Calls("No call at all.")
    unknown = call.replace('"f"', '"h"')
    if name.startswith("deepseek"):
        unknown = call.replace("｜>f<", "｜>h<").replace("｜>f\n", "｜>h\n")
    broken = call.replace('"v"', "v")
    for lost in (unknown, f"{call}{between}{unknown}" if between else unknown):
        made = read(parser, lost)
        assert made == Calls(lost, (), True), made
    made = read(parser, broken)
    assert made.calls or made == Calls(broken, (), True), made

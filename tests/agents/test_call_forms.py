"""Every form of calls against a template that writes it: what it writes of a message is read as that message."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest

from megagrpo.agents.call_forms import FORMS
from megagrpo.agents.chat import TOOL, USER, Chat
from megagrpo.agents.dialects.chat_request import call
from megagrpo.agents.tool_calls import (
    ParsedAnswer,
    Parser,
    of_channels,
    parse_answer,
    parser_of,
    sglang_calls,
    style_of,
)
from tests.agents.families import chat_of, written

FAMILIES = (
    "thinking", "function", "python", "glm", "glm47", "invoke", "kimi", "channels", "mistral", "compact", "pythonic",
    "deepseek", "deepseek31",
)  # fmt: skip
TYPES: dict[str, Any] = {
    "text": {"type": "string"}, "one": {"enum": ["1", "2"]}, "count": {"type": "integer"}, "ratio": {"type": "number"},
    "yes": {"type": "boolean"}, "object": {"type": "object"}, "list": {"type": ["array", "null"]},
    "perhaps": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "any": {},
}  # fmt: skip
TOOLS = [
    {**TOOL, "function": {"name": name, "description": "d", "parameters": {"type": "object", "properties": TYPES}}}
    for name in ("f", "look_up")
]
LINES = "two\n \"lines\" of {'text': 1},\\t and </b>"
ARGUMENTS: tuple[dict[str, Any], ...] = (
    {}, {"text": "v"}, {"text": LINES}, {"text": "12", "one": "2", "count": 12}, {"text": "", "ratio": 0.5},
    {"yes": True, "object": {"a": [1, {"b": "c"}], "d": "e\n"}, "list": [1, "x"]}, {"any": 4, "perhaps": "4 or 5"},
    {"from": "Oslo", "text": "true, from=null"},
)  # fmt: skip


def read(chat: Chat, text: str, parser: Parser | None = None) -> ParsedAnswer:
    parser = parser or parser_of("auto", chat)
    prompt = chat.render([USER], TOOLS)
    thinking = prompt.rstrip().endswith(chat.facts.thought[0])
    return parse_answer(text, TOOLS, parser, chat.facts, thinking=thinking, identity="call{}".format)


def said(chat: Chat, *calls: tuple[str, dict[str, Any]], thought: str = "So.", content: str = "") -> dict[str, Any]:
    """Makes an answer, with the ids that its calls have when they are read."""
    asked = [
        call(
            f"functions.{name}:{n}" if "## Return of" in str(chat.tokenizer.chat_template) else f"call{n}", name, given
        )
        for n, (name, given) in enumerate(calls)
    ]
    thoughts = {"reasoning_content": thought} if chat.facts.reasoning_field else {}
    return {"role": "assistant", "content": content, **thoughts} | ({"tool_calls": asked} if asked else {})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_an_answer_is_read_as_the_message_of_which_the_template_writes_it(
    family: str, arguments: dict[str, Any]
) -> None:
    if family == "glm":  # its template writes objects as Python does
        arguments = {name: value for name, value in arguments.items() if name in ("text", "one", "count", "any")}
    chat = chat_of(family)
    alone = said(chat, ("f", arguments))
    assert read(chat, written(chat, alone, TOOLS)).message == alone
    if chat.facts.several_calls:
        content = "" if family == "mistral" else "I look."  # its template leaves out content beside calls
        both = said(chat, ("f", arguments), ("look_up", {"text": LINES}), content=content)
        assert read(chat, written(chat, both, TOOLS)).message == both


@pytest.mark.long  # to import SGLang takes seconds
@pytest.mark.parametrize("family", [*(family for family in FAMILIES if family != "python"), "llama"])
def test_sglang_finds_the_same_calls(family: str) -> None:
    pytest.importorskip("sglang")
    chat = chat_of(family)
    calls = [("f", {"text": LINES, "one": "2", "count": 12}), ("look_up", {"text": "v", "ratio": 0.5})]
    text = written(chat, said(chat, *calls[: 2 if chat.facts.several_calls else 1]), TOOLS)
    if family == "compact":  # SGLang reads it without ids
        text = re.sub(r"\[CALL_ID\]call.", "", text)
    if family == "channels":  # its template writes another order than models do, which SGLang reads
        head = "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
        text = f"{head}<|constrain|>json<|message|>{json.dumps(calls[0][1])}<|call|>"
    parsers = (None, lambda rest, tools: sglang_calls(style_of(chat), rest, tools, chat))
    own, theirs = (read(chat, text, parser).message for parser in parsers)
    assert own["content"] == theirs["content"] == ""
    made, found = ([one["function"] for one in message["tool_calls"]] for message in (own, theirs))
    assert made == found == [{"name": name, "arguments": given} for name, given in calls[: len(made)]]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_that_is_cut_off_or_of_an_unknown_tool_stays_in_the_content(family: str) -> None:
    chat = chat_of(family)
    good, unknown = (written(chat, said(chat, (name, {"text": "value"})), TOOLS) for name in ("f", "no_tool"))
    for broken, left in ((good[: good.index("value") + 2], "va"), (unknown, "value")):
        made = read(chat, broken)
        assert made.unreadable
        assert "tool_calls" not in made.message
        assert left in made.message["content"]
        assert made.message.get("reasoning_content", "So.") == "So."
    if chat.facts.several_calls:
        two = written(chat, said(chat, ("f", {"text": "One"}), ("f", {"text": "Two"})), TOOLS)
        made = read(chat, two[: two.index("Two") + 2])
        assert made.unreadable
        assert made.message["content"].count("Tw") == 1


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in ("python", "glm", "mistral")])
def test_reasoning_is_apart_from_content_also_without_tools(family: str) -> None:
    chat = chat_of(family)
    begins, ends = chat.facts.thought
    opened = chat.render([USER]).rstrip().endswith(begins)
    final = "<|start|>assistant<|channel|>final<|message|>" if family == "channels" else ""
    text = f"{'' if opened else begins}\nHm.\n{ends}{final}\n\nIt is 4."
    for tools in ([], TOOLS):
        made = parse_answer(text, tools, parser_of("auto", chat), chat.facts, thinking=opened, identity=str)
        message = {"role": "assistant", "reasoning_content": "Hm.", "content": "It is 4."}
        assert made == ParsedAnswer(message, thought=True, unreadable=False)
    made = parse_answer(text[: text.index(".")], TOOLS, None, chat.facts, thinking=opened, identity=str)
    assert (made.message["reasoning_content"].strip(), made.message["content"]) == ("Hm", "")


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in ("glm", "mistral")])
def test_the_next_turn_begins_with_the_tokens_of_this_one(family: str) -> None:
    """The gateway extends a conversation behind the sampled answer, with the ids that it has read."""
    chat = chat_of(family)
    answer = said(chat, ("f", {"text": LINES}))
    message = read(chat, written(chat, answer, TOOLS)).message
    result = {"role": "tool", "content": "4", "tool_call_id": message["tool_calls"][0]["id"]}
    whole = chat.render([USER, message, result], TOOLS)
    before = chat.render([USER], TOOLS) + written(chat, answer, TOOLS)
    assert whole.startswith(before)
    (last,) = {token for token in chat.stop_tokens if whole[len(before) :].startswith(chat.text([token]))}
    made = chat.extension(message, last, [result], TOOLS, thought=True)
    assert not isinstance(made, str)
    assert made.text == whole[len(before) :]
    assert ("Return of functions.f:0" in made.text) == (family == "kimi")


def test_ids_that_a_model_gives_two_calls_are_not_taken() -> None:
    one = "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    made = FORMS["kimi_k2"](f"<|tool_calls_section_begin|>{one}{one}<|tool_calls_section_end|>", TOOLS)
    assert (made.calls, made.ids) == ((("f", {}), ("f", {})), ())


@pytest.mark.parametrize(
    "text",
    [
        '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"text": "v"}',
        '<|channel|>analysis to=f code<|message|>{"text": "v"}<|call|>',
        '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"text": "v"}<|end|>',
        '<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.f<|channel|>commentary '
        '<|constrain|>json<|message|>{"text": "v"}',
    ],
)  # fmt: skip
def test_channels_as_models_write_them(text: str) -> None:
    message = read(chat_of("channels"), text).message
    assert message["tool_calls"] == [call("call0", "f", {"text": "v"})]
    assert message.get("reasoning_content", "I look.") == "I look."


def test_text_in_channels_is_not_lost() -> None:
    assert of_channels("4") == ("", "4")
    assert of_channels("<|channel|>final<|message|>4") == ("", "4")
    assert of_channels("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|chan") == (
        "a", "<|start|>assistant<|chan",
    )  # fmt: skip
    assert of_channels("so<|message|>4") == ("", "so<|message|>4")


@pytest.mark.parametrize("value", ["NaN", "b'1'", "open('/')", "{1}", "*[1]", "1 if 1 else 2"])
def test_values_that_json_does_not_have_cannot_be_read(value: str) -> None:
    made = FORMS["olmo3"](f"<function_calls>f(any={value})</function_calls>", TOOLS)
    assert made.unreadable
    assert not made.calls


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("piece", ["<parameter=a>", "to=", "<arg_key>", "<tool_call>", "<|message|>", "f(", "'", '"\\'])
def test_text_without_end_is_read_in_linear_time(name: str, piece: str) -> None:
    begins = {
        "mistral": "[TOOL_CALLS]f[ARGS]", "pythonic": "[f(k=",
        "deepseekv31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f",
        "deepseekv3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f",
        "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>", "gpt-oss": "<|channel|>to=f<|message|>",
        "minimax-m2": '<minimax:tool_call><invoke name="f">', "seed_oss": "<seed:tool_call><function=f>",
        "glm45": "<tool_call>f", "olmo3": "<function_calls>",
    }  # fmt: skip
    text = begins.get(name, "<tool_call><function=f>") + piece * 20_000
    at = time.process_time()
    FORMS[name](text, TOOLS)
    of_channels(text)
    assert time.process_time() - at < 2

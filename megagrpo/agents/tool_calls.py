"""Parsers from sampled text to a chat message: reasoning, tool calls, and other content.

Nothing is lost: a call that cannot be read, or whose tool is unknown, stays in the content, where the agent sees it.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megagrpo.agents.call_forms import FORMS, Calls, call_of, names_of
from megagrpo.agents.chat import CALL, TOOL, USER, Chat, Facts, Tools
from megagrpo.agents.dialects.chat_request import Message, call, is_arguments
from megagrpo.errors import Problem, RecipeError, brief
from megagrpo.tokenizer import TEMPLATE_ERRORS

PYTHON_TAG = "<|python_tag|>"
CHANNEL = "<|channel|>"
MESSAGE = re.compile(r"(.*?)<\|message\|>(.*?)(?:<\|(?:end|call|return)\|>|\Z)", re.DOTALL)
"""A message of an answer in channels: its head, which has the channel and whom it calls, and its text."""
SGLANG_LOGGER = "sglang.srt.function_call"
SHOWN = (
    ("kimi_k2", r"<\|tool_calls_section_begin\|>"),
    ("deepseekv31", r"<｜tool▁call▁begin｜>f<｜tool▁sep｜>"),
    ("deepseekv3", r"<｜tool▁calls▁begin｜>"),
    ("minimax-m2", r"<minimax:tool_call>"),
    ("mistral", r"\[TOOL_CALLS\]"),
    ("gpt-oss", r"<\|channel\|>commentary"),
    ("glm47", r"<tool_call>f<arg_key>"),
    ("glm45", r"<tool_call>f\s*\n\s*<arg_key>"),
    ("qwen3_coder", r"<tool_call>\s*<function=f>"),
    ("seed_oss", r"<seed:tool_call>"),
    ("olmo3", r"<function_calls>\s*f\(k="),
    ("hermes", r'<tool_call>\s*\{\s*"name"'),
    ("llama3", r'\{\s*"name": *"f", *"parameters"'),
    ("pythonic", r"\[f\(k="),
)
"""Parsers, each with the pattern of a template's call of f with k: "v" that it reads. The first match is taken."""


Parser = Callable[[str, Tools], Calls]


@dataclass(frozen=True)
class ParsedAnswer:
    """The message of an answer, and whether it has a tool call that cannot be read."""

    message: Message
    thought: bool
    unreadable: bool


def parser_of(name: str, chat: Chat) -> Parser | None:
    """Returns the parser that agent.parser names. `auto`: the one that reads the chat template's calls, None
    if it writes no call, or in a form that is not known here. Raises RecipeError if there is none of the name."""
    if name == "auto":
        return BUILT_IN.get(style_of(chat))
    if name in BUILT_IN:
        return BUILT_IN[name]
    if importlib.util.find_spec("sglang") is None:
        fix = "install SGLang (the extra sglang), or take one of megagrpo's own"
        raise RecipeError(Problem("agent.parser", f"{name}, without SGLang", f"auto, {', '.join(BUILT_IN)}", fix))
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    known = sorted({*BUILT_IN, *FunctionCallParser.ToolCallParserEnum})
    if name not in known:
        raise RecipeError(Problem("agent.parser", brief(name), f"auto, {', '.join(known)}", "name one of these"))
    return lambda content, tools: sglang_calls(name, content, tools, chat)


def style_of(chat: Chat) -> str:
    """Returns the name of the parser of calls that the chat template writes, "" if none is known. See SHOWN."""
    try:
        written = chat.render([USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}], [TOOL], prompt=False)
        before = chat.render([USER], [TOOL], prompt=False)
    except TEMPLATE_ERRORS:  # it takes no calls
        return ""
    written = written.removeprefix(before)  # tools are often explained with an example
    return next((name for name, pattern in SHOWN if re.search(pattern, written)), "")


def parse_answer(
    text: str,
    tools: Tools,
    parser: Parser | None,
    facts: Facts,
    *,
    thinking: bool,
    identity: Callable[[int], str],
) -> ParsedAnswer:
    """Parses the text of an answer into its message, by the facts of the template: an answer with several calls cannot
    be read if it writes one only.

    thinking: the prompt has opened a thought. identity: the id of the answer's n-th call, if the model gives none.
    """
    message: dict[str, Any] = {"role": "assistant"}
    opens, closes = facts.thought
    if opens.startswith(CHANNEL):
        reasoning, rest = of_channels(text)
        begun, closed = bool(reasoning), ""
    else:
        begun = thinking or text.lstrip().startswith(opens)
        reasoning, closed, rest = text.partition(closes) if begun else ("", "", text)
    read = parser(rest, tools) if parser and tools and rest else Calls(rest)
    if len(read.calls) > 1 and not facts.several_calls:
        read = Calls(rest, unreadable=True)
    if begun and facts.reasoning_field:
        message["content"] = read.content.lstrip("\n")
        message["reasoning_content"] = reasoning.replace(opens, "", 1).strip("\n")
    else:
        message["content"] = reasoning + closed + read.content
    if read.calls:
        message["content"] = message["content"].strip()
        message["tool_calls"] = [
            call(read.ids[number] if read.ids else identity(number), name, arguments)
            for number, (name, arguments) in enumerate(read.calls)
        ]
    return ParsedAnswer(message, begun or closes in text, read.unreadable)


def of_channels(text: str) -> tuple[str, str]:
    """Splits an answer in channels into its reasoning, and the rest: the other messages' text, and calls as they are
    written. Text beside a call counts as reasoning: templates write one of the two before it."""
    messages, at = [], 0
    while message := MESSAGE.match(text, at):
        messages.append(message)
        at = message.end()
    reasoning: list[str] = []
    rest: list[str] = []
    called = any("to=" in message[1] for message in messages)
    for message in messages:
        head = message[1]
        if "to=" in head or CHANNEL not in head:
            rest.append(message[0])
        else:
            (reasoning if called or f"{CHANNEL}analysis" in head else rest).append(message[2])
    return "\n\n".join(reasoning), "".join(rest) + text[at:]


def llama3_calls(content: str, tools: Tools) -> Calls:
    """Parses Llama 3: {"name": ..., "parameters": {...}}, several with ; between, after <|python_tag|> or alone."""
    before, tag, written = content.rpartition(PYTHON_TAG)
    written = written.strip()
    if not written.startswith("{"):
        return Calls(content, unreadable=bool(tag))
    calls, decoder, at = [], json.JSONDecoder(), 0
    while at < len(written):
        try:
            value, end = decoder.raw_decode(written, at)
        except (ValueError, RecursionError):
            return Calls(content, unreadable=bool(tag) or '"name"' in written)
        read = call_of(value, tools)
        if read is None:
            return Calls(content, unreadable=bool(tag) or (isinstance(value, dict) and "name" in value))
        calls.append(read)
        at = end + len(re.match(r"[\s;]*", written[end:])[0])  # type: ignore[index]  # it matches nothing, too
    return Calls(before, tuple(calls))


BUILT_IN: Mapping[str, Parser] = {**FORMS, "glm47": FORMS["glm45"], "llama3": llama3_calls}


def sglang_calls(name: str, content: str, tools: Tools, chat: Chat) -> Calls:
    """Parses with SGLang's parser of that name. SGLang leaves out unreadable calls and those of unknown tools, some
    with a warning: the whole text is then content, and no call is made."""
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    parser = FunctionCallParser([Tool.model_validate(tool) for tool in tools], name, tokenizer=chat.tokenizer)
    if not parser.has_tool_call(content):
        return Calls(content)
    warnings: list[logging.LogRecord] = []
    handler, logger = logging.Handler(logging.WARNING), logging.getLogger(SGLANG_LOGGER)
    handler.emit = warnings.append  # type: ignore[assignment]
    logger.addHandler(handler)
    try:
        left, read = parser.parse_non_stream(content)
        calls = [(one.name, json.loads(one.parameters or "{}")) for one in read]
        # A warning of a parameter's type loses nothing.
        lost = any(not record.getMessage().startswith("Parsed ") for record in warnings)
    except Exception:  # noqa: BLE001  46 parsers, of text that a model has made up
        return Calls(content, unreadable=True)
    finally:
        logger.removeHandler(handler)
    begun = content.count(mark) if (mark := parser.detector.bot_token.strip()) else 0
    names = names_of(tools)
    wrong = any(one not in names or not is_arguments(given) for one, given in calls)
    if not calls or lost or wrong or begun > len(calls):
        return Calls(content, unreadable=True)
    return Calls(left, tuple(calls))

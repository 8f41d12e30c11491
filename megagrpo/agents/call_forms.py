"""The forms in which models write tool calls, as data, and one reader of them all.

A form has marks around a section of calls, and a way to read what is between them. Models that write arguments in tags
write strings as they are and other values as JSON: the tool's schema says which is meant.
"""

from __future__ import annotations

import ast
import json
import keyword
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megagrpo.agents.chat import Tools
from megagrpo.agents.dialects.chat_request import is_arguments

Read = Callable[[str, Tools], Iterator[Any]]
"""Yields the calls of a section, {"name", "arguments", "id" if the model gives one}; raises if it reads no more."""
UNREADABLE = (ValueError, TypeError, SyntaxError, RecursionError, MemoryError)
NAME = re.compile(r"(?:functions\.)?(.+?)(:\d+)?", re.DOTALL)
"""A tool's name, or a call's id, which has the name: functions.NAME:3."""
IN_PYTHON = {"true": "True", "false": "False", "null": "None"}
WORDS = re.compile(
    r'("(?:\\.|[^"\\])*+"?|\'(?:\\.|[^\'\\])*+\'?)'
    rf"|\b({'|'.join(IN_PYTHON)})\b|\b({'|'.join(keyword.kwlist)})(?=\s*=[^=])",
    re.DOTALL,
)
"""Strings; JSON's words; and Python's own, as names of arguments."""


@dataclass(frozen=True)
class Calls:
    """The content and the calls of an answer, without reasoning. A call is a tool's name and arguments, an object.
    `ids` are those that the model gives its calls, if it gives each its own."""

    content: str
    calls: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    unreadable: bool = False
    ids: tuple[str, ...] = ()


@dataclass(frozen=True)
class Form:
    """A form of calls. begins, ends: regular expressions of the marks around a section."""

    begins: str
    ends: str
    read: Read

    def __call__(self, content: str, tools: Tools) -> Calls:
        """Parses the calls. A section with one that cannot be read, or whose tool is unknown, stays in the content."""
        calls: list[tuple[str, Mapping[str, Any]]] = []
        ids: list[str] = []
        unreadable = False

        def take(written: re.Match[str]) -> str:
            nonlocal unreadable
            try:
                values = list(self.read(written[1], tools))
                read = [call_of(value, tools) for value in values]
                made = json.loads(json.dumps([one for one in read if one], allow_nan=False))
            except UNREADABLE:
                made = []
            if not made or len(made) < len(values):
                unreadable = True
                return written[0]
            calls.extend((name, arguments) for name, arguments in made)
            ids.extend(value["id"] for value in values if value.get("id"))
            return ""

        left = re.sub(rf"{self.begins}(.*?)(?:{self.ends}|\Z)", take, content, flags=re.DOTALL)
        return Calls(left, tuple(calls), unreadable, tuple(ids) if len(set(ids)) == len(calls) else ())


def call_of(value: Any, tools: Tools) -> tuple[str, Mapping[str, Any]] | None:
    """Returns a call as models write it; None if it is none or its tool is unknown."""
    if not isinstance(value, dict):
        return None
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # some write JSON in JSON
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    if not isinstance(name, str) or name not in names_of(tools) or not is_arguments(arguments):
        return None
    return name, arguments


def names_of(tools: Tools) -> set[Any]:
    return {tool["function"]["name"] for tool in tools}


# --- what is between the marks of a section ---------------------------------------------------------------------------


def objects(section: str, tools: Tools) -> Iterator[Any]:
    """Reads {"name": ..., "arguments": {...}}."""
    yield {**json.loads(section), "id": None}


def mistral(section: str, tools: Tools) -> Iterator[Any]:
    """Reads [{"name": ..., "arguments": {...}, "id": ...}], or NAME[CALL_ID]ID[ARGS]{...}; both with or without ids."""
    if section.lstrip().startswith("["):
        for one in json.loads(section):
            yield {**one, "id": one["id"] if isinstance(one.get("id"), str) else None}
        return
    head, _, given = section.partition("[ARGS]")
    name, _, identity = head.partition("[CALL_ID]")
    yield {"name": name.strip(), "arguments": json.loads(given), "id": identity or None}


def tags(call: tuple[str, str], argument: tuple[str, str] | None = None) -> Read:
    """Makes a reader of calls between marks, regular expressions. The first of `call` finds the tool's name or the
    call's id; the first of `argument` an argument's name. No `argument`: arguments are a JSON object."""

    def read(section: str, tools: Tools) -> Iterator[Any]:
        for written, body in _between(call, section):
            match = NAME.fullmatch(written.strip())
            name, number = match.groups() if match else (written, None)
            given = (
                {key: _value(text, _schema(tools, name, key)) for key, text in _between(argument, body)}
                if argument
                else json.loads(body)
            )
            yield {"name": name, "arguments": given, "id": number and written.strip()}

    return read


def _between(marks: tuple[str, str], text: str) -> Iterator[tuple[str, str]]:
    """Yields what the first marks find, and the text up to the second ones. Raises ValueError if the text has more.
    A second mark counts where another first mark or the text's end follows: a value may quote it."""
    first, last = marks
    pattern, at = re.compile(rf"\s*{first}(.*?){last}(?=\s*(?:{first}|\Z))", re.DOTALL), 0
    while found := pattern.match(text, at):
        yield found[1], found[2]
        at = found.end()
    if text[at:].strip():
        raise ValueError(text[at:])


def _schema(tools: Tools, name: str, key: str) -> Any:
    parameters = next((tool["function"].get("parameters") for tool in tools if tool["function"]["name"] == name), None)
    return ((parameters or {}).get("properties") or {}).get(key)


def _kinds(schema: Any) -> set[str]:
    """Returns the types that a JSON schema allows, as far as it names them."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type", ["string" for one in schema.get("enum", ()) if isinstance(one, str)])
    within = [one for word in ("anyOf", "oneOf", "allOf") for one in schema.get(word, ())]
    return {named} if isinstance(named, str) else set(named).union(*map(_kinds, within))


def _value(text: str, schema: Any) -> Any:
    """Reads an argument between tags: as it is if it can be a string only; else as JSON; else, if it can be no string,
    as Python, which some templates write; else as it is."""
    kinds = _kinds(schema)
    if kinds == {"string"}:
        return text
    for read in (json.loads, ast.literal_eval) if kinds and "string" not in kinds else (json.loads,):
        try:
            value = read(text.strip())
        except UNREADABLE:
            continue
        return text if isinstance(value, str) else value
    return text


def python(section: str, tools: Tools) -> Iterator[Any]:
    """Reads NAME(k="v", n=1), a call a line or in a list, with JSON's or Python's values. An argument's name may be a
    word of Python's own, such as `from`."""

    def word(found: re.Match[str]) -> str:
        text, of_json, own = found.groups()
        return text or (IN_PYTHON[of_json] if of_json else f"{own}__")

    with warnings.catch_warnings(action="ignore"):  # of escapes that only JSON has
        lines = ast.parse(WORDS.sub(word, section.strip())).body
    values = [line.value if isinstance(line, ast.Expr) else line for line in lines]
    for one in (each for value in values for each in (value.elts if isinstance(value, ast.List) else [value])):
        if not isinstance(one, ast.Call) or one.args:
            raise ValueError(section)
        given = {str(each.arg).removesuffix("__"): ast.literal_eval(each.value) for each in one.keywords}
        yield {"name": ast.unparse(one.func), "arguments": given}


_HEAD = r"(?:(?!<\|message\|>).){0,200}?"  # of a message in a channel: bounded, so that garbage is refused soon
_CALLS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")  # DeepSeek's
FORMS: Mapping[str, Form] = {
    "hermes": Form("<tool_call>", "</tool_call>", objects),
    "glm45": Form(
        "<tool_call>",
        "(?<=</tool_call>)",
        tags((r"([^\s<]++)", "</tool_call>"), (r"<arg_key>(.*?)</arg_key>\s*<arg_value>", "</arg_value>")),
    ),
    "qwen3_coder": Form(
        "<tool_call>",
        "</tool_call>",
        tags((r"<function=([^>\n]+)>", "</function>"), (r"<parameter=([^>\n]+)>\n?", r"\n?</parameter>")),
    ),
    "seed_oss": Form(
        "<seed:tool_call>",
        "</seed:tool_call>",
        tags((r"<function=([^>\n]+)>", "</function>"), (r"<parameter=([^>\n]+)>", "</parameter>")),
    ),
    "minimax-m2": Form(
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        tags((r'<invoke name="([^">]+)">', "</invoke>"), (r'<parameter name="([^">]+)">', "</parameter>")),
    ),
    "kimi_k2": Form(
        r"<\|tool_calls_section_begin\|>",
        r"<\|tool_calls_section_end\|>",
        tags((r"<\|tool_call_begin\|>(.*?)<\|tool_call_argument_begin\|>", r"<\|tool_call_end\|>")),
    ),
    "gpt-oss": Form(
        rf"\A(?={_HEAD}\bto={_HEAD}<\|message\|>)",
        r"\Z",
        tags((rf"{_HEAD}\bto=([^\s<]+){_HEAD}<\|message\|>", r"(?:<\|(?:end|call|return)\|>|\Z)")),
    ),
    "olmo3": Form("<function_calls>", "</function_calls>", python),
    "pythonic": Form(r"(?:<\|\w+_start\|>)?(?=\[\w[\w.]*\((?:\w+\s*=|\)))", r"<\|\w+_end\|>|\Z", python),
    "mistral": Form(r"\[TOOL_CALLS\]", r"(?=\[TOOL_CALLS\])", mistral),
    "deepseekv3": Form(
        _CALLS[0],
        _CALLS[1],
        tags((r"<｜tool▁call▁begin｜>function<｜tool▁sep｜>(.*?)\n```json\n", r"\n```\s*<｜tool▁call▁end｜>")),
    ),
    "deepseekv31": Form(
        _CALLS[0], _CALLS[1], tags(("<｜tool▁call▁begin｜>(.*?)<｜tool▁sep｜>", "<｜tool▁call▁end｜>"))
    ),
}
"""By the names that SGLang has for them, where it has one. glm45 reads glm47's calls too."""

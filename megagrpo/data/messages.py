"""Conversations to learn from: rendered by the chat template, with a mask over the assistant's tokens.

messages   list of {role, content}   the first is not the assistant's, the last one is
tools      list of schemas           optional, for the chat template; these and calls' arguments may be JSON text
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from megagrpo.data.assistant import Messages, Span, spans, tokens_of
from megagrpo.data.files import Findings, Record, place
from megagrpo.data.mixture import Mixture, mix
from megagrpo.data.prompts import Reader, rendered
from megagrpo.data.rows import given_fields, message_problems, simple_schema
from megagrpo.data.store import Cache, Column, Form
from megagrpo.errors import Problem, brief
from megagrpo.recipe.schema.sft import ConversationFileConfig, SftDataConfig


@dataclass(frozen=True, slots=True)
class Conversation:
    """One valid row. `number` counts as in `files.place`."""

    number: int
    messages: Messages
    tools: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """One conversation as tokens. `loss_mask[t]` says whether token t is the assistant's."""

    id: str
    tokens: np.ndarray  # int32 [tokens]
    loss_mask: np.ndarray  # bool [tokens]

    def content(self) -> bytes:
        """Returns the bytes that must be the same when a run resumes."""
        return f"{len(self.tokens)}\0".encode() + self.tokens.tobytes() + self.loss_mask.tobytes()


def load_examples(
    files: Sequence[ConversationFileConfig], tokenizer: PreTrainedTokenizerBase, data: SftDataConfig, seed: int
) -> Mixture[Example]:
    """Loads the examples of all files, rendered and mixed. Amounts count examples after over-long ones are dropped.

    Raises DataError with the problems of all files, ModelError if the template is not valid Jinja.
    """
    arguments = data.chat_template_arguments

    def records(rows: list[Conversation], path: str, findings: Findings) -> Iterator[Column]:
        def spans_of(row: Conversation) -> list[Span]:
            given = {**arguments, "tools": list(row.tools)} if row.tools else arguments
            return [*spans(row.messages, place(path, row.number), tokenizer, given)]

        pieces = rendered(rows, spans_of, "messages", path, findings)
        if not pieces:
            return
        for row, (tokens, loss_mask) in zip(rows, tokens_of(pieces, tokenizer), strict=True):
            yield {"number": row.number, "tokens": tokens, "loss_mask": loss_mask}

    def shortened(record: Column) -> Column | None:
        tokens, mask = (record[name][: data.tokens_max] for name in ("tokens", "loss_mask"))
        return {**record, "tokens": tokens, "loss_mask": mask} if mask.any() else None

    reader: Reader[Conversation, Example] = Reader(
        EXAMPLE_FORM,
        records,
        shortened,
        data.tokens_max,
        data.overlong_examples,
        noun="example",
        tokens_field="data.tokens_max",
        truncate="truncate",
        cache=Cache(data.cache),
        tokenizer=tokenizer,
        settings={"arguments": arguments, "tools": "of each row"},
    )
    return mix(files, lambda entry, path, label: reader.read(path, label, CONVERSATION_ROWS), seed=seed)


EXAMPLE_COLUMNS = pa.schema(
    [("number", pa.int64()), ("tokens", pa.list_(pa.int32())), ("loss_mask", pa.list_(pa.bool_()))]
)


def _example(batch: pa.RecordBatch, row: int, name: str) -> Example:
    tokens, mask = batch.column("tokens")[row], batch.column("loss_mask")[row]
    return Example(name, tokens.values.to_numpy().copy(), mask.values.to_numpy(zero_copy_only=False))


EXAMPLE_FORM: Form[Example] = Form(
    EXAMPLE_COLUMNS,
    _example,
    lambda batch: [_example(batch, row, "").content() for row in range(batch.num_rows)],
)


def _row(record: Record, number: int, where: str) -> Conversation | list[Problem]:
    messages, problems = _with_calls(record["messages"], f"{where}, messages")
    tools, of_tools = _as_list(record.get("tools"), f"{where}, tools", "a list of schemas of tools")
    problems += message_problems(messages, f"{where}, messages") + of_tools
    if problems:
        return problems
    if messages[0]["role"] == "assistant":
        needed = "a message for the assistant to answer first"
        problems.append(Problem(f"{where}, messages[0].role", given="'assistant'", needed=needed))
    if messages[-1]["role"] != "assistant":
        given = brief(messages[-1]["role"])
        needed = "a last message of the assistant's to learn from"
        fix = "leave out what comes after it"
        problems.append(Problem(f"{where}, messages[{len(messages) - 1}].role", given, needed, fix))
    return problems or Conversation(number, given_fields(messages), tools)


def _with_calls(messages: Any, where: str) -> tuple[Any, list[Problem]]:
    """Returns the messages as chat templates read them: calls' arguments as objects, "" for no text beside calls."""
    problems: list[Problem] = []
    if not isinstance(messages, list):
        return messages, problems
    made = []
    for index, message in enumerate(messages):
        if isinstance(message, Mapping) and message.get("tool_calls") is not None:
            at = f"{where}[{index}].tool_calls"
            calls, of_calls = _as_list(message["tool_calls"], at, "a list of tool calls")
            read = [_read_call(call, f"{at}[{i}]") for i, call in enumerate(calls)]
            problems += [*of_calls, *(call for call in read if isinstance(call, Problem))]
            content = message.get("content")
            message = {**message, "content": "" if content is None else content, "tool_calls": read}
            if not read:
                message.pop("tool_calls")
        made.append(message)
    return made, problems


def _read_call(call: Mapping[str, Any], where: str) -> Mapping[str, Any] | Problem:
    """Returns a call {function: {name, arguments}} with its arguments as an object, or its problem."""
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        return Problem(where, brief(call), "a call {function: {name, arguments}}")
    arguments = _parsed(function.get("arguments"))
    if not isinstance(arguments, Mapping):
        given = brief(function.get("arguments"))
        return Problem(f"{where}.function.arguments", given, "an object, or one as JSON text")
    return {**call, "function": {**function, "arguments": arguments}}


def _as_list(value: Any, where: str, needed: str) -> tuple[list[Mapping[str, Any]], list[Problem]]:
    """Reads a list of objects, given as a list or as JSON text. Reads None as an empty list."""
    read = [] if value is None else _parsed(value)
    if read is not None and not (isinstance(read, list) and all(isinstance(item, Mapping) for item in read)):
        return [], [Problem(where, brief(value), f"{needed}, or one as JSON text")]
    return read or [], []


def _parsed(value: Any) -> Any:
    """Returns the value of JSON text; anything else, and text that is none, as it is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


CONVERSATION_ROWS = simple_schema(("messages",), _row, "docs/sft.md")

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

from megagrpo.data.files import Findings, Record, place
from megagrpo.data.mixture import Mixture, mix
from megagrpo.data.prompts import Reader, rendered
from megagrpo.data.rows import given_fields, message_problems, simple_schema
from megagrpo.data.store import Cache, Column, Form
from megagrpo.errors import DataError, Problem, brief
from megagrpo.recipe.schema import ConversationFileConfig
from megagrpo.recipe.schema.sft import SftDataConfig
from megagrpo.tokenizer import encode

Messages = Sequence[Mapping[str, Any]]
Span = tuple[str, bool]
"""Rendered text, and whether it is the assistant's."""
SHOWN_CHARACTERS = 30
EARLIER_CHANGES = (
    "the chat template changes earlier messages when later ones follow",
    "as it is up to this message",
    "end each row after one assistant message, or use a template that only appends (model.chat_template)",
)
"""A cause, a description of the text that is rendered without what follows, and a fix."""
PROMPT_DIFFERS = (  # R1's prompts end in <think>
    "the generation prompt (add_generation_prompt) is not how the chat template writes this message",
    "as the assistant is prompted for it",
    "put the added text into the assistant's content, or choose a template or template arguments that add "
    "nothing (model.chat_template, data.chat_template_arguments)",
)


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
    special = frozenset(number for number, token in tokenizer.added_tokens_decoder.items() if token.special)
    special |= frozenset(tokenizer.all_special_ids)
    arguments = data.chat_template_arguments

    def records(rows: list[Conversation], path: str, findings: Findings) -> Iterator[Column]:
        pieces = rendered(rows, lambda row: list(_pieces(row, path, tokenizer, arguments)), "messages", path, findings)
        if not pieces:
            return
        for row, (tokens, loss_mask) in zip(rows, _tokens(pieces, tokenizer, special), strict=True):
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


def _pieces(
    row: Conversation, path: str, tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any]
) -> Iterator[Span]:
    """Yields the rendered conversation, cut where the assistant's turns begin and end.

    Raises DataError unless each prompt that the assistant would be given is a prefix of the whole.
    """
    given = {**arguments, "tools": list(row.tools)} if row.tools else arguments

    def render(until: int, prompt: bool) -> str:
        chat: Any = list(row.messages[:until])
        return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt, **given))

    whole = render(len(row.messages), False)
    done = 0
    for turn, message in enumerate(row.messages):
        if message["role"] != "assistant":
            continue
        before = render(turn, True)
        through = whole if turn == len(row.messages) - 1 else render(turn + 1, False)
        where = f"{place(path, row.number)}, messages[{turn}]: which tokens are the assistant's is not known"
        if whole.startswith(through) and not whole.startswith(before):
            raise DataError(_no_prefix(where, before, whole, PROMPT_DIFFERS))
        for beginning in (before, through):
            if not whole.startswith(beginning) or len(beginning) <= done:
                raise DataError(_no_prefix(where, beginning, whole, EARLIER_CHANGES))
        if len(through) <= len(before):
            raise DataError(_no_prefix(where, before, through, EARLIER_CHANGES))
        yield whole[done : len(before)], False
        yield whole[len(before) : len(through)], True
        done = len(through)


def _no_prefix(where: str, beginning: str, whole: str, because: tuple[str, str, str]) -> Problem:
    """Returns the problem that the first messages are rendered as `beginning`, and otherwise in the `whole`."""
    pairs = enumerate(zip(beginning, whole, strict=False))
    differs = next((i for i, (a, b) in pairs if a != b), len(whole))
    shown = slice(max(0, differs - SHOWN_CHARACTERS), differs + SHOWN_CHARACTERS)
    cause, beginning_is, fix = because
    given = f"{whole[shown]!r} in the whole conversation from character {shown.start} on"
    return Problem(f"{where}, because {cause}", given, f"{beginning[shown]!r}, {beginning_is}", fix)


def _tokens(
    conversations: Sequence[Sequence[Span]], tokenizer: PreTrainedTokenizerBase, special: frozenset[int]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields the tokens of each conversation, int32 [tokens], and their loss mask, bool [tokens].

    Pieces are encoded one by one, as when the assistant is asked: no token is part prompt and part response.
    """
    encoded = iter(encode(tokenizer, [text for pieces in conversations for text, _ in pieces]))
    for pieces in conversations:
        tokens, masks = [], []
        for _, assistants in pieces:
            ids = next(encoded)
            tokens.append(np.array(ids, np.int32))
            masks.append(np.zeros(len(ids), bool))
            if assistants:  # without the white space that a template puts after the turn's end token
                end = max((i for i, token in enumerate(ids, 1) if token in special), default=len(ids))
                after = str(tokenizer.decode(ids[end:])) if end < len(ids) else ""
                masks[-1][: len(ids) if after.strip() else end] = True
        yield np.concatenate(tokens), np.concatenate(masks)


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

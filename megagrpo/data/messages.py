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
from jinja2 import TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from megagrpo.data.files import Findings, Record, place
from megagrpo.data.mixture import Mixture, mix
from megagrpo.data.prompts import RENDER_ERRORS, Reader, cache_of, refusal, template_error
from megagrpo.data.rows import given_fields, message_problems, simple_schema
from megagrpo.data.store import Column, Form
from megagrpo.errors import Problem, brief
from megagrpo.recipe.schema import ConversationFileConfig
from megagrpo.recipe.schema.sft import SftDataConfig
from megagrpo.tokenizer import encode

Messages = Sequence[Mapping[str, Any]]
SHOWN_CHARACTERS = 30


@dataclass(frozen=True, slots=True)
class Conversation:
    """One valid row. `number` counts as in `files.place`."""

    number: int
    messages: Messages
    tools: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, slots=True)
class Span:
    """Rendered text, and whether it is the assistant's."""

    text: str
    assistants: bool


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

    def records(rows: list[Conversation], path: str, findings: Findings) -> Iterator[Column]:
        rendered = _render(rows, tokenizer, data.chat_template_arguments, path, findings)
        if findings.count:
            return
        for row, (tokens, loss_mask) in zip(rows, _tokens(rendered, tokenizer, special), strict=True):
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
        cache=cache_of(data.cache),
        tokenizer=tokenizer,
        settings={"arguments": data.chat_template_arguments, "tools": "of each row"},
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


class NotAPrefixError(Exception):
    """The error of a template that renders the first messages of a conversation differently when others follow."""

    cause = "the chat template changes earlier messages when later ones follow"
    beginning_is = "as it is up to this message"
    fix = "end each row after one assistant message, or use a template that only appends (model.chat_template)"

    def __init__(self, beginning: str, whole: str, turn: int) -> None:
        self.beginning, self.whole, self.turn = beginning, whole, turn

    def problem(self, where: str) -> Problem:
        differs = next(
            (i for i, (a, b) in enumerate(zip(self.beginning, self.whole, strict=False)) if a != b), len(self.whole)
        )
        shown = slice(max(0, differs - SHOWN_CHARACTERS), differs + SHOWN_CHARACTERS)
        return Problem(
            f"{where}, messages[{self.turn}]: which tokens are the assistant's is not known, because {self.cause}",
            given=f"{self.whole[shown]!r} in the whole conversation from character {shown.start} on",
            needed=f"{self.beginning[shown]!r}, {self.beginning_is}",
            fix=self.fix,
        )


class PromptNotAPrefixError(NotAPrefixError):
    """The error of a generation prompt that is no beginning of an assistant's message: R1's prompts end in <think>."""

    cause = "the generation prompt (add_generation_prompt) is not how the chat template writes this message"
    beginning_is = "as the assistant is prompted for it"
    fix = (
        "put what it adds into the assistant's content, or choose a template, or arguments of it, with which it adds "
        "nothing (model.chat_template, data.chat_template_arguments)"
    )


def _render(
    conversations: Sequence[Conversation],
    tokenizer: PreTrainedTokenizerBase,
    arguments: Mapping[str, Any],
    path: str,
    findings: Findings,
) -> list[list[Span]]:
    rendered = []
    for conversation in conversations:
        where = place(path, conversation.number)
        try:
            given = {**arguments, "tools": list(conversation.tools)} if conversation.tools else arguments
            rendered.append(list(_pieces(conversation.messages, tokenizer, given)))
        except TemplateSyntaxError as error:
            raise template_error(error) from None
        except NotAPrefixError as error:
            findings.add([error.problem(where)])
        except RENDER_ERRORS as error:
            findings.add([refusal(where, error, "messages")])
    return rendered


def _pieces(messages: Messages, tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any]) -> Iterator[Span]:
    """Yields the rendered conversation, cut where the assistant's turns begin and end.

    Raises NotAPrefixError unless each prompt that the assistant would be given is a prefix of the whole.
    """

    def render(until: int, prompt: bool) -> str:
        chat: Any = list(messages[:until])
        return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt, **arguments))

    whole = render(len(messages), False)
    done = 0
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render(turn, True)
        through = whole if turn == len(messages) - 1 else render(turn + 1, False)
        if whole.startswith(through) and not whole.startswith(before):
            raise PromptNotAPrefixError(before, whole, turn)
        for beginning in (before, through):
            if not whole.startswith(beginning) or len(beginning) <= done:
                raise NotAPrefixError(beginning, whole, turn)
        if len(through) <= len(before):
            raise NotAPrefixError(before, through, turn)
        yield Span(whole[done : len(before)], assistants=False)
        yield Span(whole[len(before) : len(through)], assistants=True)
        done = len(through)


def _tokens(
    rendered: Sequence[Sequence[Span]], tokenizer: PreTrainedTokenizerBase, special: frozenset[int]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields the tokens of each conversation, int32 [tokens], and their loss mask, bool [tokens].

    Pieces are encoded one by one, as when the assistant is asked: no token is part prompt and part response.
    """
    encoded = iter(encode(tokenizer, [piece.text for pieces in rendered for piece in pieces]))
    for pieces in rendered:
        tokens, masks = [], []
        for piece in pieces:
            ids = next(encoded)
            tokens.append(np.array(ids, np.int32))
            masks.append(_trained(ids, tokenizer, special) if piece.assistants else np.zeros(len(ids), bool))
        yield np.concatenate(tokens), np.concatenate(masks)


def _trained(ids: list[int], tokenizer: PreTrainedTokenizerBase, special: frozenset[int]) -> np.ndarray:
    """Returns which tokens of an assistant's turn are trained on, bool [tokens]. Excludes the white space that a
    template puts after the turn's end token."""
    end = max((i for i, token in enumerate(ids, 1) if token in special), default=len(ids))
    after = str(tokenizer.decode(ids[end:])) if end < len(ids) else ""
    return np.arange(len(ids)) < (len(ids) if after.strip() else end)


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
            calls, found = _as_list(message["tool_calls"], f"{where}[{index}].tool_calls", "a list of tool calls")
            read = [_read_call(call, f"{where}[{index}].tool_calls[{i}]") for i, call in enumerate(calls)]
            problems += [*found, *(call for call in read if isinstance(call, Problem))]
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
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return Problem(f"{where}.function.arguments", brief(arguments), "JSON")
    if not isinstance(arguments, Mapping):
        return Problem(f"{where}.function.arguments", brief(arguments), "an object, or one as JSON text")
    return {**call, "function": {**function, "arguments": arguments}}


def _as_list(value: Any, where: str, needed: str) -> tuple[list[Mapping[str, Any]], list[Problem]]:
    """Reads a list of objects, given as a list or as JSON text. Reads None as an empty list."""
    read = value
    if isinstance(value, str):
        try:
            read = json.loads(value)
        except (ValueError, RecursionError):
            return [], [Problem(where, brief(value), f"{needed}, or one as JSON text")]
    if read is None:
        return [], []
    if not isinstance(read, list) or not all(isinstance(item, Mapping) for item in read):
        return [], [Problem(where, brief(value), needed)]
    return read, []


CONVERSATION_ROWS = simple_schema(("messages",), _row, "docs/sft.md")

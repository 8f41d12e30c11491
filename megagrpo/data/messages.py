"""Conversations to learn from: rendered by the chat template, with a mask over the assistant's tokens.

messages   list of {role, content}   the first is not the assistant's, the last one is
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from megagrpo.data.files import Findings, Record, place
from megagrpo.data.mixture import Mixture, mix
from megagrpo.data.prompts import RENDER_ERRORS, Reader, refusal, template_error
from megagrpo.data.rows import RowSchema, given_fields, message_problems
from megagrpo.errors import Problem, brief
from megagrpo.recipe.schema import DataFileConfig
from megagrpo.recipe.schema.sft import SftDataConfig
from megagrpo.tokenizer import encode

Messages = Sequence[Mapping[str, Any]]
SHOWN_CHARACTERS = 30


@dataclass(frozen=True, slots=True)
class Conversation:
    """One valid row. `number` counts as in `files.place`."""

    number: int
    messages: Messages


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
        """What must be the same when a run continues."""
        return f"{len(self.tokens)}\0".encode() + self.tokens.tobytes() + self.loss_mask.tobytes()


def load_examples(
    files: Sequence[DataFileConfig], tokenizer: PreTrainedTokenizerBase, data: SftDataConfig, seed: int
) -> Mixture[Example]:
    """Examples of all files, rendered and mixed. Amounts count those that are left after over-long ones are dropped.

    Raises DataError with the problems of all files, ModelError if the template is not valid Jinja.
    """
    special = frozenset(number for number, token in tokenizer.added_tokens_decoder.items() if token.special)
    special |= frozenset(tokenizer.all_special_ids)

    def examples(rows: list[Conversation], path: Path, label: str, findings: Findings) -> Iterator[tuple[int, Example]]:
        rendered = _render(rows, tokenizer, data.chat_template_arguments, path, findings)
        if findings.count:
            return
        for row, (tokens, loss_mask) in zip(rows, _tokens(rendered, tokenizer, special), strict=True):
            yield row.number, Example(f"{label}:{row.number}", tokens, loss_mask)

    def shortened(example: Example) -> Example | None:
        mask = example.loss_mask[: data.tokens_max]
        return replace(example, tokens=example.tokens[: data.tokens_max], loss_mask=mask) if mask.any() else None

    reader = Reader(
        CONVERSATION_ROWS,
        examples,
        shortened,
        data.tokens_max,
        data.overlong_examples,
        noun="example",
        tokens_field="data.tokens_max",
        truncate="truncate",
    )
    return mix(files, reader, seed=seed)


class NotAPrefixError(Exception):
    """The template renders the first messages of a conversation differently when others follow them."""

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
    """The generation prompt is not how the template begins an assistant's message: R1's prompts end in <think>."""

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
    path: Path,
    findings: Findings,
) -> list[list[Span]]:
    rendered = []
    for conversation in conversations:
        where = place(path, conversation.number)
        try:
            rendered.append(list(_pieces(conversation.messages, tokenizer, arguments)))
        except TemplateSyntaxError as error:
            raise template_error(error) from None
        except NotAPrefixError as error:
            findings.add([error.problem(where)])
        except RENDER_ERRORS as error:
            findings.add([refusal(where, error, "messages")])
    return rendered


def _pieces(messages: Messages, tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any]) -> Iterator[Span]:
    """The rendered conversation, cut where the assistant's turns begin and end.

    Raises NotAPrefixError unless each prompt that the assistant would be given is a beginning of the whole.
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
    """Tokens of each conversation, int32 [tokens], and which of them are the assistant's, bool [tokens].

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
    """bool [tokens]: which tokens of an assistant's turn are trained on. The white space that a template puts after the
    turn's end token is not."""
    end = max((i for i, token in enumerate(ids, 1) if token in special), default=len(ids))
    after = str(tokenizer.decode(ids[end:])) if end < len(ids) else ""
    return np.arange(len(ids)) < (len(ids) if after.strip() else end)


def _row_problems(record: Record, where: str) -> list[Problem]:
    messages = record["messages"]
    problems = message_problems(messages, f"{where}, messages")
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
    return problems


CONVERSATION_ROWS = RowSchema(
    required=("messages",),
    optional=(),
    problems=_row_problems,
    row=lambda record, number: Conversation(number, given_fields(record["messages"])),
    documentation="docs/sft.md",
)

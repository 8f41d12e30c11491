"""The assistant's turns in a conversation that the chat template has rendered, and their tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from megagrpo.errors import DataError, Problem
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


def spans(
    messages: Messages,
    where: str,
    tokenizer: PreTrainedTokenizerBase,
    arguments: Mapping[str, Any],
    first: int = 0,
) -> Iterator[Span]:
    """Yields the rendered conversation, cut where the assistant's turns begin and end: those from message `first` on.

    Raises DataError unless each prompt that the assistant would be given is a prefix of the whole.
    """

    def render(until: int, prompt: bool) -> str:
        chat: Any = list(messages[:until])
        return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt, **arguments))

    whole = render(len(messages), False)
    done = 0
    for turn, message in enumerate(messages):
        if message["role"] != "assistant" or turn < first:
            continue
        before = render(turn, True)
        through = whole if turn == len(messages) - 1 else render(turn + 1, False)
        at = f"{where}, messages[{turn}]: which tokens are the assistant's is not known"
        if whole.startswith(through) and not whole.startswith(before):
            raise DataError(_no_prefix(at, before, whole, PROMPT_DIFFERS))
        for beginning in (before, through):
            if not whole.startswith(beginning) or len(beginning) <= done:
                raise DataError(_no_prefix(at, beginning, whole, EARLIER_CHANGES))
        if len(through) <= len(before):
            raise DataError(_no_prefix(at, before, through, EARLIER_CHANGES))
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


def tokens_of(
    conversations: Sequence[Sequence[Span]], tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields the tokens of each conversation, int32 [tokens], and their loss mask, bool [tokens].

    Pieces are encoded one by one, as when the assistant is asked: no token is part prompt and part response.
    """
    special = frozenset(number for number, token in tokenizer.added_tokens_decoder.items() if token.special)
    special |= frozenset(tokenizer.all_special_ids)
    encoded = iter(encode(tokenizer, [text for pieces in conversations for text, _ in pieces]))
    for pieces in conversations:
        tokens, masks = [np.empty(0, np.int32)], [np.empty(0, bool)]
        for _, assistants in pieces:
            ids = next(encoded)
            tokens.append(np.array(ids, np.int32))
            masks.append(np.zeros(len(ids), bool))
            if assistants:  # without the white space that a template puts after the turn's end token
                end = max((i for i, token in enumerate(ids, 1) if token in special), default=len(ids))
                after = str(tokenizer.decode(ids[end:])) if end < len(ids) else ""
                masks[-1][: len(ids) if after.strip() else end] = True
        yield np.concatenate(tokens), np.concatenate(masks)

"""Rows to prompts: the tokenizer's chat template, then token ids, then the limit on length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jinja2 import TemplateError, TemplateSyntaxError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megagrpo.data.files import Findings, place
from megagrpo.data.rows import Row
from megagrpo.errors import DataError, ModelError, Problem
from megagrpo.types import Prompt

Overlong = Literal["drop", "truncate_left", "error"]
BATCH_ROWS = 1024

# What a template can do to a message it did not expect: raise by itself, or use a value as what it is not.
RENDER_ERRORS = (TemplateError, TypeError, KeyError, AttributeError, ValueError)


@dataclass(frozen=True, slots=True)
class Rendered:
    """The prompts of one file, in its order. `overlong` counts the rows that were dropped or truncated."""

    prompts: tuple[Prompt, ...]
    rows: int
    overlong: int


def load_tokenizer(
    path: str, *, revision: str | None = None, chat_template: str | None = None
) -> PreTrainedTokenizerBase:
    """The tokenizer of a directory or hub id, with `chat_template` (a Jinja file) in place of its own if given.

    Raises ModelError if there is no tokenizer, no template, or a template that is not valid Jinja.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, revision=revision)
    except Exception as reason:  # noqa: BLE001  the Rust tokenizers raise plain Exception for a bad tokenizer.json
        raise ModelError(
            Problem(
                f"{path}: no usable tokenizer",
                given=first_line(reason),
                needed="a directory or hub id with tokenizer files (tokenizer.json, tokenizer_config.json)",
                fix="check model.path, or set model.tokenizer",
            )
        ) from None
    if chat_template is not None:
        tokenizer.chat_template = _read_template(Path(chat_template))
    if not tokenizer.chat_template:
        raise ModelError(
            Problem(
                f"{path}: the tokenizer has no chat template",
                needed="a Jinja template that turns messages into text",
                fix="set model.chat_template to a Jinja file, or use the tokenizer of the instruction-tuned model",
            )
        )
    return tokenizer


def render(
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    *,
    path: Path,
    label: str,
    tokens_max: int,
    overlong: Overlong = "drop",
    template_arguments: Mapping[str, Any] | None = None,
) -> Rendered:
    """Prompts of one file's rows. Each id is `label:number`; `path` is for error messages.

    Raises DataError for rows that the template refuses, and for over-long ones if `overlong` is "error".
    """
    findings = Findings(path)
    prompts: list[Prompt] = []
    count_overlong = 0
    shared: dict[int, int] = {}  # one int object per token id: a million prompts hold few distinct ones
    for start in range(0, len(rows), BATCH_ROWS):
        batch = rows[start : start + BATCH_ROWS]
        texts = _texts(batch, tokenizer, template_arguments or {}, path, findings)
        if findings.count:
            continue
        for row, ids in zip(batch, encode(tokenizer, texts), strict=True):
            if not ids:
                findings.add([Problem(f"{place(path, row.number)}: the chat template makes no tokens of it")])
                continue
            if len(ids) > tokens_max:
                count_overlong += 1
                if overlong == "drop":
                    continue
                if overlong == "error":
                    findings.add([_overlong_problem(place(path, row.number), len(ids), tokens_max)])
                ids = ids[-tokens_max:]
            prompts.append(
                Prompt(
                    id=f"{label}:{row.number}",
                    tokens=tuple(map(shared.setdefault, ids, ids)),
                    data_source=row.data_source,
                    ground_truth=row.ground_truth,
                    ability=row.ability,
                    extra_info=row.extra_info,
                )
            )
    findings.raise_if_any()
    if not prompts:
        raise DataError(
            Problem(
                f"{path}: no prompt is left",
                given=f"all {len(rows)} rows are longer than {tokens_max} tokens",
                fix="raise data.prompt_tokens_max, or set data.overlong_prompts to truncate_left",
            )
        )
    return Rendered(tuple(prompts), len(rows), count_overlong)


def _texts(
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    arguments: Mapping[str, Any],
    path: Path,
    findings: Findings,
) -> list[str]:
    chats = [list(row.messages) for row in rows]

    def render_chats(conversation: Any) -> Any:
        return tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True, **arguments)

    try:
        return list(render_chats(chats))
    except TemplateSyntaxError as reason:
        raise template_error(reason) from None
    except RENDER_ERRORS:
        for row, chat in zip(rows, chats, strict=True):
            try:
                render_chats(chat)
            except RENDER_ERRORS as reason:
                where = f"{place(path, row.number)}: the chat template refuses the messages"
                findings.add(
                    [Problem(where, given=first_line(reason), fix="correct the row's prompt, or the template")]
                )
        if not findings.count:
            raise
        return []


def template_error(reason: TemplateSyntaxError) -> ModelError:
    given = f"line {reason.lineno}: {reason.message}"
    return ModelError(Problem("the chat template is not valid Jinja", given, fix="correct the template"))


def encode(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    # The template has written the special tokens already.
    return tokenizer(texts, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False)[
        "input_ids"
    ]


def _overlong_problem(where: str, length: int, tokens_max: int) -> Problem:
    return Problem(
        f"{where}: the prompt is too long",
        given=f"{length} tokens",
        needed=f"at most {tokens_max} (data.prompt_tokens_max)",
        fix="raise data.prompt_tokens_max, or set data.overlong_prompts to drop or truncate_left",
    )


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as reason:
        raise ModelError(
            Problem(f"{path}: the chat template cannot be read", given=first_line(reason), needed="a Jinja file")
        ) from None


def first_line(reason: BaseException) -> str:
    lines = str(reason).strip().splitlines()
    return lines[0] if lines else type(reason).__name__

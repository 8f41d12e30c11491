"""Rows to prompts: the tokenizer's chat template, then token ids, then the limit on length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from jinja2 import TemplateError, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from megagrpo.data.files import Findings, place
from megagrpo.data.mixture import Mixture, mix
from megagrpo.data.rows import Row, read_rows
from megagrpo.errors import DataError, ModelError, Problem, first_line
from megagrpo.recipe.schema import DataFileConfig
from megagrpo.tokenizer import encode
from megagrpo.types import Prompt

Overlong = Literal["drop", "truncate_left", "error"]
BATCH_ROWS = 1024

# What a template does with a message that it does not expect: it raises, or uses a value as what it is not.
RENDER_ERRORS = (TemplateError, TypeError, KeyError, AttributeError, ValueError)


def load_prompts(
    files: Sequence[DataFileConfig],
    tokenizer: PreTrainedTokenizerBase,
    *,
    tokens_max: int,
    overlong: Overlong = "drop",
    template_arguments: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Mixture[Prompt]:
    """Read, render and mix. Amounts count the prompts that are left after over-long ones are dropped.

    Raises DataError with the problems of all files, ModelError if the template is not valid Jinja.
    """
    read = partial(
        _prompts_of,
        tokenizer=tokenizer,
        tokens_max=tokens_max,
        overlong=overlong,
        template_arguments=template_arguments or {},
    )
    return mix(files, read, seed=seed)


def _prompts_of(
    path: Path,
    label: str,
    *,
    tokenizer: PreTrainedTokenizerBase,
    tokens_max: int,
    overlong: Overlong,
    template_arguments: Mapping[str, Any],
) -> tuple[list[Prompt], int, int]:
    """Prompts of one file, its rows, and the over-long ones among these. The id of a prompt is `label:number`.

    Raises DataError for rows that the template refuses, and for over-long ones if `overlong` is "error".
    """
    rows = read_rows(path)
    findings = Findings(path)
    prompts: list[Prompt] = []
    count_overlong = 0
    shared: dict[int, int] = {}  # one int object per token id: a million prompts hold few distinct ones
    for start in range(0, len(rows), BATCH_ROWS):
        batch = rows[start : start + BATCH_ROWS]
        texts = _texts(batch, tokenizer, template_arguments, path, findings)
        if findings.count:
            continue
        for row, ids in zip(batch, encode(tokenizer, texts), strict=True):
            where = place(path, row.number)
            if not ids:
                findings.add([Problem(f"{where}: the chat template makes no tokens of it")])
                continue
            if len(ids) > tokens_max:
                count_overlong += 1
                if overlong == "drop":
                    continue
                if overlong == "error":
                    findings.add([_overlong_problem(where, len(ids), tokens_max)])
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
    return prompts, len(rows), count_overlong


def _texts(
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    arguments: Mapping[str, Any],
    path: Path,
    findings: Findings,
) -> list[str]:
    """Rendered prompts of all rows; if the template refuses some, nothing, and what it says of each in `findings`."""
    chats = [list(row.messages) for row in rows]

    def render_chats(conversation: Any) -> Any:
        return tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True, **arguments)

    try:
        return list(render_chats(chats))
    except TemplateSyntaxError as error:
        raise template_error(error) from None
    except RENDER_ERRORS:
        for row, chat in zip(rows, chats, strict=True):
            try:
                render_chats(chat)
            except RENDER_ERRORS as error:
                findings.add([refusal(place(path, row.number), error, "prompt")])
        if not findings.count:
            raise
        return []


def template_error(error: TemplateSyntaxError) -> ModelError:
    given = f"line {error.lineno}: {error.message}"
    return ModelError(Problem("the chat template is not valid Jinja", given, fix="correct the template"))


def refusal(where: str, error: BaseException, column: str) -> Problem:
    """The template raised `error` when it rendered the messages in this column of a row."""
    fix = f"correct the row's {column}, or the template"
    return Problem(f"{where}: the chat template refuses the messages", given=first_line(error), fix=fix)


def _overlong_problem(where: str, length: int, tokens_max: int) -> Problem:
    return Problem(
        f"{where}: the prompt is too long",
        given=f"{length} tokens",
        needed=f"at most {tokens_max} (data.prompt_tokens_max)",
        fix="raise data.prompt_tokens_max, or set data.overlong_prompts to drop or truncate_left",
    )

"""Rows to prompts: the tokenizer's chat template, then token ids, then the limit on length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic

from jinja2 import TemplateError, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from megagrpo.data.files import Findings, place
from megagrpo.data.mixture import AnyItem, Mixture, mix
from megagrpo.data.rows import PROMPT_ROWS, AnyRow, Row, RowSchema, read
from megagrpo.errors import DataError, ModelError, Problem, first_line
from megagrpo.recipe.schema import DataFileConfig
from megagrpo.recipe.schema.data import DataConfig
from megagrpo.tokenizer import encode
from megagrpo.types import Prompt

BATCH_ROWS = 1024

# What a template does with a message that it does not expect: it raises, or uses a value as what it is not.
RENDER_ERRORS = (TemplateError, TypeError, KeyError, AttributeError, ValueError)


@dataclass(frozen=True)
class Reader(Generic[AnyRow, AnyItem]):
    """How the rows of a file become prompts or examples of at most `tokens_max` tokens.

    `items` receives rows, their path and its label, and gives each row's number and item; it adds rows that the
    template refuses to the findings. `shortened` cuts an item to `tokens_max`; None if that leaves nothing to learn
    from. `overlong` says what becomes of a longer item: "drop", "error", or `truncate`.
    """

    schema: RowSchema[AnyRow]
    items: Callable[[list[AnyRow], Path, str, Findings], Iterator[tuple[int, AnyItem]]]
    shortened: Callable[[AnyItem], AnyItem | None]
    tokens_max: int
    overlong: str
    noun: str
    tokens_field: str
    truncate: str

    def __call__(self, path: Path, label: str) -> tuple[list[AnyItem], int, int]:
        """Items of one file, its rows, and the over-long ones among them. Raises DataError with all that is wrong."""
        rows = read(path, self.schema)
        findings = Findings(path)
        kept: list[AnyItem] = []
        longer = 0
        for start in range(0, len(rows), BATCH_ROWS):
            for number, item in self.items(rows[start : start + BATCH_ROWS], path, label, findings):
                if len(item.tokens) <= self.tokens_max:
                    kept.append(item)
                    continue
                longer += 1
                if self.overlong == "error":
                    where = f"{place(path, number)}: the {self.noun} is too long"
                    needed = f"at most {self.tokens_max} ({self.tokens_field})"
                    fix = f"raise {self.tokens_field}, or set data.overlong_{self.noun}s to drop or {self.truncate}"
                    findings.add([Problem(where, f"{len(item.tokens)} tokens", needed, fix)])
                elif self.overlong == self.truncate and (short := self.shortened(item)) is not None:
                    kept.append(short)
        findings.raise_if_any()
        if not kept:
            given, fix = f"all {len(rows)} rows are longer than {self.tokens_max} tokens", f"raise {self.tokens_field}"
            if self.overlong == self.truncate:
                given = f"none of the {len(rows)} rows has a token of the assistant's within {self.tokens_max} tokens"
            else:
                fix += f", or set data.overlong_{self.noun}s to {self.truncate}"
            raise DataError(Problem(f"{path}: no {self.noun} is left", given=given, fix=fix))
        return kept, len(rows), longer


def load_prompts(
    files: Sequence[DataFileConfig], tokenizer: PreTrainedTokenizerBase, data: DataConfig, seed: int
) -> Mixture[Prompt]:
    """Prompts of all files, rendered and mixed. Amounts count those that are left after over-long ones are dropped.

    The id of a prompt is `label:number`. Raises DataError with the problems of all files, ModelError if the template
    is not valid Jinja.
    """
    shared: dict[int, int] = {}  # one int object per token id: a million prompts hold few distinct ones

    def prompts(rows: list[Row], path: Path, label: str, findings: Findings) -> Iterator[tuple[int, Prompt]]:
        texts = _texts(rows, tokenizer, data.chat_template_arguments, path, findings)
        if findings.count:
            return
        for row, ids in zip(rows, encode(tokenizer, texts), strict=True):
            if not ids:
                findings.add([Problem(f"{place(path, row.number)}: the chat template makes no tokens of it")])
                continue
            yield (
                row.number,
                Prompt(
                    id=f"{label}:{row.number}",
                    tokens=tuple(map(shared.setdefault, ids, ids)),
                    data_source=row.data_source,
                    ground_truth=row.ground_truth,
                    ability=row.ability,
                    extra_info=row.extra_info,
                ),
            )

    reader = Reader(
        PROMPT_ROWS,
        prompts,
        lambda prompt: replace(prompt, tokens=prompt.tokens[-data.prompt_tokens_max :]),
        data.prompt_tokens_max,
        data.overlong_prompts,
        noun="prompt",
        tokens_field="data.prompt_tokens_max",
        truncate="truncate_left",
    )
    return mix(files, reader, seed=seed)


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

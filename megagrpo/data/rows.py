"""Rows of a data file, checked against a schema: all problems, or all rows. The columns of a prompt file:

data_source   text                            where the row comes from; reward functions receive it
prompt        list of {role, content}         chat messages; the last one is not the assistant's
ability       text, optional                  kind of task; kept in rollouts.jsonl
reward_model  {style, ground_truth}           what the reward compares with; style is not used
extra_info    struct, optional                anything else; reward functions receive it
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar

from megagrpo.data.files import Findings, Record, column_problem, columns, path_problem, place, records
from megagrpo.errors import DataError, Problem, brief

ROLES = ("system", "user", "assistant", "tool")
ROWS_IN_QUICK_CHECK = 16
AnyRow = TypeVar("AnyRow")


@dataclass(frozen=True)
class RowSchema(Generic[AnyRow]):
    """Columns of a kind of file. `problems` receives a record and its place, `row` a good record and its number."""

    required: tuple[str, ...]
    optional: tuple[str, ...] | None  # None: all others
    problems: Callable[[Record, str], list[Problem]]
    row: Callable[[Record, int], AnyRow]
    documentation: str


def read(path: Path, schema: RowSchema[AnyRow]) -> list[AnyRow]:
    """All rows of a file. Raises DataError with up to ten of its problems and the count of the others."""
    findings, rows = _check(path, schema, limit=None)
    findings.raise_if_any()
    return rows


def quick_look(path: Path, schema: RowSchema[AnyRow]) -> list[Problem]:
    """Problems of the file as a whole, of its columns and of its first rows, whatever its size. Raises nothing."""
    if problem := path_problem(path):
        return [problem]
    try:
        findings, _ = _check(path, schema, limit=ROWS_IN_QUICK_CHECK)
    except DataError as error:
        return list(error.problems)
    return findings.problems()


def _check(path: Path, schema: RowSchema[AnyRow], limit: int | None) -> tuple[Findings, list[AnyRow]]:
    findings = Findings(path)
    rows: list[AnyRow] = []
    present = columns(path)
    if present:  # a first JSONL line that cannot be read has none, and is reported as a row
        missing = [name for name in schema.required if name not in present]
        findings.add(column_problem(path, name, present, schema.documentation) for name in missing)
        if missing:
            return findings, rows
    seen = 0
    wanted = None if schema.optional is None else schema.required + schema.optional
    for number, record in islice(records(path, wanted), limit):
        seen += 1
        if isinstance(record, Problem):
            findings.add([record])
            continue
        where = place(path, number)
        problems = [
            Problem(f"{where}: no {name!r}", given=f"keys {', '.join(record)}", needed=name)
            for name in schema.required
            if name not in record
        ] or schema.problems(record, where)
        findings.add(problems)
        if not problems:
            rows.append(schema.row(record, number))
    if not seen:
        findings.add([Problem(str(path), "the file has no rows", "at least one row")])
    return findings, rows


def message_problems(messages: object, where: str) -> list[Problem]:
    """What is wrong with the form of a list of messages."""
    if not isinstance(messages, list):
        fix = "wrap it as [{role: user, content: TEXT}]" if isinstance(messages, str) else ""
        return [Problem(where, given=brief(messages), needed="a list of messages {role, content}", fix=fix)]
    if not messages:
        return [Problem(where, given="no messages", needed="at least one message {role, content}")]
    problems = []
    for index, message in enumerate(messages):
        at = f"{where}[{index}]"
        if not isinstance(message, Mapping):
            problems.append(Problem(at, given=brief(message), needed="a message {role, content}"))
            continue
        if message.get("role") not in ROLES:
            given = brief(message.get("role"))
            problems.append(Problem(f"{at}.role", given, needed=f"one of {', '.join(ROLES)}"))
        problems += text_problems(message.get("content"), f"{at}.content")
    return problems


def given_fields(messages: list[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """Messages without the fields that only other rows of a parquet file have."""
    return tuple({k: v for k, v in message.items() if v is not None} for message in messages)


@dataclass(frozen=True, slots=True)
class Row:
    """One valid row of a prompt file. `number` counts as in `files.place`."""

    number: int
    data_source: str
    messages: tuple[Mapping[str, Any], ...]
    ground_truth: str
    ability: str
    extra_info: Mapping[str, Any]


def _row_problems(record: Record, where: str) -> list[Problem]:
    problems = text_problems(record["data_source"], f"{where}, data_source")
    problems += _prompt_problems(record["prompt"], f"{where}, prompt")
    problems += _ground_truth_problems(record["reward_model"], f"{where}, reward_model")
    if record.get("ability") is not None:
        problems += text_problems(record["ability"], f"{where}, ability")
    extra = record.get("extra_info")
    if extra is not None and not isinstance(extra, Mapping):
        needed = "an object with named fields, or null"
        problems.append(Problem(f"{where}, extra_info", given=brief(extra), needed=needed))
    return problems


def _prompt_problems(messages: Any, where: str) -> list[Problem]:
    if problems := message_problems(messages, where):
        return problems
    if messages[-1]["role"] == "assistant":
        needed = "a last message for the assistant to answer"
        return [Problem(f"{where}[{len(messages) - 1}].role", given="'assistant'", needed=needed)]
    if not any(message["content"].strip() for message in messages):
        return [Problem(where, given="messages without any text", needed="a question")]
    return []


def _ground_truth_problems(reward_model: object, where: str) -> list[Problem]:
    if not isinstance(reward_model, Mapping):
        return [Problem(where, given=brief(reward_model), needed="{style, ground_truth}")]
    if "ground_truth" not in reward_model:
        return [Problem(where, given=f"fields {', '.join(map(str, reward_model))}", needed="a field ground_truth")]
    return text_problems(reward_model["ground_truth"], f"{where}.ground_truth")


def text_problems(value: object, where: str) -> list[Problem]:
    if not isinstance(value, str):
        fix = f"write it as text: {str(value)!r}" if isinstance(value, int | float) else ""
        return [Problem(where, given=brief(value), needed="text", fix=fix)]
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:  # JSON can spell half of a surrogate pair, which no tokenizer accepts
            return [Problem(where, given=brief(value), needed="valid Unicode text", fix="remove the lone surrogate")]
    return []


PROMPT_ROWS = RowSchema(
    required=("data_source", "prompt", "reward_model"),
    optional=("ability", "extra_info"),
    problems=_row_problems,
    row=lambda record, number: Row(
        number=number,
        data_source=record["data_source"],
        messages=given_fields(record["prompt"]),
        ground_truth=record["reward_model"]["ground_truth"],
        ability=record.get("ability") or "",
        extra_info=record.get("extra_info") or {},
    ),
    documentation="docs/data.md; `megagrpo prepare jsonl --prompt-column NAME --answer-column NAME` writes such files",
)

"""The schema of a prompt file, the one the field uses, and its rows checked against it.

data_source   text                            where the row comes from; reward functions receive it
prompt        list of {role, content}         chat messages; the last one is not the assistant's
ability       text, optional                  kind of task; kept in rollouts.jsonl
reward_model  {style, ground_truth}           what the reward compares with; style is not used
extra_info    struct, optional                anything else; reward functions receive it
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megagrpo.data.checking import RowSchema, look, read
from megagrpo.data.files import Record, brief
from megagrpo.errors import Problem

REQUIRED = ("data_source", "prompt", "reward_model")
OPTIONAL = ("ability", "extra_info")
ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Row:
    """One valid row. `number` counts as in `files.place`."""

    number: int
    data_source: str
    messages: tuple[Mapping[str, Any], ...]
    ground_truth: str
    ability: str
    extra_info: Mapping[str, Any]


def read_rows(path: Path) -> list[Row]:
    """All rows of a prompt file. Raises DataError with up to ten of its problems and the count of the others."""
    return read(path, PROMPT_ROWS)


def file_problems(path: Path) -> list[Problem]:
    """A quick look, whatever the file's size: that it opens, its columns, its first rows. Raises nothing."""
    return look(path, PROMPT_ROWS)


def _row(record: Record, number: int) -> Row:
    return Row(
        number=number,
        data_source=record["data_source"],
        messages=given_fields(record["prompt"]),
        ground_truth=record["reward_model"]["ground_truth"],
        ability=record.get("ability") or "",
        extra_info=record.get("extra_info") or {},
    )


def given_fields(messages: list[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """Messages without the fields that only other rows of a parquet file have."""
    return tuple({k: v for k, v in message.items() if v is not None} for message in messages)


def _row_problems(record: Record, where: str) -> list[Problem]:
    problems = _text_problems(record["data_source"], f"{where}, data_source")
    problems += _prompt_problems(record["prompt"], f"{where}, prompt")
    problems += _ground_truth_problems(record["reward_model"], f"{where}, reward_model")
    if record.get("ability") is not None:
        problems += _text_problems(record["ability"], f"{where}, ability")
    extra = record.get("extra_info")
    if extra is not None and not isinstance(extra, Mapping):
        problems.append(
            Problem(f"{where}, extra_info", given=brief(extra), needed="an object with named fields, or null")
        )
    return problems


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
            problems.append(
                Problem(f"{at}.role", given=brief(message.get("role")), needed=f"one of {', '.join(ROLES)}")
            )
        problems += _text_problems(message.get("content"), f"{at}.content")
    return problems


def _prompt_problems(messages: object, where: str) -> list[Problem]:
    problems = message_problems(messages, where)
    if problems or not isinstance(messages, list):
        return problems
    if messages[-1]["role"] == "assistant":
        problems.append(
            Problem(
                f"{where}[{len(messages) - 1}].role",
                given="'assistant'",
                needed="a last message for the assistant to answer",
            )
        )
    if not problems and not any(message["content"].strip() for message in messages):
        problems.append(Problem(where, given="messages without any text", needed="a question"))
    return problems


def _ground_truth_problems(reward_model: object, where: str) -> list[Problem]:
    if not isinstance(reward_model, Mapping):
        return [Problem(where, given=brief(reward_model), needed="{style, ground_truth}")]
    if "ground_truth" not in reward_model:
        return [Problem(where, given=f"fields {', '.join(map(str, reward_model))}", needed="a field ground_truth")]
    return _text_problems(reward_model["ground_truth"], f"{where}.ground_truth")


def _text_problems(value: object, where: str) -> list[Problem]:
    if not isinstance(value, str):
        fix = f"write it as text: {str(value)!r}" if isinstance(value, int | float) else ""
        return [Problem(where, given=brief(value), needed="text", fix=fix)]
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:  # JSON can spell half of a surrogate pair, which no tokenizer accepts
            return [Problem(where, given=brief(value), needed="valid Unicode text", fix="remove the lone surrogate")]
    return []


PROMPT_ROWS = RowSchema(REQUIRED, OPTIONAL, _row_problems, _row, "docs/data.md")

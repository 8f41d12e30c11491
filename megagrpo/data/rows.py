"""Rows of a data file, checked: all problems, or all rows. A row of a prompt file, whatever its columns are called:

data_source   text                            where the row comes from; reward functions receive it
prompt        list of {role, content}, text   chat messages; the last one is not the assistant's. A text is the user's
ground_truth  text, number, list or object    what the reward compares with; as text, or JSON text
ability       text, optional                  kind of task; kept in rollouts/
extra_info    all other columns               reward functions receive them

The recipe names these columns (data.train[].columns). verl's (prompt, reward_model.ground_truth,
data_source) and open-instruct's (messages, ground_truth, dataset) are known.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar

from megagrpo.data.files import Findings, Record, columns, has_columns, place, records, row_count
from megagrpo.errors import DataError, Problem, brief
from megagrpo.progress import progress
from megagrpo.recipe.schema.data import ColumnsConfig, ConstantColumn

ROLES = ("system", "user", "assistant", "tool")
ROWS_IN_QUICK_CHECK = 16
AnyRow = TypeVar("AnyRow")


@dataclass(frozen=True)
class RowSchema(Generic[AnyRow]):
    """The conversion of one file's records into rows. `row` receives a record, its number and its place, and returns
    the row or its problems. A record has all of `required`. `remedy` receives a missing column and those present, and
    returns what is needed and the fix."""

    required: tuple[str, ...]
    remedy: Callable[[str, Sequence[str]], tuple[str, str]]
    row: Callable[[Record, int, str], AnyRow | list[Problem]]


SchemaOf = Callable[[Sequence[str]], RowSchema[AnyRow]]
"""A function of the names of a file's columns, which are empty if its first record cannot be read."""


def simple_schema(
    required: tuple[str, ...], row: Callable[[Record, int, str], AnyRow | list[Problem]], documentation: str
) -> SchemaOf[AnyRow]:
    """Returns the same schema for every file, whatever other columns it has."""

    def remedy(column: str, present: Sequence[str]) -> tuple[str, str]:
        near = difflib.get_close_matches(column, present, n=1)
        return f"a column {column!r}", f"rename {near[0]!r} to {column!r}" if near else f"see {documentation}"

    schema = RowSchema(required, remedy, row)
    return lambda present: schema


def read(path: str | Path, schema_of: SchemaOf[AnyRow]) -> list[AnyRow]:
    """Reads all rows of a file. Raises DataError with up to ten of its problems and the count of the others."""
    findings = Findings(path)
    with reading(str(path), Path(path).name, schema_of, findings) as rows:
        good = list(rows)
    findings.raise_if_any()
    return good


@contextmanager
def reading(path: str, label: str, schema_of: SchemaOf[AnyRow], findings: Findings) -> Iterator[Iterator[AnyRow]]:
    """Yields `stream` of a whole file. Shows the rows that are read, of those that the file states."""
    total = row_count(path) if has_columns(path) else None
    with progress(f"reading {label}", total, "rows") as work:

        def counted() -> Iterator[AnyRow]:
            for row in stream(path, schema_of, findings):
                work.done += 1
                yield row

        yield counted()


def quick_look(path: str | Path, schema_of: SchemaOf[AnyRow]) -> list[Problem]:
    """Returns the problems of a file as a whole, of its columns and of its first rows, at any size. Raises nothing."""
    findings = Findings(path)
    try:
        for _ in stream(str(path), schema_of, findings, limit=ROWS_IN_QUICK_CHECK):
            pass
    except DataError as error:
        return list(error.problems)
    return findings.problems()


def stream(path: str, schema_of: SchemaOf[AnyRow], findings: Findings, limit: int | None = None) -> Iterator[AnyRow]:
    """Yields the good rows of a file (of its first `limit` records). Adds the problems of others to `findings`.

    Raises DataError if the file as a whole cannot be read.
    """
    present = columns(path)
    schema = schema_of(present)
    if present and (missing := [name for name in schema.required if name not in present]):
        where = path if has_columns(path) else place(path, next(records(path))[0])
        given = f"columns {', '.join(present)}"
        findings.add(Problem(f"{where}: no column {name!r}", given, *schema.remedy(name, present)) for name in missing)
        return
    seen = 0
    for number, record in islice(records(path), limit):
        seen += 1
        if isinstance(record, Problem):
            findings.add([record])
            continue
        where = place(path, number)
        if lacking := [name for name in schema.required if name not in record]:
            given = f"keys {', '.join(record)}"
            findings.add(Problem(f"{where}: no {name!r}", given, needed=name) for name in lacking)
            continue
        row = _pictures(record, where) or schema.row(record, number, where)
        if isinstance(row, list):
            findings.add(row)
        else:
            yield row
    if not seen:
        findings.add([Problem(path, "the file has no rows", "at least one row")])


def _pictures(record: Record, where: str) -> list[Problem]:
    """Returns the problems of columns with pictures. Text in them is something else, such as a container's name."""
    columns = (name for name in ("image", "images", "videos") if record.get(name) and not isinstance(record[name], str))
    return [Problem(f"{where}, {name}", f"a {type(record[name]).__name__}", *TEXT_ALONE) for name in columns]


TEXT_ALONE = ("text alone: pictures are not read", "leave out the rows with pictures")


def message_problems(messages: object, where: str) -> list[Problem]:
    """Returns the problems with the form of a list of messages."""
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
        content = message.get("content")
        parts = [part.get("type") for part in content if isinstance(part, Mapping)] if isinstance(content, list) else []
        if others := sorted({str(kind) for kind in parts if kind} - {"text"}):
            problems.append(Problem(f"{at}.content", f"parts of type {', '.join(others)}", *TEXT_ALONE))
        else:
            problems += text_problems(content, f"{at}.content")
    return problems


def given_fields(messages: list[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """Returns messages without the fields that only other rows of a parquet file have."""
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


# --- prompt files -----------------------------------------------------------------------------------------------------

KNOWN_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "prompt": ("prompt", "messages"),
    "ground_truth": ("reward_model.ground_truth", "ground_truth"),
    "data_source": ("data_source", "dataset"),
}
"""Default columns of a part of a row: first verl's, then open-instruct's."""

MISSING = object()


def prompt_schema(mapping: ColumnsConfig | None = None) -> SchemaOf[Row]:
    """Returns the schema of prompt rows, with the columns that the recipe names, else known ones."""
    given = mapping or ColumnsConfig()

    def schema(present: Sequence[str]) -> RowSchema[Row]:
        parts = {part: getattr(given, part) or _known(part, present) for part in KNOWN_COLUMNS}
        parts |= {"ability": given.ability, "extra_info": given.extra_info}
        names = [name for column in parts.values() for name in _names(column, present)]
        two_truths = given.ground_truth is None and {"reward_model", "ground_truth"} <= set(present)

        def row(record: Record, number: int, where: str) -> Row | list[Problem]:
            columns_of = parts
            if two_truths and _value(record, parts["ground_truth"]) is MISSING:
                columns_of = parts | {"ground_truth": "ground_truth"}
            taken = ["extra_info", *_listed("ability" if given.ability is None else given.ability)]
            for part in KNOWN_COLUMNS:
                named = getattr(given, part)
                taken += _names(columns_of[part], []) if named is None else _listed(named)
            return _row(record, number, where, columns_of, taken)

        return RowSchema(tuple(dict.fromkeys(names)), partial(_column_remedy, parts), row)

    return schema


def data_sources(path: str, mapping: ColumnsConfig | None = None) -> Iterator[tuple[int, str]]:
    """Yields (number of its first row, name) of each data source of a file. Raises DataError if it cannot be read."""
    return ((number, source) for number, source, _ in sources_with(path, mapping))


def sources_with(path: str, mapping: ColumnsConfig | None, also: str | None = None) -> Iterator[tuple[int, str, Any]]:
    """Yields (number of its first row, data source, value of `also`) of each such pair in a file. also: a key of
    extra_info; rows without it have None. Raises DataError if the file cannot be read."""
    given, present = mapping or ColumnsConfig(), columns(path)
    column = given.data_source or _known("data_source", present)
    others = [name for name in _listed(given.extra_info) if name.rpartition(".")[2] == also] or _listed(also)
    names = [*_names(column, present), *_names(others, present), *(["extra_info"] if also else [])]
    seen: set[tuple[str, str]] = set()
    for number, record in records(path, names):
        source = _value(record, column) if isinstance(record, dict) else None
        if isinstance(source, list) and len(source) == 1:
            source = source[0]
        if not isinstance(source, str) or not isinstance(record, dict):
            continue
        extra = record.get("extra_info")
        value = extra.get(also) if isinstance(extra, Mapping) else None
        for name in others if value is None else ():
            value = None if (found := _value(record, name)) is MISSING else found
        if (source, repr(value)) not in seen:
            seen.add((source, repr(value)))
            yield number, source, value
            if not names:
                return


def _known(part: str, present: Sequence[str]) -> str:
    verl, open_instruct = KNOWN_COLUMNS[part]
    default = open_instruct if "messages" in present else verl
    return next((name for name in (verl, open_instruct) if name.partition(".")[0] in present), default)


def _names(column: Any, present: Sequence[str]) -> list[str]:
    """Returns the file's own columns that a part of a row is made of."""
    return [name if name in present else name.partition(".")[0] for name in _listed(column)]


def _listed(column: Any) -> list[str]:
    if column is None or isinstance(column, ConstantColumn):
        return []
    return column if isinstance(column, list) else [column]


def _without(record: Mapping[str, Any], taken: Sequence[str]) -> Record:
    """Returns a record without these columns, and without these fields of its objects."""
    rest = dict(record)
    for column in taken:
        first, _, inner = column.partition(".")
        if column in rest:
            del rest[column]
        elif inner and isinstance(rest.get(first), Mapping):
            rest[first] = _without(rest[first], [inner])
            if not rest[first]:
                del rest[first]
    return rest


def _column_remedy(parts: Mapping[str, Any], column: str, present: Sequence[str]) -> tuple[str, str]:
    """Returns the need of a missing column, and the `columns` to write in the recipe."""
    part = next((part for part, named in parts.items() if column in _names(named, present)), column)
    near = difflib.get_close_matches(column, present, n=1)
    say = near[0] if near else "{value: NAME}" if part == "data_source" else "NAME"
    if isinstance(parts.get(part), list):
        say = f"[{', '.join(say if column in _names(name, present) else name for name in parts[part])}]"
    fix = f"write columns: {{{part}: {say}}} beside the file's path in the recipe (docs/data.md)"
    return f"a column {column!r}, the row's {part}", fix


def _row(
    record: Record, number: int, where: str, parts: Mapping[str, Any], taken: Sequence[str]
) -> Row | list[Problem]:
    """Returns the row or its problems. extra_info gets the columns not in `taken`, unless `parts` names its columns."""
    values: dict[str, Any] = {}
    problems: list[Problem] = []
    for part, column in parts.items():
        values[part] = value = _value(record, column)
        for name in _listed(column) if value is MISSING else []:
            if _value(record, name) is MISSING:
                needed = f"a value at {name}, the row's {part}"
                problems.append(Problem(f"{where}: no {name!r}", f"keys {', '.join(map(str, record))}", needed))
    if problems:
        return problems
    source, truth = values["data_source"], values["ground_truth"]
    ability = record.get("ability") if parts["ability"] is None else values["ability"]
    if isinstance(source, list) and len(source) == 1:  # newer files of open-instruct: a list of verifiers
        source, truth = source[0], truth[0] if isinstance(truth, list) and len(truth) == 1 else truth
    prompt = values["prompt"]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    text = truth_text(truth)
    problems += text_problems(source, f"{where}, {_called(parts['data_source'])}")
    problems += _prompt_problems(messages, f"{where}, {_called(parts['prompt'])}")
    at = f"{where}, {_called(parts['ground_truth'])}"
    if text is None:
        problems.append(Problem(at, given=brief(truth), needed="text, a finite number, a list or an object"))
    else:
        problems += text_problems(text, at)
    if ability is not None:
        problems += text_problems(ability, f"{where}, {_called(parts['ability'] or 'ability')}")
    extra = record.get("extra_info")
    if extra is not None and not isinstance(extra, Mapping):
        needed = "an object with named fields, or null"
        problems.append(Problem(f"{where}, extra_info", given=brief(extra), needed=needed))
    if problems or text is None:
        return problems
    others = _without(record, taken) if parts["extra_info"] is None else values["extra_info"]
    return Row(number, source, given_fields(messages), text, ability or "", {**others, **(extra or {})})


def _called(column: Any) -> str:
    return "value" if isinstance(column, ConstantColumn) else ", ".join(column) if isinstance(column, list) else column


def _value(record: Record, column: Any) -> Any:
    """Returns a record's value for a part of a row; MISSING if it is absent, None if the part has no column."""
    if column is None:
        return None
    if isinstance(column, ConstantColumn):
        return column.value
    if isinstance(column, list):
        values = {name.rpartition(".")[2]: _value(record, name) for name in column}
        return MISSING if MISSING in values.values() else values
    if column in record:
        return record[column]
    value: Any = record
    for name in column.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return MISSING
        value = value[name]
    return value


def truth_text(value: Any) -> str | None:
    """Returns a ground truth as text: numbers, lists and objects as JSON. Returns None for other values, and for
    numbers that are not finite or longer than Python writes."""
    if isinstance(value, str):
        return value
    if isinstance(value, Decimal):
        return str(value) if value.is_finite() else None
    if value is None:
        return None
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return None


def _prompt_problems(messages: Any, where: str) -> list[Problem]:
    if problems := message_problems(messages, where):
        return problems
    if messages[-1]["role"] == "assistant":
        needed = "a last message for the assistant to answer"
        return [Problem(f"{where}[{len(messages) - 1}].role", given="'assistant'", needed=needed)]
    if not any(message["content"].strip() for message in messages):
        return [Problem(where, given="messages without any text", needed="a question")]
    return []


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

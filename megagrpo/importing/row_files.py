"""Tables of options from the YAML files beside this module: one row for each option, in the order of its page.

A row that needs more than a value, a choice or a switch has the name of a function that computes the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from megagrpo.errors import Problem, RecipeError
from megagrpo.importing.rows import (
    ABSENT,
    OFF,
    Answer,
    Compute,
    Condition,
    Missing,
    Nothing,
    Options,
    Row,
    Table,
    Together,
    Write,
    among,
    number,
    picked,
    text,
    texts,
    truth,
    whole,
)
from megagrpo.importing.values import run_name
from megagrpo.recipe.yaml12 import parse

TYPES: Mapping[str, Callable[[Any], Any]] = {
    "any": lambda value: value,
    "whole": whole,
    "number": number,
    "truth": truth,
    "text": text,
    "texts": texts,
    "name": run_name,
    "items": lambda value: value if isinstance(value, list) else [value],
    "fraction": lambda value: float(number(value)),
    "from_0": lambda value: max(0, whole(value)),
    "minutes": lambda value: 60.0 * number(value),
    "mebibytes": lambda value: whole(value) * 2**20,
}
"""The value that a field gets from an option of each type: seconds from minutes, bytes from mebibytes."""


@dataclass(frozen=True)
class RowText:
    """A row as its file has it, in one of FORMS. Beside them any row has `default` and `said`, as Row has them."""

    default: Any = ABSENT
    said: str = ""
    to: str = ""
    """The recipe's field that is written, by its dotted path; `*` in it stands for the option's last name."""
    shown: str = ""
    """The field that pages name, if it is not `to`."""
    type: str = ""
    """The kind of the option's values, of TYPES."""
    note: str = ""
    """The difference, for a reader of the recipe."""
    choices: Mapping[str, Any] = field(default_factory=dict)
    """The field's value by the option's, or a mapping of several fields."""
    otherwise: str = ""
    """The reason why other values have no counterpart."""
    if_true: Any = ABSENT
    if_false: Any = ABSENT
    """The field's value while the option is on or off. One may be left out, with `same` in its place."""
    same: str = ""
    """The reason why the option writes nothing: megagrpo does the same, or the option has no effect."""
    missing: str = ""
    """The reason why the option has no counterpart, and what to do. Values of OFF need none."""
    nothing: Sequence[Any] = ()
    """More values that write nothing."""
    part_of: str = ""
    """The field that other options write, which read this one."""
    answer: str = ""
    """The function that computes the answer."""
    when: str = ""
    """The condition without which the option has no effect."""


FORMS: Sequence[tuple[set[str], set[str]]] = (
    ({"to", "type"}, {"nothing", "same", "note", "shown", "when"}),
    ({"to", "choices", "otherwise"}, {"type", "nothing", "shown", "when"}),
    ({"to", "nothing", "same", "otherwise"}, set()),
    ({"to", "if_true", "if_false"}, {"when"}),
    ({"to", "if_true", "same"}, {"shown", "when"}),
    ({"to", "if_false", "same"}, {"shown", "when"}),
    ({"same"}, {"to"}),
    ({"missing"}, {"nothing"}),
    ({"part_of"}, set()),
    ({"answer"}, {"to", "when"}),
)
"""Keys that a row of each form has, and those that it may have."""


def read_table(path: Path, answers: Mapping[str, Compute], conditions: Mapping[str, Condition]) -> Table:
    """Reads a file of rows. answers, conditions: those that rows name. Raises RecipeError if a row is wrong."""
    document = parse(path.read_text(encoding="utf-8"), lambda line: f"{path}:{line}")
    found, problems = dict[str, Row](), [problem for _, problem in document.problems]
    for option, tree in document.tree.items():
        if wrong := _wrong(tree, answers, conditions):
            problems.append(Problem(f"{path}:{document.lines[option]} {option}", wrong, "a row as RowText says"))
        else:
            found[option] = _row(RowText(**tree), answers, conditions)
    if problems:
        raise RecipeError(problems)
    return found


def _wrong(tree: Any, answers: Mapping[str, Compute], conditions: Mapping[str, Condition]) -> str:
    """Returns the first thing that is wrong with a row, or nothing."""
    if not isinstance(tree, dict) or not tree.keys() <= {key.name for key in fields(RowText)}:
        return str(tree)
    kinds = {"choices": dict, "nothing": list}
    for key in tree.keys() - {"default", "if_true", "if_false"}:
        if not isinstance(tree[key], kinds.get(key, str)) or not tree[key]:
            return f"{key}: {tree[key]}"
    for key, known in {"type": TYPES, "answer": answers, "when": conditions}.items():
        if key in tree and tree[key] not in known:
            return f"{key}: {tree[key]}, which is none of {', '.join(known)}"
    keys = tree.keys() - {"default", "said"}
    formed = any(needed <= keys <= needed | more for needed, more in FORMS)
    return "" if formed else f"{', '.join(tree)} together"


def _row(row: RowText, answers: Mapping[str, Compute], conditions: Mapping[str, Condition]) -> Row:
    plain, condition = answers.get(row.answer) or partial(_of_value, row), conditions.get(row.when)
    answer = _under(condition, plain) if condition else plain
    said = row.said if row.to else row.said or row.same or row.missing
    return Row(answer, row.shown or row.to or row.part_of, row.default, said)


def _under(condition: Condition, answer: Compute) -> Compute:
    return lambda value, options: answer(value, options) if condition.holds(options) else Nothing(condition.otherwise)


def _of_value(row: RowText, value: Any, _: Options) -> Answer:
    nothing = among(value, row.nothing)
    if row.otherwise:
        choice = picked(row.choices, TYPES[row.type](value) if row.type else value)
        if choice is not None:
            return Write(choice if isinstance(choice, dict) else {row.to: choice})
        return (Nothing(row.same) if row.same else Write({})) if nothing else Missing(row.otherwise)
    if row.type:
        return Nothing(row.same or "not set") if nothing else Write({row.to: TYPES[row.type](value)}, row.note)
    if row.part_of:
        return Together()
    if row.missing:
        off = nothing or among(value, OFF) or value in ([], {})
        return Nothing("as here") if off else Missing(row.missing)
    if row.if_true is ABSENT and row.if_false is ABSENT:
        return Nothing(row.same)
    switched = row.if_true if truth(value) else row.if_false
    return Nothing(row.same) if switched is ABSENT else Write({row.to: switched})

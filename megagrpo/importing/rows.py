"""Rows of a framework's table, one for each option in the order of its page, and the answer about an option's value.

A row that needs more than a value, a choice or a switch has the name of a function that computes the answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, Literal

from megagrpo.errors import Problem, RecipeError
from megagrpo.importing.options import Given, unknown_in
from megagrpo.recipe.yaml12 import parse

ABSENT = object()
"""In place of a default: the option does nothing unless it is given."""
Kind = Literal["translated", "same", "missing", "unknown"]
"""same: nothing to write, because it is so here by default, or has no effect. missing: no counterpart."""
PLAIN_NAMES = ("train", "test", "val", "valid", "validation", "eval", "dev", "data")
OFF = (None, False, 0, -1, "", "null", "none", "None", "disabled")
"""Values that turn a feature off."""


@dataclass(frozen=True)
class Write:
    """Fields of the recipe, by dotted paths; `*` in one stands for the option's last name. note: how they differ from
    what the option means there. source: their origin, if not this option alone."""

    fields: Mapping[str, Any]
    note: str = ""
    source: str = ""


@dataclass(frozen=True)
class Nothing:
    """The answer for an option that writes nothing, because it is so here already or the option has no effect."""

    why: str
    kind: ClassVar[Kind] = "same"


@dataclass(frozen=True)
class Missing:
    """The answer for an option without counterpart here: why, and what to do."""

    why: str
    kind: ClassVar[Kind] = "missing"


@dataclass(frozen=True)
class Unknown:
    """The answer for an option that no row names, or whose value is not known."""

    why: str
    kind: ClassVar[Kind] = "unknown"


@dataclass(frozen=True)
class Together:
    """The answer for an option that is part of what other options write: those that read it."""


Answer = Write | Nothing | Missing | Unknown | Together


class NotKnownError(Exception):
    """A value that cannot be understood: it depends on another machine or file, or has another type."""


class Options:
    """The options of a configuration over a framework's defaults, by name."""

    def __init__(self, given: Mapping[str, Given], defaults: Mapping[str, Any]) -> None:
        self.given, self.defaults = given, defaults
        self.read: set[str] = set()
        """Names that were looked up."""

    def __iter__(self) -> Iterator[str]:
        return iter({**self.defaults, **self.given})

    def __contains__(self, name: str) -> bool:
        return name in self.given

    def __getitem__(self, name: str) -> Any:
        """Returns the option's value or default, else None. Raises NotKnownError if its value is not known."""
        self.read.add(name)
        value = self.given[name].value if name in self.given else self.defaults.get(name)
        if unknown := unknown_in(value):
            raise NotKnownError(
                f"the value needs {unknown}, which is not known here: give one of both by --set NAME=VALUE"
            )
        if value == "???":
            raise NotKnownError("it has no value (???)")
        return value

    def whole(self, name: str) -> int:
        return whole(self[name])

    def number(self, name: str) -> float:
        return number(self[name])

    def true(self, name: str) -> bool:
        return truth(self[name])


# --- values -----------------------------------------------------------------------------------------------------------


def whole(value: Any) -> int:
    if type(value) is not int and not (type(value) is float and value.is_integer()):
        raise NotKnownError(f"{value!r} is no whole number")
    return int(value)


def number(value: Any) -> float:
    """Returns a number. An integer stays one, so that recipes are read as written. Raises NotKnownError."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise NotKnownError(f"{value!r} is no number")
    return value


def truth(value: Any) -> bool:
    if isinstance(value, str) and value.lower() in ("true", "false", "1", "0", "yes", "no"):
        return value.lower() in ("true", "1", "yes")
    if value in (None, 0, 1):
        return bool(value)
    raise NotKnownError(f"{value!r} is neither true nor false")


def text(value: Any) -> str:
    if isinstance(value, list | dict | bool) or value is None:
        raise NotKnownError(f"{value!r} is no text")
    return str(value)


def texts(value: Any) -> list[str]:
    return [text(item) for item in (value if isinstance(value, list) else [value])]


def run_name(value: Any) -> str:
    """Returns a name that a run may have: other characters become underscores."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text(value)).strip("._-")[:100] or "imported"


def picked(choices: Mapping[Any, Any], value: Any) -> Any:
    """Returns the choice for a value; None if the value is none of the choices, or a list or mapping."""
    return None if isinstance(value, list | dict) else choices.get(value)


def among(value: Any, values: Collection[Any]) -> bool:
    """Returns whether a value is among others. True is not 1, and False is not 0."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in values)


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
    "from_0": lambda value: max(0, whole(0 if value is None else value)),
    "up_to_1": lambda value: min(number(value), 1),
    "minutes": lambda value: 60.0 * number(value),
    "mebibytes": lambda value: whole(value) * 2**20,
}
"""The value that a field gets from an option of each type: seconds from minutes, bytes from mebibytes."""

# --- rows -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Condition:
    """A condition without which options have no effect. Its names are of options, or of functions of all options."""

    otherwise: str
    """The reason why they have none."""
    only: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Values by name: each has one of its own."""
    unless: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Values by name: none has one of these."""
    functions: Mapping[str, Callable[[Options], Any]] = field(default_factory=dict)

    def holds(self, options: Options) -> bool:
        return all(self._has(options, *one) for one in self.only.items()) and not any(
            self._has(options, *one) for one in self.unless.items()
        )

    def _has(self, options: Options, name: str, values: Sequence[Any]) -> bool:
        value = self.functions[name](options) if name in self.functions else options[name]
        return among(truth(value) if isinstance(values[0], bool) else value, values)


@dataclass(frozen=True)
class Row:
    """One option, in one of FORMS. Beside the keys of a form any row has `default` and `said`."""

    default: Any = ABSENT
    """The framework's default, for an option that is not given."""
    said: str = ""
    """The difference, for pages."""
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
    least: float | None = None
    """The least value that is written: for a lesser one, or none, `same` or `missing` has the reason."""
    part_of: str = ""
    """The field that other options write, which read this one."""
    answer: Callable[[Any, Options], Answer] | None = None
    """The function that computes the answer from the option's value and all options."""
    when: Condition | None = None

    @property
    def fields(self) -> str:
        """Returns the recipe's fields, as pages name them."""
        return self.shown or self.to or self.part_of

    def of(self, value: Any, options: Options) -> Answer:
        if self.when and not self.when.holds(options):
            return Nothing(self.when.otherwise)
        if self.answer:
            return self.answer(value, options)
        if self.part_of:
            return Together()
        nothing = among(value, self.nothing)
        if self.otherwise:
            choice = picked(self.choices, TYPES[self.type](value) if self.type else value)
            if choice is not None:
                return Write(choice if isinstance(choice, dict) else {self.to: choice})
            return (Nothing(self.same) if self.same else Write({})) if nothing else Missing(self.otherwise)
        if self.least is not None and (value is None or whole(value) < self.least):
            return Nothing(self.same) if self.same else Missing(self.missing)
        if self.type:
            return Nothing(self.same or "not set") if nothing else Write({self.to: TYPES[self.type](value)}, self.note)
        if self.missing:
            off = nothing or among(value, OFF) or value in ([], {})
            return Nothing("as here") if off else Missing(self.missing)
        if self.if_true is ABSENT and self.if_false is ABSENT:
            return Nothing(self.same)
        switched = self.if_true if truth(value) else self.if_false
        return Nothing(self.same) if switched is ABSENT else Write({self.to: switched})


FORMS: Sequence[tuple[set[str], set[str]]] = (
    ({"to", "type"}, {"nothing", "same", "note", "shown", "when"}),
    ({"to", "type", "least", "same"}, set()),
    ({"to", "type", "least", "missing"}, set()),
    ({"to", "choices", "otherwise"}, {"type", "nothing", "shown", "when"}),
    ({"to", "nothing", "same", "otherwise"}, set()),
    ({"to", "if_true", "if_false"}, {"when"}),
    ({"to", "if_true", "same"}, {"shown", "when"}),
    ({"to", "if_false", "same"}, {"shown", "when"}),
    ({"same"}, {"to"}),
    ({"missing"}, {"to", "nothing", "when"}),
    ({"part_of"}, set()),
    ({"answer"}, {"to", "when"}),
)
"""Keys that a row of each form has, and those that it may have."""

Table = Mapping[str, Row]
"""Rows by options; `prefix.*` is the row of all options that begin so and have no row of their own."""


def read_table(path: Path, functions: Mapping[str, Any]) -> Table:
    """Reads a file of rows, and of `conditions` by name. functions: those that both name. Raises RecipeError if a row
    is wrong."""
    document = parse(path.read_text(encoding="utf-8"), lambda line: f"{path}:{line}")
    table, problems = dict[str, Row](), [problem for _, problem in document.problems]
    conditions = {
        name: Condition(**tree, functions=functions) for name, tree in document.tree.pop("conditions", {}).items()
    }
    for option, tree in document.tree.items():
        if wrong := _wrong(tree, functions, conditions):
            problems.append(Problem(f"{path}:{document.lines[option]} {option}", wrong, "a row as Row says"))
        else:
            named = {"answer": functions.get(tree.get("answer")), "when": conditions.get(tree.get("when"))}
            table[option] = Row(**{**tree, **named})
    if problems:
        raise RecipeError(problems)
    return table


def _wrong(tree: Any, functions: Mapping[str, Any], conditions: Mapping[str, Condition]) -> str:
    """Returns the first thing that is wrong with a row, or nothing."""
    if not isinstance(tree, dict) or not tree.keys() <= {key.name for key in fields(Row)}:
        return str(tree)
    kinds = {"choices": dict, "nothing": list, "least": int}
    for key in tree.keys() - {"default", "if_true", "if_false"}:
        if not isinstance(tree[key], kinds.get(key, str)) or not tree[key]:
            return f"{key}: {tree[key]}"
    for key, known in {"type": TYPES, "answer": functions, "when": conditions}.items():
        if key in tree and tree[key] not in known:
            return f"{key}: {tree[key]}, which is none of {', '.join(known)}"
    keys = tree.keys() - {"default", "said"}
    formed = any(needed <= keys <= needed | more for needed, more in FORMS)
    return "" if formed else f"{', '.join(tree)} together"


# --- answers that several frameworks share ----------------------------------------------------------------------------


def set_name(path: str) -> str:
    """Returns a name for an evaluation set, from its file: gsm8k for gsm8k/test.parquet, aime for aime.jsonl."""
    file = PurePosixPath(path)
    stem = file.name.split(".")[0]
    named = file.parent.name if stem.lower() in PLAIN_NAMES and file.parent.name else stem
    return re.sub(r"[^A-Za-z0-9_-]+", "_", named).strip("_-") or "held_out"


def layout_of(gpus: int, sizes: Mapping[str, int], engine: int, engines: int | None = None) -> Answer:
    """Returns data ranks and engines on `gpus` GPUs that both use in turn. sizes: of tensor, pipeline and context;
    engine: GPUs of one engine. engines: their number, if they have GPUs of their own."""
    ranks = prod(sizes.values())
    if gpus % ranks:
        product = " x ".join(f"{name} {size}" for name, size in sizes.items())
        return Missing(f"{gpus} GPUs are no multiple of {product}: give train.layout")
    if engines is None and gpus % engine:
        return Missing(f"{gpus} GPUs are no multiple of engines of {engine}: give rollout.engines")
    return Write({"train.layout.data": gpus // ranks, "rollout.engines": engines or gpus // engine})


def microbatches(longest: int) -> tuple[int, str]:
    """Returns the tokens of a microbatch that holds the longest sequence, and why."""
    return max(longest, 8192), "as many as the longest sequence, at least"


def warmup(share: float, steps: Any) -> Answer:
    """Returns the steps of a warm-up that is a share of all. steps: None if unknown before the data is counted."""
    if not share:
        return Write({"train.optimizer.warmup_steps": 0})
    if steps is None:
        return Missing(f"a share of all steps ({share:g}): give their number in train.optimizer.warmup_steps")
    return Write({"train.optimizer.warmup_steps": round(share * whole(steps))})

"""Values allowed at each path of a recipe, in plain words; and pydantic's errors as problems, one for each place."""

from __future__ import annotations

import difflib
import math
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Annotated, Any, Literal, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megagrpo.errors import Problem, brief, listed
from megagrpo.section import ByName, Section, table_beside

LONGEST_VALUE = 60
PROBLEMS_MAX = 100
NAMES_OF_TYPES = re.compile(r"str$|literal\[|list\[|dict\[|constrained-str")
"""Pydantic's names for the types of a union other than sections."""
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d{1,2})?")
TRUE_OR_FALSE = dict.fromkeys(("yes", "on", "true"), "true") | dict.fromkeys(("no", "off", "false"), "false")
UNIONS = (typing.Union, types.UnionType)


@cache
def moved() -> dict[str, str]:
    """Reads moved.yaml: what replaces keys, and values of keys, of earlier versions and of verl."""
    read: dict[str, str] = table_beside(__file__, "moved.yaml")
    return read


@dataclass(frozen=True)
class Expected:
    """The values allowed at one place of a recipe."""

    annotation: Any
    metadata: tuple[Any, ...] = ()
    description: str = ""
    others: Mapping[str, type[Section]] = field(default_factory=dict)
    """The sections that another choice would allow here, by name."""

    @cached_property
    def members(self) -> list[tuple[Any, tuple[Any, ...]]]:
        """Returns each type of a union, or the one type, with its constraints. A choice of sections is one of them."""
        return list(_members(self.annotation, self.metadata))

    @cached_property
    def choice(self) -> tuple[ByName, dict[str, type[Section]]] | None:
        """Returns the key that chooses one of several sections, and these sections by name."""
        for kind, bounds in self.members:
            for named in (bound for bound in bounds if isinstance(bound, ByName)):
                return named, named.members(kind)
        return None

    @property
    def sections(self) -> list[type[Section]]:
        """Returns the sections whose keys are allowed here."""
        if self.choice:
            return list(dict.fromkeys(self.choice[1].values()))
        return [a for a in self.alternatives if isinstance(a, type) and issubclass(a, Section)]

    @property
    def alternatives(self) -> list[Any]:
        """Returns the types of a union without their constraints; of any other type, itself."""
        return [kind for kind, _ in self.members]

    @property
    def is_list(self) -> bool:
        return any(get_origin(a) is list for a in self.alternatives)

    def below(self, key: str) -> Expected | None:
        """Returns the values allowed at `key` inside this value; None if there are none."""
        if self.annotation is Any:
            return self
        for section in self.sections:
            if key in section.model_fields:
                return _of_field(section.model_fields[key])
        for alternative in () if self.sections else self.alternatives:
            origin, arguments = get_origin(alternative), get_args(alternative)
            if origin is list and key.isdecimal():
                return Expected(arguments[0])
            if origin is dict:
                return Expected(arguments[1])
            if _is_open(alternative):
                info = alternative.model_fields.get(key)
                return Expected(Any) if info is None else _of_field(info)
        return None

    def words(self) -> str:
        """Returns `an integer of at least 1`, `one of drop, truncate_left, error`, ..."""
        return listed([_words(kind, metadata) for kind, metadata in self.members], "or")


def is_field(path: str, recipe_class: type[Section]) -> bool:
    """Returns whether the schema has a place with this dotted path."""
    expected: Expected | None = Expected(recipe_class)
    for key in path.split("."):
        expected = expected.below(key) if expected else None
    return bool(path) and expected is not None


def nearest(given: str, valid: Iterable[str]) -> str | None:
    """Returns the valid name that `given` was probably meant to be; None if none is near."""
    return next(iter(difflib.get_close_matches(given, list(valid), n=1, cutoff=0.6)), None)


def schema_problems(
    tree: Mapping[str, Any], errors: Iterable[Mapping[str, Any]], recipe_class: type[Section]
) -> list[Problem]:
    """Returns a problem for each place in `errors` (pydantic's ValidationError.errors()); `where` is the dotted path.

    A union reports an error for each member: errors with the same place become one problem, or none if there is an
    error below that place. A missing key is left out if an unknown key beside it is its misspelling.
    """
    problems: dict[str, Problem] = {}
    for error in sorted(errors, key=lambda error: error["type"] == "missing"):
        keys, expected = _place(error["loc"], recipe_class)
        value, kind = _value(tree, keys), error["type"]
        if kind in ("union_tag_invalid", "union_tag_not_found") and expected.choice and isinstance(value, dict):
            keys.append(expected.choice[0].key)
            value = value.get(expected.choice[0].key)
            kind = "missing" if value is None else kind
        path = ".".join(map(str, keys))
        sibling_fixes = [p.fix for at, p in problems.items() if at.rpartition(".")[0] == path.rpartition(".")[0]]
        misspelt = error["type"] == "missing" and _did_you_mean(str(keys[-1])) in sibling_fixes
        if path not in problems and not misspelt:
            key = str(keys[-1])
            if kind == "extra_forbidden" and expected.sections:
                problems[path] = unknown_key(path, key, value, expected, recipe_class)
            else:
                description = " ".join(expected.description.split()).rstrip(".")
                needed = f"{expected.words()} ({description})" if description else expected.words()
                absent = kind == "missing"
                fix = f"add `{key}:`" if absent else _fix(path, key, value, expected)
                problems[path] = Problem(path, "nothing" if absent else yaml_text(value), needed, fix)
        if len(problems) == PROBLEMS_MAX:
            return [*problems.values(), Problem(path, f"more problems than these {PROBLEMS_MAX}", "a recipe that fits")]
    return [problem for path, problem in problems.items() if not any(at.startswith(f"{path}.") for at in problems)]


def unknown_key(path: str, key: str, value: Any, section: Expected, recipe_class: type[Section]) -> Problem:
    """Returns the problem of a key that the section does not have, with the name that was probably meant."""
    keys = list(dict.fromkeys(name for one in section.sections for name in one.model_fields))
    owners = [name for name, other in section.others.items() if key in other.model_fields]
    if path in moved() and value is None:
        fix = "remove it"
    elif path in moved():
        fix = moved()[path].replace("VALUE", str(value).lower() if isinstance(value, bool) else str(value))
    elif "." in key:
        fix = "write one key on a line, each section's keys indented below it (dots are for overrides)"
    elif owners:
        chooser = next(name for name in ("name", "level", "kind") if name in keys)
        fix = f"remove it, or write {chooser}: {owners[0]} (it is for {listed(owners)})"
    elif guess := nearest(key, keys):
        fix = _did_you_mean(guess)
    elif elsewhere := list(dict.fromkeys(p for p in _paths(recipe_class, "") if p.rpartition(".")[2] == key)):
        fix = f"`{key}` belongs at {' or '.join(elsewhere)}"
    else:
        fix = "remove it"
    return Problem(path, given=f"the unknown key `{key}`", needed=f"one of {', '.join(keys)}", fix=fix)


def yaml_text(value: Any) -> str:
    """Returns a YAML value for an error message, with its type where it could be mistaken."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | dict):
        return f"{'a' if value else 'an empty'} {'list' if isinstance(value, list) else 'mapping'}"
    text = value if isinstance(value, str) else brief(value)
    if len(text) > LONGEST_VALUE:
        text = text[: LONGEST_VALUE - 3] + "..."
    return f"'{text}' (text)" if isinstance(value, str) else text


def _place(location: Iterable[str | int], recipe_class: type[Section]) -> tuple[list[str | int], Expected]:
    """Returns the path in pydantic's location (unions add names of members), and the values allowed there."""
    keys: list[str | int] = []
    expected = Expected(recipe_class)
    for key in location:
        if expected.choice and key in expected.choice[1]:
            members = expected.choice[1]
            others = {name: section for name, section in members.items() if section is not members[str(key)]}
            expected = Expected(members[str(key)], others=others)
            continue
        inner = expected.below(str(key))
        named = next((section for section in expected.sections if section.__name__ == key), None)
        if inner is None and named:  # pydantic's name for a section beside other values
            expected = Expected(named)
            continue
        of_union = len(expected.members) > 1 and NAMES_OF_TYPES.match(str(key))
        if of_union or (inner is None and not expected.sections):
            break
        keys.append(key)
        if inner is None:  # a key that the section does not have
            break
        expected = inner
    return keys, expected


def _value(tree: Any, keys: Iterable[str | int]) -> Any:
    for key in keys:
        if isinstance(tree, str):  # a name that stands for its section
            return tree
        if isinstance(tree, Mapping) and key not in tree:
            return None
        tree = tree[key]
    return tree


def _fix(path: str, key: str, value: Any, expected: Expected) -> str:
    words = expected.words()
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15 and "integer" in words:
        return f"write {int(value)}"
    if isinstance(value, float) and not math.isfinite(value):
        return "write a finite number"
    if isinstance(value, str):
        return _fix_of_text(path, value, expected)
    if value is None and expected.sections:
        return f"give `{key}` its keys, or remove it"
    if value is None:
        return f"give `{key}` a value"
    if words.startswith("text") and not isinstance(value, list | dict):
        return f'put quotes around it: "{value}"'
    if words.startswith("a list") and not isinstance(value, list):
        return "write it as a list: a line starting with `- ` for each item"
    return ""


def _fix_of_text(path: str, value: str, expected: Expected) -> str:
    if removed := moved().get(f"{path}: {value}"):
        return removed
    if expected.choice and ByName.OWN in expected.choice[1] and value.endswith(".py"):
        return f"name the file's function: {value}:FUNCTION"
    names = (a for a in expected.alternatives if get_origin(a) is Literal)
    choices = [str(choice) for name in names for choice in get_args(name)]
    if guess := nearest(value, expected.choice[1] if expected.choice else choices):
        return _did_you_mean(guess)
    if expected.choice:
        return "write one of these names"
    words = expected.words()
    if "integer" in words and (digits := value.replace("_", "").replace(",", "")).isdecimal():
        return f"write {digits}, without quotes or separators"
    if "true or false" in words and value.lower() in TRUE_OR_FALSE:
        return f"write {TRUE_OR_FALSE[value.lower()]}"
    if "number" in words and NUMBER.fullmatch(value):
        return f"write {value} without quotes"
    if path == "name":
        return "use letters, digits, dot, dash and underscore only"
    return ""


def _did_you_mean(name: str) -> str:
    return f"did you mean `{name}`?"


def _paths(section: type[Section], prefix: str) -> Iterator[str]:
    """Yields the dotted paths of all fields outside of lists."""
    for name, info in section.model_fields.items():
        yield prefix + name
        for inner in _of_field(info).sections:
            yield from _paths(inner, f"{prefix}{name}.")


def _of_field(info: FieldInfo) -> Expected:
    return Expected(info.annotation, tuple(info.metadata), info.description or "")


def _members(annotation: Any, metadata: tuple[Any, ...] = ()) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        bounds = (bound for one in more for bound in (one.metadata if isinstance(one, FieldInfo) else [one]))
        yield from _members(inner, (*metadata, *bounds))
    elif get_origin(annotation) in UNIONS and not any(isinstance(one, ByName) for one in metadata):
        for member in get_args(annotation):
            yield from _members(member)
    else:
        yield annotation, metadata


def _is_open(annotation: Any) -> bool:
    """Returns whether a type is a mapping of any keys besides its own, like rollout.sglang."""
    return isinstance(annotation, type) and issubclass(annotation, BaseModel) and not issubclass(annotation, Section)


def _words(annotation: Any, metadata: tuple[Any, ...]) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    for named in metadata:
        if isinstance(named, ByName):
            return f"one of {', '.join(named.members(annotation))}, alone or as the `{named.key}` of its settings"
    if origin is Literal:
        return ", ".join(map(str, arguments)) if len(arguments) == 1 else f"one of {', '.join(map(str, arguments))}"
    if origin is list:
        filled = any(isinstance(m, annotated_types.MinLen) for m in metadata)
        return f"a list{' with at least one item' if filled else ''}, each item {Expected(arguments[0]).words()}"
    if origin is dict and get_origin(arguments[0]) is Literal:
        return f"a mapping of names to {Expected(arguments[1]).words()}; names are {', '.join(get_args(arguments[0]))}"
    if origin is dict or _is_open(annotation):
        return "a mapping of names to values"
    if annotation is type(None):
        return "null"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return f"a mapping with keys among {', '.join(annotation.model_fields)}"
    kind = {int: "an integer", float: "a number", bool: "true or false", str: "text"}[annotation]
    bounds = (("ge", "of at least"), ("gt", "above"), ("le", "of at most"), ("lt", "below"))
    parts = [f"{words} {getattr(m, name)}" for m in metadata for name, words in bounds if hasattr(m, name)]
    return f"{kind} {' and '.join(parts)}" if parts else kind

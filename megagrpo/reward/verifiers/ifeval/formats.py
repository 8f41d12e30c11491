"""The constraints of a row of data, read from IFEval's own format or one of open-instruct's two."""

from __future__ import annotations

import ast
import inspect
import json
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any

from megagrpo.errors import brief
from megagrpo.reward.verifiers.ifeval import constraints, iftrain, open_instruct

IDS = ("instruction_id_list", "instruction_id")
"""The field with the ids: IFEval's, and that of open-instruct's IF-multi-constraints."""

CONSTRAINTS_MAX = 100

BY_ID = constraints.BY_ID | iftrain.BY_ID
"""Every constraint that a row can name by an id."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """A constraint: `holds(response)` returns whether a response keeps it. Several of a row may share a name."""

    name: str
    holds: Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class Instructions:
    """All constraints of a row. `strip`: spaces around a response do not count, as in open-instruct."""

    constraints: tuple[Constraint, ...]
    strip: bool


def read(ground_truth: str, extra_info: Mapping[str, Any]) -> Instructions:
    """Returns the constraints of a row: of its ground truth if that is a list or mapping, else of extra_info.

    Raises ValueError if neither has any, or for one that is unknown or lacks an argument.
    """
    if ground_truth.lstrip()[:1] in ("{", "["):
        return of_ground_truth(ground_truth)
    if "instruction_id_list" in extra_info:
        return of_mapping(extra_info)
    raise ValueError("neither the ground truth nor extra_info has instruction_id_list")


@lru_cache(maxsize=4096)
def of_ground_truth(text: str) -> Instructions:
    """Returns the constraints of a text: JSON, or a Python literal, which open-instruct has too."""
    try:
        value = json.loads(text)
    except ValueError:
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            raise ValueError(f"the ground truth {brief(text)} is neither JSON nor a Python literal") from None
    except RecursionError:
        raise ValueError("the ground truth has too many brackets within each other") from None
    if isinstance(value, list) and len(value) == 1:  # open-instruct: a list of one mapping, or of one text of JSON
        value = json.loads(value[0]) if isinstance(value[0], str) else value[0]
    if not isinstance(value, dict):
        raise ValueError(f"the ground truth {brief(text)} is not a mapping")
    return of_mapping(value)


def of_mapping(value: Mapping[str, Any]) -> Instructions:
    """Returns the constraints of a mapping in any of the three formats.

    >>> row = {"func_name": "validate_word_constraint", "N": 3, "quantifier": "at most", "word": None}
    >>> [constraint.holds("just three words") for constraint in of_mapping(row).constraints]
    [True]
    """
    if "func_name" in value:
        arguments = {name: argument for name, argument in value.items() if name != "func_name"}
        return Instructions((constraint(open_instruct.BY_NAME, value["func_name"], arguments),), strip=True)
    field = next((field for field in IDS if value.get(field) is not None), None)
    if field is None:
        raise ValueError(f"the constraints have none of the fields func_name, {', '.join(IDS)}: {brief(dict(value))}")
    ids, arguments_of_all = _list(value[field]), _list(value.get("kwargs"))
    if not 1 <= len(ids) <= CONSTRAINTS_MAX or len(ids) != len(arguments_of_all):
        needed = f"1 to {CONSTRAINTS_MAX}, and kwargs for each"
        raise ValueError(f"there are {len(ids)} constraints with kwargs for {len(arguments_of_all)}, not {needed}")
    found = [constraint(BY_ID, name, arguments) for name, arguments in zip(ids, arguments_of_all, strict=True)]
    return Instructions(tuple(found), strip=field == "instruction_id")


def _list(value: object) -> Sequence[Any]:
    """Returns a list, given as it is or as JSON text. Raises ValueError for other values."""
    value = json.loads(value) if isinstance(value, str) else value
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise ValueError(f"{brief(value)} is not a list")
    return value


def constraint(functions: Mapping[str, Callable[..., bool]], name: object, arguments: object) -> Constraint:
    """Returns the constraint with its non-null arguments. Raises ValueError if it is unknown or they do not fit."""
    function = functions.get(name) if isinstance(name, str) else None
    if function is None:
        raise ValueError(f"the constraint {brief(name)} is unknown")
    if not isinstance(arguments, Mapping | None):
        raise ValueError(f"the arguments of {name} are {brief(arguments)}, not a mapping")
    given = {key: value for key, value in (arguments or {}).items() if value is not None}
    hints = _hints(function)
    if given.keys() != hints.keys():
        raise ValueError(f"{name} has the arguments {', '.join(given) or 'none'}, not {', '.join(hints) or 'none'}")
    checked = {key: _argument(f"{key} of {name}", given[key], hint) for key, hint in hints.items()}
    holds = partial(function, **checked)
    holds("a")  # a function may have further rules for its arguments, which do not wait for a response
    return Constraint(str(name).replace(":", "_"), holds)


@cache
def _hints(function: Callable[..., bool]) -> dict[str, Any]:
    hints = typing.get_type_hints(function)
    return {name: hints[name] for name in list(inspect.signature(function).parameters)[1:]}


def _argument(what: str, value: object, hint: Any) -> object:
    """Returns the value as a function takes it: an int from 0 up, a text, a list of texts, or one of a few words.

    Reads a list of one text as a text if the function takes one, as open-instruct does. Raises ValueError otherwise.
    """
    if hint is int:
        # Where some rows have no number, their column holds floats.
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
        raise ValueError(f"{what} is {brief(value)}, not an integer from 0 up")
    if typing.get_origin(hint) is typing.Literal:
        if value in typing.get_args(hint):
            return value
        raise ValueError(f"{what} is {brief(value)}, not {' or '.join(typing.get_args(hint))}")
    if hint is str and isinstance(value, list) and len(value) == 1:
        value = value[0]
    texts = [value] if isinstance(value, str) else value
    fits = hint != list[str] if isinstance(value, str) else hint is not str
    if fits and isinstance(texts, list) and texts and all(isinstance(text, str) and text.strip() for text in texts):
        return value
    raise ValueError(f"{what} is {brief(value)}, not {'a list of texts' if hint == list[str] else 'a text'}")

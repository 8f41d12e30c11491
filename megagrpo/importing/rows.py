"""Rows of a framework's table: the answer about one option, and the values that options have."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megagrpo.importing.options import Given, unknown_in

ABSENT = object()
"""In place of a default: the option does nothing unless it is given."""
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


@dataclass(frozen=True)
class Missing:
    """The answer for an option without counterpart here: why, and what to do."""

    why: str


@dataclass(frozen=True)
class Together:
    """The answer for an option that is part of what other options write: those that read it."""


Answer = Write | Nothing | Missing | Together


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

    def any_below(self, prefix: str) -> bool:
        return any(name.startswith(prefix) for name in self.given)

    def __getitem__(self, name: str) -> Any:
        """Returns the option's value or default, else None. Raises NotKnownError if its value is not known."""
        self.read.add(name)
        found = self.given.get(name)
        value = found.value if found else self.defaults.get(name)
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


Compute = Callable[[Any, Options], Answer]
"""An answer from the option's value and all options."""


def by_name(*answers: Compute) -> dict[str, Compute]:
    """Returns the functions by their own names, by which rows name them."""
    return {getattr(answer, "__name__", ""): answer for answer in answers}


@dataclass(frozen=True)
class Condition:
    """A condition without which an option has no effect. otherwise: why it has none."""

    holds: Callable[[Options], bool]
    otherwise: str


@dataclass(frozen=True)
class Row:
    """One option. fields: of the recipe, as pages name them; default: the framework's, for an option that is not given;
    said: the difference, for pages."""

    answer: Compute
    fields: str = ""
    default: Any = ABSENT
    said: str = ""


Table = Mapping[str, Row]
"""Rows by options; `prefix.*` is the row of all options that begin so and have no row of their own."""

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


def picked(choices: Mapping[Any, Any], value: Any) -> Any:
    """Returns the choice for a value; None if the value is none of the choices, or a list or mapping."""
    return None if isinstance(value, list | dict) else choices.get(value)


def among(value: Any, values: Collection[Any]) -> bool:
    """Returns whether a value is among others. True is not 1, and False is not 0."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in values)

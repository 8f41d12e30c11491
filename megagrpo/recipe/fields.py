"""The recipe's fields by dotted path, and their types in plain words."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megagrpo.recipe.schema import AnyRecipe, Section


@dataclass(frozen=True)
class Expected:
    """What may stand at one place of a recipe."""

    annotation: Any
    metadata: tuple[Any, ...] = ()
    description: str = ""
    required: bool = False

    @property
    def section(self) -> type[Section] | None:
        """The section's class if keys of a section may stand here."""
        return next((a for a in _alternatives(self.annotation) if isinstance(a, type) and issubclass(a, Section)), None)

    @property
    def is_list(self) -> bool:
        return any(typing.get_origin(a) is list for a in _alternatives(self.annotation))

    def below(self, key: str) -> Expected | None:
        """What may stand at `key` inside this value; None if nothing can."""
        if self.annotation is Any:
            return self
        if self.section:
            info = self.section.model_fields.get(key)
            return None if info is None else _of_field(info)
        for alternative in _alternatives(self.annotation):
            origin, arguments = typing.get_origin(alternative), typing.get_args(alternative)
            if origin is list and key.isdecimal():
                return Expected(arguments[0])
            if origin is dict:
                return Expected(arguments[1])
            if _is_open(alternative):
                info = alternative.model_fields.get(key)
                return Expected(Any) if info is None else _of_field(info)
        return None

    def placeholder(self) -> Any:
        """Some value that may stand here."""
        if self.section:
            fields = {name: _of_field(info) for name, info in self.section.model_fields.items()}
            return {name: field.placeholder() for name, field in fields.items() if field.required}
        first = _alternatives(self.annotation)[0]
        if typing.get_origin(first) is list:
            return [Expected(typing.get_args(first)[0]).placeholder()]
        if typing.get_origin(first) is Literal:
            return typing.get_args(first)[0]
        return {int: 1, float: 1.0, bool: True, str: "x"}[first]

    def words(self) -> str:
        """`an integer of at least 1`, `one of drop, truncate_left, error`, ..."""
        return _words(self.annotation, self.metadata)


def expected_at(path: str, recipe_class: type[AnyRecipe]) -> Expected | None:
    """What may stand at a dotted path; None if the schema has no such place."""
    here: Expected | None = Expected(recipe_class)
    for key in path.split(".") if path else ():
        here = here.below(key) if here else None
    return here


def is_field(path: str, recipe_class: type[AnyRecipe]) -> bool:
    return bool(path) and expected_at(path, recipe_class) is not None


def nearest(given: str, valid: Iterable[str]) -> str | None:
    """The valid name that `given` was probably meant to be."""
    return next(iter(difflib.get_close_matches(given, list(valid), n=1, cutoff=0.6)), None)


def paths_ending_in(key: str, recipe_class: type[AnyRecipe]) -> list[str]:
    """Dotted paths of all fields with this name, outside of lists."""
    return [path for path in _paths(recipe_class, "") if path.rpartition(".")[2] == key]


def _paths(section: type[Section], prefix: str) -> Iterator[str]:
    for name, info in section.model_fields.items():
        yield prefix + name
        if inner := _of_field(info).section:
            yield from _paths(inner, f"{prefix}{name}.")


def _of_field(info: FieldInfo) -> Expected:
    return Expected(info.annotation, tuple(info.metadata), info.description or "", info.is_required())


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    """Members of a union without their constraints; of any other type, itself."""
    if typing.get_origin(annotation) is Annotated:
        return _alternatives(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return tuple(a for member in typing.get_args(annotation) for a in _alternatives(member))
    return (annotation,)


def _is_open(annotation: Any) -> bool:
    """Whether it is a mapping of any keys besides its own, as rollout.sglang."""
    return isinstance(annotation, type) and issubclass(annotation, BaseModel) and not issubclass(annotation, Section)


def _words(annotation: Any, metadata: tuple[Any, ...]) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        inner, *more = arguments
        flat = [m for c in more for m in (c.metadata if isinstance(c, FieldInfo) else [c])]
        return _words(inner, (*metadata, *flat))
    if origin in (typing.Union, types.UnionType):
        members = [_words(member, ()) for member in arguments]
        return f"{', '.join(members[:-1])} or {members[-1]}"
    if origin is Literal:
        return ", ".join(map(str, arguments)) if len(arguments) == 1 else f"one of {', '.join(map(str, arguments))}"
    if origin is list:
        least = (
            "a list with at least one item"
            if any(isinstance(m, annotated_types.MinLen) for m in metadata)
            else "a list"
        )
        return f"{least}, each item {_words(arguments[0], ())}"
    if origin is dict or _is_open(annotation):
        return "a mapping of names to values"
    if annotation is type(None):
        return "null"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return f"a mapping with keys among {', '.join(annotation.model_fields)}"
    kind = {int: "an integer", float: "a number", bool: "true or false", str: "text"}[annotation]
    return kind + _bounds(metadata)


def _bounds(metadata: tuple[Any, ...]) -> str:
    words = (("ge", "of at least"), ("gt", "above"), ("le", "of at most"), ("lt", "below"))
    parts = [f"{word} {getattr(m, name)}" for m in metadata for name, word in words if hasattr(m, name)]
    return f" {' and '.join(parts)}" if parts else ""

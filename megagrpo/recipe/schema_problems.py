"""Pydantic's errors as problems in plain words: one for each wrong place, with what is valid there."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args, get_origin

from megagrpo.errors import Problem
from megagrpo.recipe.fields import Expected, nearest, paths_ending_in
from megagrpo.recipe.schema import AnyRecipe, Section

LONGEST_VALUE = 60


def schema_problems(
    tree: Mapping[str, Any], errors: Iterable[Mapping[str, Any]], recipe_class: type[AnyRecipe]
) -> list[Problem]:
    """One problem for each place named by `errors` (pydantic's ValidationError.errors()); `where` is the dotted path.

    A union reports an error for each member; these have the same place and become one problem. A missing key is left
    out if an unknown one beside it is that key misspelt.
    """
    found: dict[str, Problem] = {}
    for error in sorted(errors, key=lambda error: error["type"] == "missing"):
        keys, expected = _place(error["loc"], recipe_class)
        path = ".".join(map(str, keys))
        beside = [p.fix for at, p in found.items() if at.rpartition(".")[0] == path.rpartition(".")[0]]
        misspelt = error["type"] == "missing" and _did_you_mean(str(keys[-1])) in beside
        if path not in found and not misspelt:
            problem = _problem(error["type"], keys, _value(tree, keys), expected, recipe_class)
            fix = error.get("ctx", {}).get("fix", problem.fix)  # a validator of the section knows better
            found[path] = replace(problem, fix=fix)
    return list(found.values())


def wrong_places(
    errors: Iterable[Mapping[str, Any]], recipe_class: type[AnyRecipe]
) -> dict[tuple[str | int, ...], Expected | None]:
    """Keys of all wrong, missing and unknown fields, and what may stand there (None: the key is unknown)."""
    places = {}
    for error in errors:
        keys, expected = _place(error["loc"], recipe_class)
        places[tuple(keys)] = None if error["type"] == "extra_forbidden" else expected
    return places


def shown(value: Any) -> str:
    """A YAML value in an error message, with its type where it could be mistaken."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | dict):
        return f"{'a' if value else 'an empty'} {'list' if isinstance(value, list) else 'mapping'}"
    text = value if isinstance(value, str) else repr(value)
    if len(text) > LONGEST_VALUE:
        text = text[: LONGEST_VALUE - 3] + "..."
    return f"'{text}' (text)" if isinstance(value, str) else text


def unknown_key(path: str, key: str, section: type[Section], recipe_class: type[AnyRecipe]) -> Problem:
    """A key that the section does not have, with the name it was probably meant to be."""
    guess = nearest(key, section.model_fields)
    elsewhere = paths_ending_in(key, recipe_class)
    if "." in key:
        fix = "write one key on a line, each section's keys indented below it (dots are for overrides)"
    elif guess:
        fix = _did_you_mean(guess)
    elif elsewhere:
        fix = f"`{key}` belongs at {' or '.join(elsewhere)}"
    else:
        fix = "remove it"
    return Problem(path, given=f"the unknown key `{key}`", needed=f"one of {', '.join(section.model_fields)}", fix=fix)


def _did_you_mean(name: str) -> str:
    return f"did you mean `{name}`?"


def _place(location: Iterable[str | int], recipe_class: type[AnyRecipe]) -> tuple[list[str | int], Expected]:
    """The part of pydantic's location that is a path (union members add their own names), and what may stand there."""
    keys: list[str | int] = []
    here = Expected(recipe_class)
    for key in location:
        inner = here.below(str(key))
        if inner is None and here.section is None:
            break
        keys.append(key)
        if inner is None:  # a key that the section does not have
            break
        here = inner
    return keys, here


def _value(tree: Any, keys: Iterable[str | int]) -> Any:
    for key in keys:
        if isinstance(tree, Mapping) and key not in tree:
            return None
        tree = tree[key]
    return tree


def _problem(
    kind: str, keys: Sequence[str | int], value: Any, expected: Expected, recipe_class: type[AnyRecipe]
) -> Problem:
    path, key = ".".join(map(str, keys)), str(keys[-1])
    if kind == "extra_forbidden" and expected.section:
        return unknown_key(path, key, expected.section, recipe_class)
    if kind == "missing":
        return Problem(path, given="nothing", needed=_needed(expected), fix=f"add `{key}:`")
    return Problem(path, given=shown(value), needed=_needed(expected), fix=_fix(key, value, expected))


def _needed(expected: Expected) -> str:
    """Type, bounds and meaning."""
    words = expected.words()
    return f"{words} ({expected.description.rstrip('.')})" if expected.description else words


def _fix(key: str, value: Any, expected: Expected) -> str:
    words = expected.words()
    if isinstance(value, float) and value.is_integer() and "integer" in words:
        return f"write {int(value)}"
    if isinstance(value, float) and not math.isfinite(value):
        return "write a finite number"
    if isinstance(value, str):
        return _fix_of_text(key, value, expected)
    if value is None and expected.section:
        return f"give `{key}` its keys, or remove it"
    if value is None:
        return f"give `{key}` a value"
    if words.startswith("text") and not isinstance(value, list | dict):
        return f'put quotes around it: "{value}"'
    if words.startswith("a list") and not isinstance(value, list):
        return "write it as a list: a line starting with `- ` for each item"
    return ""


def _fix_of_text(key: str, value: str, expected: Expected) -> str:
    choices = [str(c) for c in get_args(expected.annotation)] if get_origin(expected.annotation) is Literal else []
    if guess := nearest(value, choices):
        return _did_you_mean(guess)
    words = expected.words()
    if "integer" in words and value.replace("_", "").replace(",", "").isdecimal():
        return f"write {value.replace('_', '').replace(',', '')}, without quotes or separators"
    if "true or false" in words and value.lower() in ("yes", "on", "no", "off", "true", "false"):
        return f"write {'true' if value.lower() in ('yes', 'on', 'true') else 'false'}"
    if "number" in words and "," not in value and _is_number(value):
        return f"write {value} without quotes"
    if key == "name":
        return "use letters, digits, dot, dash and underscore only"
    return ""


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False

"""Overrides from the command line: `train.layout.tensor=4`, `data.train.0.path=other.parquet`."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megagrpo.errors import Problem, RecipeError
from megagrpo.recipe.fields import Expected
from megagrpo.recipe.places import Places
from megagrpo.recipe.schema import AnyRecipe
from megagrpo.recipe.schema_problems import unknown_key
from megagrpo.recipe.yaml12 import parse


def apply_overrides(
    tree: dict[str, Any], places: Places, overrides: Sequence[str]
) -> tuple[dict[str, Any], Places, list[tuple[str, Problem]]]:
    """A copy of `tree` with each `PATH=VALUE` put in, in order; the last of two for one path wins.

    Values are YAML. Sections that are absent or null are made; list items must exist. What cannot be applied is in
    the returned problems, each with the path whose value is therefore unknown (a section, if its key was misspelt).
    """
    tree = copy.deepcopy(tree)
    problems: list[tuple[str, Problem]] = []
    for text in overrides:
        here = f"override {text}"
        path, equals, value_text = text.partition("=")
        if not equals or not path:
            needed = "SECTION.KEY=VALUE, such as train.layout.tensor=4"
            problems.append(("", Problem(here, given=f"'{text}'", needed=needed)))
            continue
        try:
            value = parse(value_text, lambda line, here=here: here)  # type: ignore[misc]
        except RecipeError as error:
            problems += [(path, problem) for problem in error.problems]
            continue
        problems += [(path, problem) for _, problem in value.problems]
        if problem := _put(tree, path, value.tree, places.recipe_class):
            problems.append((problem.where.rpartition(".")[0], replace(problem, where=here)))
        else:
            places = places.overridden(path, text)
    return tree, places, problems


def _put(tree: dict[str, Any], path: str, value: Any, recipe_class: type[AnyRecipe]) -> Problem | None:
    """Set `path` in `tree`; if the schema or a list has no such place, say so."""
    keys = path.split(".")
    above = [Expected(recipe_class)]  # what the schema expects around each key
    for depth, key in enumerate(keys):
        inner = above[-1].below(key)
        if inner is None:
            at, section = ".".join(keys[: depth + 1]), above[-1].section
            return unknown_key(at, key, section, recipe_class) if section else _nothing_below(at, above[-1])
        above.append(inner)
    container: Any = tree
    for depth, (key, expected) in enumerate(zip(keys, above, strict=False)):
        slot: Any = key
        if expected.is_list:
            items = len(container) if isinstance(container, list) else 0
            if int(key) >= items:
                needed = f"an item from 0 to {items - 1}" if items else f"{'.'.join(keys[:depth])} to have items"
                return Problem(path, given=f"item {key}", needed=needed)
            slot = int(key)
        if depth == len(keys) - 1:
            container[slot] = value
            break
        inside = container[slot] if isinstance(container, list) else container.get(slot)
        if not isinstance(inside, list | dict):
            inside = container[slot] = {}
        container = inside
    return None


def _nothing_below(at: str, expected: Expected) -> Problem:
    parent, _, key = at.rpartition(".")
    return Problem(
        at, given=f"`{key}` below {parent}", needed=f"{parent} is {expected.words()}", fix=f"set {parent} itself"
    )

"""From a YAML file and overrides to a Recipe, and back.

Relative paths in a recipe are relative to the current working directory, not to the recipe's own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pydantic

from megagrpo.errors import Problem, RecipeError
from megagrpo.recipe.checks import RuleProblem, recipe_problems
from megagrpo.recipe.overrides import apply_overrides
from megagrpo.recipe.places import Places
from megagrpo.recipe.schema import Recipe
from megagrpo.recipe.schema_problems import schema_problems
from megagrpo.recipe.yaml12 import Document, parse, to_text


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe that fits the schema, and where each of its values was written."""

    recipe: Recipe
    places: Places


def load(path: str | Path, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Read a recipe and put the overrides in. Rules between fields are checked by trainer/preflight.py.

    Raises RecipeError with every mistake at once. If some fields are wrong by themselves, the rules between the fields
    that are right are applied here, so that one run shows them all.
    """
    document = _read(Path(path))
    if not isinstance(document.tree, dict):
        given = (
            "nothing" if document.tree is None else "a list" if isinstance(document.tree, list) else "a single value"
        )
        needed = f"a mapping with the keys {', '.join(Recipe.model_fields)}"
        raise RecipeError(
            [*(problem for _, problem in document.problems), Problem(str(path), given=given, needed=needed)]
        )
    tree, places, found = apply_overrides(document.tree, Places(str(path), document.lines), overrides)
    found = document.problems + found
    unreliable = [at for at, _ in found]
    recipe: Recipe | None
    try:
        recipe, wrong = Recipe.model_validate(tree), []
    except pydantic.ValidationError as error:
        wrong = schema_problems(tree, error.errors())
        recipe, more = _repaired(tree, error.errors(), wrong)
        unreliable += more
    told = {at for at, _ in found}
    problems = [problem for _, problem in found]
    problems += [replace(p, where=places.where(p.where)) for p in wrong if p.where not in told]
    if recipe is None or problems:
        rules = _rules_apart_from(unreliable, recipe)
        raise RecipeError(problems + [places.located(p) for p in rules])
    return LoadedRecipe(recipe, places)


def dump(recipe: Recipe) -> str:
    """The resolved recipe: YAML with every field, defaults included. Loading it gives an equal recipe."""
    return to_text(recipe.model_dump())


def _read(path: Path) -> Document:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise RecipeError(
            Problem(str(path), given="no such file", needed="a YAML recipe", fix=_other_recipes(path))
        ) from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        given = f"the byte 0x{error.object[error.start]:02x}"
        raise RecipeError(Problem(f"{path}:{line}", given, needed="UTF-8 text", fix="save it as UTF-8")) from None
    except OSError as error:
        raise RecipeError(
            Problem(str(path), given=f"{error.strerror}".lower(), needed="a YAML file that can be read")
        ) from None
    return parse(text, lambda line: f"{path}:{line}")


def _other_recipes(path: Path) -> str:
    names = sorted(str(p) for p in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
    return f"recipes in that directory: {', '.join(names)}" if names else ""


def _repaired(
    tree: dict[str, Any], errors: Iterable[Mapping[str, Any]], wrong: Sequence[Problem]
) -> tuple[Recipe | None, list[str]]:
    """The recipe without its wrong values, and the paths that cannot be relied on there.

    An unknown key may be any field of its section misspelt, so all of that section counts. There is no recipe if a
    field without a default is missing or wrong.
    """
    tree = copy.deepcopy(tree)
    for problem in wrong:
        _remove(tree, problem.where.split("."))
    try:
        recipe = Recipe.model_validate(tree)
    except pydantic.ValidationError:
        return None, []
    unknown = {".".join(map(str, error["loc"])) for error in errors if error["type"] == "extra_forbidden"}
    return recipe, [p.where.rpartition(".")[0] if p.where in unknown else p.where for p in wrong]


def _remove(tree: Any, keys: list[str]) -> None:
    for key in keys[:-1]:
        tree = tree[int(key) if isinstance(tree, list) else key]
    if isinstance(tree, dict):
        tree.pop(keys[-1], None)


def _rules_apart_from(unreliable: Sequence[str], recipe: Recipe | None) -> list[RuleProblem]:
    """Broken rules that read no field at, above or below an unreliable path."""
    problems = recipe_problems(recipe) if recipe else []
    return [p for p in problems if not any(_overlap(field, path) for field in p.fields for path in unreliable)]


def _overlap(one: str, other: str) -> bool:
    return not other or one == other or one.startswith(f"{other}.") or other.startswith(f"{one}.")

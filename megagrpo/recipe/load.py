"""From a YAML file and overrides to a recipe of either kind, and back.

Relative paths in a recipe are relative to the current working directory, not to the recipe's own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import pydantic

from megagrpo.errors import Problem, RecipeError
from megagrpo.recipe.checks import recipe_problems
from megagrpo.recipe.fields import Expected, nearest
from megagrpo.recipe.overrides import apply_overrides
from megagrpo.recipe.places import Places
from megagrpo.recipe.rule_problem import RuleProblem
from megagrpo.recipe.schema import AnyRecipe, Recipe, SftRecipe
from megagrpo.recipe.schema_problems import schema_problems, wrong_places
from megagrpo.recipe.yaml12 import Document, parse, to_text

KINDS: dict[str, type[AnyRecipe]] = {"grpo": Recipe, "sft": SftRecipe}
COMMANDS = {"grpo": "megagrpo train", "sft": "megagrpo sft"}
Kind = TypeVar("Kind", bound=AnyRecipe, covariant=True)


@dataclass(frozen=True)
class LoadedRecipe(Generic[Kind]):
    """A recipe that fits the schema, and where each of its values was written."""

    recipe: Kind
    places: Places


def load(path: str | Path, overrides: Sequence[str] = ()) -> LoadedRecipe[Recipe]:
    """Read a recipe for GRPO and put the overrides in. Rules between fields are checked by preflight/.

    Raises RecipeError with every mistake at once. If some fields are wrong by themselves, the rules between the fields
    that are right are applied here, so that one run shows them all.
    """
    return cast(LoadedRecipe[Recipe], _load(path, overrides, "grpo"))


def load_sft(path: str | Path, overrides: Sequence[str] = ()) -> LoadedRecipe[SftRecipe]:
    """The same for supervised fine-tuning."""
    return cast(LoadedRecipe[SftRecipe], _load(path, overrides, "sft"))


def load_any(path: str | Path, overrides: Sequence[str] = ()) -> LoadedRecipe[AnyRecipe]:
    """The same for a recipe of the kind that it says it is."""
    return _load(path, overrides, None)


def _load(path: str | Path, overrides: Sequence[str], kind: str | None) -> LoadedRecipe[AnyRecipe]:
    document = _read(Path(path))
    written = document.tree.get("kind") if isinstance(document.tree, dict) else None
    if kind is not None and isinstance(written, str) and written in KINDS and written != kind:
        where = f"{path}:{document.lines['kind']} kind"
        raise RecipeError(Problem(where, given=written, needed=kind, fix=f"`{COMMANDS[written]} {path}`"))
    recipe_class = KINDS[kind or nearest(str(written), KINDS) or "grpo"]
    if not isinstance(document.tree, dict):
        given = (
            "nothing" if document.tree is None else "a list" if isinstance(document.tree, list) else "a single value"
        )
        needed = f"a mapping with the keys {', '.join(recipe_class.model_fields)}"
        raise RecipeError(
            [*(problem for _, problem in document.problems), Problem(str(path), given=given, needed=needed)]
        )
    tree, places, found = apply_overrides(
        document.tree, Places(str(path), document.lines, recipe_class=recipe_class), overrides
    )
    found = document.problems + found
    unreliable = {at for at, _ in found}
    try:
        recipe, wrong = recipe_class.model_validate(tree), []
    except pydantic.ValidationError as error:
        wrong = schema_problems(tree, error.errors(), recipe_class)
        recipe, repaired = _repaired(tree, error.errors(), recipe_class)
        unreliable |= repaired
    told = {at for at, _ in found}
    problems = [problem for _, problem in found]
    problems += [replace(p, where=places.where(p.where)) for p in wrong if p.where not in told]
    if problems:
        rules = _rules_apart_from(unreliable, recipe)
        raise RecipeError(problems + [places.located(p) for p in rules])
    return LoadedRecipe(recipe, places)


def dump(recipe: AnyRecipe) -> str:
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
    tree: dict[str, Any], errors: Iterable[Mapping[str, Any]], recipe_class: type[AnyRecipe]
) -> tuple[AnyRecipe, set[str]]:
    """The recipe with defaults in place of its wrong values, and the paths that cannot be relied on there.

    An unknown key may be any field of its section misspelt, so all of that section counts.
    """
    tree = copy.deepcopy(tree)
    unreliable = set()
    for keys, expected in wrong_places(errors, recipe_class).items():
        _repair(tree, keys, expected)
        unreliable.add(".".join(map(str, keys if expected else keys[:-1])))
    return recipe_class.model_validate(tree), unreliable


def _repair(tree: Any, keys: Sequence[str | int], expected: Expected | None) -> None:
    *above, last = keys
    for key in above:
        tree = tree[key]
    if expected and (expected.required or isinstance(tree, list)):
        tree[last] = expected.placeholder()
    else:
        tree.pop(last, None)


def _rules_apart_from(unreliable: Iterable[str], recipe: AnyRecipe) -> list[RuleProblem]:
    """Broken rules that read no field at, above or below an unreliable path."""
    return [
        p
        for p in recipe_problems(recipe)
        if not any(_overlap(field, path) for field in p.fields for path in unreliable)
    ]


def _overlap(one: str, other: str) -> bool:
    return not other or one == other or one.startswith(f"{other}.") or other.startswith(f"{one}.")

"""Conversion of a YAML file and overrides to a recipe of either kind, and back; and the place of each of its values.

Relative paths in a recipe are relative to the current working directory, not to the recipe's own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import pydantic

from megagrpo.errors import Problem, RecipeError
from megagrpo.recipe.problems import Expected, is_field, nearest, schema_problems, unknown_key
from megagrpo.recipe.schema import AnyRecipe, Recipe, SftRecipe
from megagrpo.recipe.yaml12 import CHARACTERS_MAX, Document, parse, to_text

KINDS: dict[str, type[AnyRecipe]] = {"grpo": Recipe, "sft": SftRecipe}
COMMANDS = {"grpo": "megagrpo train", "sft": "megagrpo sft"}
ITEM = re.compile(r"\[(\d+)\]")
Kind = TypeVar("Kind", bound=AnyRecipe, covariant=True)
OVERRIDE_SHOWN = 500  # characters


@dataclass(frozen=True)
class Places:
    """Line numbers and overrides by dotted path, such as train.layout.tensor or data.train.0.path."""

    source: str
    lines: Mapping[str, int] = field(default_factory=dict)
    overrides: Mapping[str, str] = field(default_factory=dict)
    recipe_class: type[AnyRecipe] = Recipe

    def where(self, path: str) -> str:
        """Returns `FILE:LINE path` of a written value, or of the section around a value left at its default."""
        if below := next((text for at, text in self.overrides.items() if at.startswith(f"{path}.")), None):
            return f"override {_shortened(below)} ({path})"
        at = path
        while at and at not in self.overrides and at not in self.lines:
            at = at.rpartition(".")[0]
        if at in self.overrides:
            text = f"override {_shortened(self.overrides[at])}"
            return text if at == path else f"{text} ({path})"
        return f"{self.source}:{self.lines[at]} {path}" if at else f"{self.source} {path}"

    def located(self, problem: Problem) -> Problem:
        """Returns the problem with its place, if `where` is a recipe's field (items as .0 or [0]) or `FIELD: ...`."""
        field, colon, rest = problem.where.partition(": ")
        path = ITEM.sub(r".\1", field)
        if not is_field(path, self.recipe_class):
            return problem
        return replace(problem, where=f"{self.where(path)}{colon}{rest}")


@dataclass(frozen=True)
class LoadedRecipe(Generic[Kind]):
    """A recipe that fits the schema, and the place of each of its values."""

    recipe: Kind
    places: Places


def load(path: str | Path, overrides: Sequence[str] = ()) -> LoadedRecipe[Recipe]:
    """Reads a recipe for GRPO and applies the overrides. preflight/ checks the rules between its fields.

    Raises RecipeError with every place at which it does not fit the schema.
    """
    return cast(LoadedRecipe[Recipe], _load(path, overrides, "grpo"))


def load_sft(path: str | Path, overrides: Sequence[str] = ()) -> LoadedRecipe[SftRecipe]:
    """Reads a recipe for supervised fine-tuning, like `load`."""
    return cast(LoadedRecipe[SftRecipe], _load(path, overrides, "sft"))


def load_any(path: str | Path, overrides: Sequence[str] = ()) -> LoadedRecipe[AnyRecipe]:
    """Reads a recipe of the kind that it states, like `load`."""
    return _load(path, overrides, None)


def dump(recipe: AnyRecipe) -> str:
    """Returns the resolved recipe as YAML with every field, defaults included. Loading it gives an equal recipe."""
    return to_text(recipe.model_dump())


def apply_overrides(
    tree: dict[str, Any], places: Places, overrides: Sequence[str]
) -> tuple[dict[str, Any], Places, list[Problem]]:
    """Returns `tree` with each `PATH=VALUE` applied in order, its places, and the problems of overrides.

    Values are YAML; the last of several for one path wins. Absent or null sections are created; list items must
    exist.
    """
    lines, written = dict(places.lines), dict(places.overrides)
    problems: list[Problem] = []
    for text in overrides:
        where = f"override {_shortened(text)}"
        path, equals, value_text = text.partition("=")
        if not equals or not path:
            needed = "SECTION.KEY=VALUE, such as train.layout.tensor=4"
            problems.append(Problem(where, given=f"'{text}'", needed=needed))
            continue
        try:
            value = parse(value_text, lambda line, where=where: where)  # type: ignore[misc]
            problems += [problem for _, problem in value.problems]
            tree = _put(tree, path.split("."), value.tree, Expected(places.recipe_class), places.recipe_class)
        except RecipeError as error:
            problems += [replace(problem, where=where) for problem in error.problems]
            continue
        except RecursionError:
            problems.append(Problem(where, "keys nested too deeply", "a key of a recipe"))
            continue
        for at in [at for at in (*lines, *written) if f"{at}.".startswith(f"{path}.")]:  # its earlier places
            lines.pop(at, None)
            written.pop(at, None)
        written[path] = text
    return tree, replace(places, lines=lines, overrides=written), problems


def _load(path: str | Path, overrides: Sequence[str], kind: str | None) -> LoadedRecipe[AnyRecipe]:
    document = _read(Path(path))
    written = document.tree.get("kind") if isinstance(document.tree, dict) else None
    if kind is not None and isinstance(written, str) and written in KINDS and written != kind:
        where = f"{path}:{document.lines['kind']} kind"
        raise RecipeError(Problem(where, given=written, needed=kind, fix=f"`{COMMANDS[written]} {path}` trains by it"))
    recipe_class = KINDS[kind or nearest(str(written), KINDS) or "grpo"]
    problems = [problem for _, problem in document.problems]
    if not isinstance(document.tree, dict):
        given = {type(None): "nothing", list: "a list"}.get(type(document.tree), "a single value")
        needed = f"a mapping with the keys {', '.join(recipe_class.model_fields)}"
        raise RecipeError([*problems, Problem(str(path), given, needed)])
    places = Places(str(path), document.lines, recipe_class=recipe_class)
    tree, places, of_overrides = apply_overrides(document.tree, places, overrides)
    problems += of_overrides
    reported = {at for at, _ in document.problems}
    try:
        recipe = recipe_class.model_validate(tree)
    except pydantic.ValidationError as error:
        wrong = schema_problems(tree, error.errors(), recipe_class)
        problems += [replace(p, where=places.where(p.where)) for p in wrong if p.where not in reported]
    if problems:
        raise RecipeError(problems)
    return LoadedRecipe(recipe, places)


def _read(path: Path) -> Document:
    try:
        if path.exists() and not path.is_file():
            raise RecipeError(Problem(str(path), "a directory, a device or a pipe", "a YAML file that can be read"))
        with path.open("rb") as file:
            text = file.read(4 * CHARACTERS_MAX + 1).decode("utf-8-sig")
    except FileNotFoundError:
        names = sorted(str(p) for p in path.parent.glob("*.yaml"))[:20] if path.parent.is_dir() else []
        fix = f"recipes in that directory: {', '.join(names)}" if names else ""
        raise RecipeError(Problem(str(path), "no such file", "a YAML recipe", fix)) from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        given = f"the byte 0x{error.object[error.start]:02x}"
        raise RecipeError(Problem(f"{path}:{line}", given, needed="UTF-8 text", fix="save it as UTF-8")) from None
    except OSError as error:
        given = f"{error.strerror}".lower()
        raise RecipeError(Problem(str(path), given, "a YAML file that can be read")) from None
    return parse(text, lambda line: f"{path}:{line}")


def _put(
    inside: Any, keys: Sequence[str], value: Any, expected: Expected, recipe_class: type[AnyRecipe], above: str = ""
) -> Any:
    """Returns `inside`, which is at the path `above`, with the value at these keys below it; `inside` stays as it is.

    Raises RecipeError if the schema or a list has no such place.
    """
    if not keys:
        return value
    key, *rest = keys
    at, inner = f"{above}.{key}" if above else key, expected.below(key)
    if inner is None and expected.sections:
        raise RecipeError(unknown_key(at, key, value, expected, recipe_class))
    if inner is None:
        given, needed = f"`{key}` below {above}", f"{above} is {expected.words()}"
        raise RecipeError(Problem(at, given, needed, f"set {above} itself"))
    if isinstance(inside, list) or (expected.is_list and key.isdecimal()):
        items = inside if isinstance(inside, list) else []
        if not key.isdecimal() or len(key) > 9 or int(key) >= len(items):  # Python refuses to read very long numbers
            needed = f"an item from 0 to {len(items) - 1}" if items else f"{above} to have items"
            raise RecipeError(Problem(at, f"item {_shortened(key)}", needed))
        put = _put(items[int(key)], rest, value, inner, recipe_class, at)
        return [*items[: int(key)], put, *items[int(key) + 1 :]]
    if not isinstance(inside, dict):
        inside = {expected.choice[0].key: inside} if expected.choice and isinstance(inside, str) else {}
    return {**inside, key: _put(inside.get(key), rest, value, inner, recipe_class, at)}


def _shortened(text: str) -> str:
    """Shortens an override for errors, of which many may show the same one."""
    return text if len(text) <= OVERRIDE_SHOWN else f"{text[:OVERRIDE_SHOWN]}…"

"""A recipe from a file of another framework: read, translated, written and checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megagrpo.errors import Problem
from megagrpo.importing.open_instruct import OPEN_INSTRUCT
from megagrpo.importing.open_instruct import read as read_open_instruct
from megagrpo.importing.options import Configuration, Given, value_of
from megagrpo.importing.recipe_text import recipe_problems, recipe_text
from megagrpo.importing.slime import SLIME
from megagrpo.importing.slime import read as read_slime
from megagrpo.importing.translate import Framework, Translation, translate
from megagrpo.importing.trl import TRL
from megagrpo.importing.trl import read as read_trl
from megagrpo.importing.values import run_name
from megagrpo.importing.verl import VERL
from megagrpo.importing.verl import read as read_verl

Read = Callable[[Path, Mapping[str, str], Mapping[str, str]], Configuration]
"""Reads a file with variables that a user sets, and those of the environment. Raises RecipeError."""

FRAMEWORKS: dict[str, tuple[Framework, Read]] = {
    "verl": (VERL, read_verl),
    "open_instruct": (OPEN_INSTRUCT, read_open_instruct),
    "slime": (SLIME, read_slime),
    "trl": (TRL, read_trl),
}


@dataclass(frozen=True)
class Imported:
    """A recipe made from another framework's file. problems: of the recipe by itself."""

    translation: Translation
    text: str
    problems: Sequence[Problem]


def import_recipe(framework: str, path: Path, set_to: Mapping[str, str], environment: Mapping[str, str]) -> Imported:
    """Translates a file. set_to: values of a script's variables, or of options by their names. Raises RecipeError if
    the file cannot be read, or has nothing of that framework."""
    known, read = FRAMEWORKS[framework]
    configuration = read(path, set_to, environment)
    options = {name: Given(name, value_of(value), 0) for name, value in set_to.items() if known.row(name)}
    configuration = replace(configuration, given={**configuration.given, **options})
    translation = translate(known, configuration, run_name(path.stem))
    problems = recipe_problems(translation)
    return Imported(translation, recipe_text(translation, problems), problems)

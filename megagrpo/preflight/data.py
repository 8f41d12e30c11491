"""Checks of data files before a run: their first rows, and the sources of all."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

from megagrpo.data.files import place
from megagrpo.data.locations import files_of, is_absent, is_remote
from megagrpo.data.rows import SchemaOf, data_sources, prompt_schema, quick_look
from megagrpo.errors import DataError, Problem
from megagrpo.recipe.defaults import own_rewards
from megagrpo.recipe.load import LoadedRecipe
from megagrpo.recipe.schema import AnyRecipe, DataFileConfig, EntryConfig, Recipe, RewardConfig, SftRecipe


def files_in(recipe: AnyRecipe) -> dict[str, Sequence[EntryConfig]]:
    """Returns all data of the recipe, by the path of their list in it."""
    if isinstance(recipe, SftRecipe):
        return {"data.train": recipe.data.train, "eval.files": recipe.eval.files}
    held_out = {f"eval.sets.{name}.files": files for name, files in recipe.eval.files_of_sets().items()}
    return {"data.train": recipe.data.train, **held_out}


def absent_data(recipe: AnyRecipe) -> list[str]:
    """Returns paths that may be on the cluster: nothing here is under them, and no file here has a similar name."""
    paths = [file.location for files in files_in(recipe).values() for file in files]
    return [path for path in dict.fromkeys(paths) if is_absent(path)]


def data_problems(loaded: LoadedRecipe[AnyRecipe], absent: Collection[str]) -> Iterator[Problem]:
    """Yields the problems of the data files that are here."""
    recipe = loaded.recipe
    own = own_rewards(recipe) if isinstance(recipe, Recipe) else {}
    of_sets = {f"eval.sets.{name}.files": reward for name, reward in own.items()}
    for section, files in files_in(recipe).items():
        reward = of_sets.get(section, recipe.reward) if isinstance(recipe, Recipe) else None
        for index, file in enumerate(files):
            if not file.location or file.location in absent:
                continue
            written = loaded.places.where(f"{section}.{index}.path")
            for problem in _entry_problems(file, reward):
                yield replace(problem, where=f"{written}: {problem.where}")


def sources_of(files: Sequence[DataFileConfig]) -> set[str]:
    """Returns all data sources of these files; an empty set if a file is not here or wrong."""
    found: set[str] = set()
    try:
        for file in files:
            for path in files_of(file.location):
                if quick_look(path, prompt_schema(file.columns)):
                    return set()
                found |= {source for _, source in data_sources(path, file.columns)}
    except DataError:
        return set()
    return found


def _entry_problems(file: EntryConfig, reward: RewardConfig | None) -> list[Problem]:
    """Returns an entry's problems. `reward` scores the rows; None for conversations."""
    try:
        paths = files_of(file.location)
    except DataError as error:
        return list(error.problems)
    if not isinstance(file, DataFileConfig) or reward is None:
        from megagrpo.data.messages import CONVERSATION_ROWS  # imports transformers, which takes seconds

        return _looked_at(paths, CONVERSATION_ROWS)
    problems = _looked_at(paths, prompt_schema(file.columns))
    if not problems and not reward.functions:
        problems = [found for path in paths if not is_remote(path) for found in _source_problems(path, file, reward)]
    return problems


def _looked_at(paths: Sequence[str], schema_of: SchemaOf[Any]) -> list[Problem]:
    """Returns the problems of the first file that has any: those of one folder are mostly alike."""
    return next((problems for path in paths if (problems := quick_look(path, schema_of))), [])


def _source_problems(path: str, file: DataFileConfig, reward: RewardConfig) -> Iterator[Problem]:
    """Yields a problem for each data source without a reward function, at its first row."""
    for number, source in data_sources(path, file.columns):
        if problem := reward.source_problem(source, place(path, number)):
            yield problem

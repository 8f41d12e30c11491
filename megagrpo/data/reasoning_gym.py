"""Rows that reasoning-gym makes: more than a hundred tasks, made from a seed, each with a scorer of its own.

Stojanovski et al. 2025, arXiv:2505.24760; https://github.com/open-thought/reasoning-gym. In place of a file's path they
have a location such as reasoning_gym://seed=1/size=1000/leg_counting, so that all else treats them as a file.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from megagrpo.errors import DataError, Problem, first_line
from megagrpo.recipe.schema.data import TASK

INSTALL = "pip install 'megagrpo[reasoning-gym]'"
COLUMNS = ("prompt", "ground_truth", "data_source", "extra_info")
ARGUMENTS = "reasoning_gym_arguments"
"""The key of the task's arguments, if any, in extra_info, beside the entry's metadata."""

# Errors that reasoning-gym raises for wrong arguments of a task.
REFUSALS = (AssertionError, ArithmeticError, LookupError, TypeError, ValueError)


@dataclass(frozen=True)
class Task:
    """`size` entries of one task; entry i is made from seed + i."""

    name: str
    size: int
    seed: int
    arguments: Mapping[str, Any]
    location: str


def task_at(location: str) -> Task:
    """Returns the task that a location names, as DataFileConfig.location writes it. Raises DataError for any other."""
    try:
        *given, seed, size, name = location.removeprefix(TASK).split("/")
        arguments = json.loads(unquote(given[0])) if given else {}
        return Task(name, int(size.removeprefix("size=")), int(seed.removeprefix("seed=")), dict(arguments), location)
    except (ValueError, TypeError, RecursionError):
        fix = "name the task by reasoning_gym in place of path"
        raise DataError(Problem(location, needed=f"{TASK}seed=SEED/size=SIZE/TASK", fix=fix)) from None


def is_task(location: str) -> bool:
    return location.startswith(TASK)


def task_problem(location: str) -> Problem | None:
    """Returns the problem with a task, None if there is none. Makes no entry."""
    if importlib.util.find_spec("reasoning_gym") is None:
        return Problem(location, "reasoning-gym is not installed", "the package", INSTALL)
    try:
        _dataset(task_at(location))
    except DataError as error:
        return error.problems[0]
    return None


def package_version() -> str:
    """Returns the package's version: other versions may make other entries."""
    from importlib.metadata import version

    return version("reasoning-gym")


def task_records(location: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (index, row) of every entry, with COLUMNS. Raises DataError."""
    task = task_at(location)
    dataset = _dataset(task)
    arguments = {ARGUMENTS: dict(task.arguments)} if task.arguments else {}
    for index in range(task.size):
        try:
            entry = dataset[index]
        except REFUSALS as error:
            where, given = f"{location} row {index}", f"{type(error).__name__}: {first_line(error)}"
            raise DataError(Problem(where, given, "arguments with which entries can be made")) from None
        row = {
            "prompt": entry["question"],
            "ground_truth": entry["answer"] or "",  # some tasks have many right answers, and name none
            "data_source": f"reasoning_gym/{task.name}",
            "extra_info": {**entry["metadata"], **arguments},
        }
        yield index, row


def _dataset(task: Task) -> Any:
    """Returns the package's data set. Raises DataError."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    known = sorted(set(DATASETS) - {"composite"})
    if task.name not in known:
        near = difflib.get_close_matches(task.name, known, n=1)
        fix = f"did you mean {near[0]}?" if near else f"write one of {', '.join(known)}"
        if task.name == "composite":
            fix = "write an entry of data.train for each task, with weights"
        raise DataError(
            Problem(task.location, f"the task {task.name}", f"a task of reasoning-gym {package_version()}", fix)
        )
    try:
        return reasoning_gym.create_dataset(task.name, size=task.size, seed=task.seed, **task.arguments)
    except REFUSALS as error:
        given = f"{type(error).__name__}: {first_line(error)}"
        needed = f"arguments of {task.name}"
        raise DataError(Problem(task.location, given, needed, "correct its arguments in the recipe")) from None

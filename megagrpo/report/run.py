"""The content of a run's directory: its metrics by step as arrays, its recipe, versions and starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from megagrpo.errors import Problem, ReportError
from megagrpo.track.jsonl import as_number, leaves, read_json, step_entries

RESPONSES = ("eval/*/responses.jsonl", "*/responses.jsonl", "responses.jsonl")
"""Responses of `megagrpo eval`: in a run's directory, in its own --output, and in one model's folder."""


@dataclass(frozen=True)
class RunRead:
    """A run up to its newest step.

    metrics: float64 [steps] by name, NaN where a step has no such metric; `steps` has the numbers of the steps, int64
    [steps], rising. times: seconds since 1970, float64 [steps].
    """

    directory: Path
    name: str
    steps: np.ndarray
    times: np.ndarray
    metrics: Mapping[str, np.ndarray]
    recipe: Mapping[str, Any]
    environment: Mapping[str, Any]

    def known(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the steps that have this metric, and its finite values; both empty if none has."""
        values = self.metrics.get(name)
        if values is None:
            return np.empty(0, np.int64), np.empty(0)
        known = np.isfinite(values)
        return self.steps[known], values[known]

    def setting(self, path: str) -> Any:
        """Returns a value of the recipe by its dotted path; None if the recipe lacks it."""
        return dict(leaves(self.recipe)).get(path)


def read_run(directory: Path) -> RunRead:
    """Reads the run in `directory`, running or ended, or the output of `megagrpo eval` as a run without steps.

    Raises ReportError if there is neither.
    """
    require_directory(directory)
    path = directory / "metrics.jsonl"
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        if not (isinstance(error, FileNotFoundError) and responses_in(directory)):
            needed = "the directory of a run that has started (each writes metrics.jsonl), or of `megagrpo eval`"
            raise ReportError(Problem(str(path), error.strerror or str(error), needed)) from error
        lines = []
    entries = {int(entry["step"]): entry for entry in step_entries(lines)}
    if not entries and any(lines[:-1]):
        raise ReportError(Problem(str(path), "no line that can be read", "a JSON object in each line, with its step"))
    steps = sorted(entries)
    names = sorted({name for entry in entries.values() for name in entry} - {"step", "time"})
    recipe = read_yaml(directory / "recipe.yaml")
    return RunRead(
        directory,
        str(recipe.get("name", directory.name)),
        np.array(steps, np.int64),
        _column(entries, steps, "time"),
        {name: _column(entries, steps, name) for name in names},
        recipe,
        read_json(directory / "environment.json"),
    )


def responses_in(directory: Path) -> list[Path]:
    """Returns the files of `megagrpo eval`, one for each model, each in a folder named after it."""
    return [path for pattern in RESPONSES for path in sorted(directory.glob(pattern))]


OF_A_RUN = "the directory of a run: track.directory and name of its recipe, such as runs/NAME"


def require_directory(directory: Path, needed: str = OF_A_RUN, fix: str = "") -> None:
    """Raises ReportError unless there is a directory."""
    if not directory.is_dir():
        given = "a file" if directory.exists() else "no such directory"
        raise ReportError(Problem(str(directory), given, needed, fix))


@dataclass(frozen=True)
class Start:
    """One start of a run. first: its first step; None if it finished no step."""

    number: int
    first: int | None
    recipe: Mapping[str, Any]
    environment: Mapping[str, Any]


def starts_of(run: RunRead) -> list[Start]:
    """Returns every start, from the numbered copies of recipe and environment."""
    starts = []
    for number in range(1, len(list(run.directory.glob("recipe.*.yaml"))) + 1):
        environment = read_json(run.directory / f"environment.{number}.json")
        try:
            began = datetime.strptime(str(environment.get("time")), "%Y-%m-%dT%H:%M:%S%z").timestamp()
        except ValueError:
            began = np.nan
        later = run.steps[run.times >= began]
        first = int(later[0]) if len(later) else None
        starts.append(Start(number, first, read_yaml(run.directory / f"recipe.{number}.yaml"), environment))
    return starts


def _column(entries: Mapping[int, Mapping[str, Any]], steps: list[int], name: str) -> np.ndarray:
    return np.array([as_number(entries[step].get(name)) for step in steps], np.float64)


def read_yaml(path: Path) -> dict[str, Any]:
    """Reads the mapping in a file; empty if there is none."""
    try:
        read = yaml.safe_load(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, yaml.YAMLError, ValueError, RecursionError):
        return {}
    return read if isinstance(read, dict) else {}

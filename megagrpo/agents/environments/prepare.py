"""`megagrpo prepare verifiers` and `megagrpo prepare openenv`: a row for each task of a verifiers environment, or for
each seed of an OpenEnv one."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megagrpo.agents.environments.verifiers import DATA_SOURCE
from megagrpo.errors import DataError, Problem

if TYPE_CHECKING:
    from megagrpo.data.prepare import Prepared, PromptRow

Adds = Callable[[str, str, "Callable[[argparse.Namespace], Prepared]"], argparse.ArgumentParser]
"""Adds a preparer: its name, description and function -> the parser of its arguments."""
FILES = "for train.parquet and test.parquet"
SECONDS_MAX = 3600
"""Timeout for an environment to make its data set, which it may fetch."""


def add_preparers(add: Adds, whole: Callable[[int, int], Callable[[str], int]]) -> None:
    text = "the tasks of an environment of the verifiers package, for agent.verifiers"
    verifiers = add("verifiers", text, _verifiers)
    verifiers.add_argument("environment", metavar="ENVIRONMENT", help="as in the recipe: a name, or FILE.py:FUNCTION")
    verifiers.add_argument("--output", type=Path, required=True, metavar="DIR", help=FILES)
    text = "interpreter that has the package, as agent.python; default: this one"
    verifiers.add_argument("--python", metavar="FILE", help=text)
    text = "its arguments, as in the recipe: an object of JSON"
    verifiers.add_argument("--arguments", type=_object, default={}, metavar="JSON", help=text)
    verifiers.add_argument("--size", type=whole(1, 10**8), metavar="N", help="most tasks of each split; default: all")

    text = "a row for each seed of an OpenEnv environment's episodes, for agent.openenv"
    openenv = add("openenv", text, _openenv)
    openenv.add_argument("--output", type=Path, required=True, metavar="DIR", help=FILES)
    openenv.add_argument("--prompt", required=True, metavar="TEXT", help="what stands before the first observation")
    openenv.add_argument("--system-prompt", default="", metavar="TEXT", help="system message of every prompt")
    openenv.add_argument("--size", type=whole(1, 10**7), default=1000, metavar="N", help="rows; default: 1000")
    text = "rows held out, of the seeds that follow; default: 0"
    openenv.add_argument("--test-size", type=whole(0, 10**7), default=0, metavar="N", help=text)


def _verifiers(asked: argparse.Namespace) -> Prepared:
    return prepare_verifiers(
        asked.environment, asked.output, arguments=asked.arguments, python=asked.python, size=asked.size
    )


def _openenv(asked: argparse.Namespace) -> Prepared:
    return prepare_openenv(
        asked.prompt, asked.output, system_prompt=asked.system_prompt, train=asked.size, test=asked.test_size
    )


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no object of JSON")
    return found


def prepare_verifiers(
    environment: str, output: Path, *, arguments: Mapping[str, Any], python: str | None, size: int | None
) -> Prepared:
    """Writes a row for each task of the environment, which `python` has: train.parquet, and test.parquet if it has
    evaluation data. A row's prompt is the beginning of its task; extra_info.split and index name the task. Takes at
    most `size` tasks of each split. Raises DataError."""
    from megagrpo.data.prepare import write_splits

    source = Path(__file__).with_name("verifiers.py").read_text()
    asked = json.dumps({"environment": environment, "arguments": dict(arguments), "size": size})
    where = f"the environment {environment}"
    try:
        done = subprocess.run(
            [python or sys.executable, "-c", source, asked], stdout=subprocess.PIPE, text=True, timeout=SECONDS_MAX
        )
    except OSError as error:
        raise DataError(Problem("--python", str(error), "an interpreter", "name one that has verifiers")) from None
    except subprocess.TimeoutExpired:
        raise DataError(Problem(where, f"no rows after {SECONDS_MAX} s", "its data set")) from None
    if done.returncode != 0:
        given, fix = f"exit status {done.returncode}; what it wrote is above", "name its interpreter with --python"
        raise DataError(Problem(where, given, "an environment that can be loaded", fix))
    rows: dict[str, list[PromptRow]] = {"train": [], "test": []}
    for line in done.stdout.splitlines():
        found = json.loads(line)
        rows[found["split"]].append(_row(environment, found))
    if not rows["train"] and not rows["test"]:
        raise DataError(Problem(where, "no tasks", "at least one"))
    if not rows["train"]:  # all it has is for evaluation: its rows are a file of their own
        rows = {"train": rows["test"], "test": []}
    return write_splits(output, [], train=rows["train"], test=rows["test"])


def prepare_openenv(prompt: str, output: Path, *, system_prompt: str, train: int, test: int) -> Prepared:
    """Writes rows of one prompt, each with its episode's seed, extra_info.seed: `train` rows from 0 on, then `test`."""
    from megagrpo.data.prepare import prompt_row, write_splits

    rows = [
        prompt_row(
            question=prompt,
            ground_truth="",
            data_source="openenv",
            system_prompt=system_prompt,
            extra_info={"index": seed, "seed": seed},
        )
        for seed in range(train + test)
    ]
    return write_splits(output, [], train=rows[:train], test=rows[train:])


def _row(environment: str, found: Mapping[str, Any]) -> PromptRow:
    from megagrpo.data.prepare import prompt_row
    from megagrpo.data.rows import truth_text

    truth = found["ground_truth"]
    row = prompt_row(
        question="",
        ground_truth=(truth_text(truth) or "") if truth is not None else "",
        data_source=f"{DATA_SOURCE}/{environment}",
        extra_info={"split": found["split"], "index": found["index"]},
    )
    return {**row, "prompt": found["prompt"]}

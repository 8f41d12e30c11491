"""`megagrpo prepare verifiers` and `megagrpo prepare openenv`: a row for each task of a verifiers environment, or for
each seed of an OpenEnv one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megagrpo.agents.environments.verifiers import DATA_SOURCE
from megagrpo.data.prepare import Prepared, PromptRow, prompt_row, write_splits
from megagrpo.data.rows import truth_text
from megagrpo.errors import DataError, Problem

SECONDS_MAX = 3600
"""Timeout for an environment to make its data set, which it may fetch."""


def prepare_verifiers(
    environment: str, output: Path, *, arguments: Mapping[str, Any], python: str | None, size: int | None
) -> Prepared:
    """Writes a row for each task of the environment, which `python` has: train.parquet, and test.parquet if it has
    evaluation data. A row's prompt is the beginning of its task; extra_info.split and index name the task. Takes at
    most `size` tasks of each split. Raises DataError."""
    source = Path(__file__).with_name("verifiers.py").read_text()
    call = json.dumps({"environment": environment, "arguments": dict(arguments), "size": size})
    where = f"the environment {environment}"
    try:
        done = subprocess.run(
            [python or sys.executable, "-c", source, call], stdout=subprocess.PIPE, text=True, timeout=SECONDS_MAX
        )
    except OSError as error:
        raise DataError(Problem("--python", str(error), "an interpreter", "name one that has verifiers")) from None
    except subprocess.TimeoutExpired:
        raise DataError(Problem(where, f"no rows after {SECONDS_MAX} s", "its data set")) from None
    if done.returncode != 0:
        given, fix = f"exit status {done.returncode}; its output is above", "name its interpreter with --python"
        raise DataError(Problem(where, given, "an environment that can be loaded", fix))
    rows: dict[str, list[PromptRow]] = {"train": [], "test": []}
    for line in done.stdout.splitlines():
        task = json.loads(line)
        row = prompt_row(
            question="",
            ground_truth=truth_text(task["ground_truth"]) or "" if task["ground_truth"] is not None else "",
            data_source=f"{DATA_SOURCE}/{environment}",
            extra_info={"split": task["split"], "index": task["index"]},
        )
        rows[task["split"]].append({**row, "prompt": task["prompt"]})
    if not rows["train"] and not rows["test"]:
        raise DataError(Problem(where, "no tasks", "at least one"))
    if not rows["train"]:  # all it has is for evaluation: its rows are a file of their own
        rows = {"train": rows["test"], "test": []}
    return write_splits(output, [], train=rows["train"], test=rows["test"])


def prepare_openenv(prompt: str, output: Path, *, system_prompt: str, train: int, test: int) -> Prepared:
    """Writes rows of one prompt, each with its episode's seed, extra_info.seed: `train` rows from 0 on, then `test`."""
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

"""Several data files, each with an amount, as one list of prompts or examples."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from megagrpo.data.order import permutation
from megagrpo.data.prompts import Overlong, render
from megagrpo.data.rows import read_rows
from megagrpo.errors import DataError, Problem
from megagrpo.recipe.schema import DataFileConfig
from megagrpo.types import Prompt

Amount = int | float | Literal["all"]
AnyItem = TypeVar("AnyItem")


@dataclass(frozen=True, slots=True)
class FileCount:
    """What became of one file: its rows, the over-long among them (dropped or truncated), and the items taken."""

    path: str
    rows: int
    overlong: int
    used: int


@dataclass(frozen=True, slots=True)
class Mixture:
    """The prompts of one epoch, file after file. A row that is taken twice is in it twice."""

    prompts: tuple[Prompt, ...]
    files: tuple[FileCount, ...]


def load_mixture(
    files: Sequence[DataFileConfig],
    tokenizer: PreTrainedTokenizerBase,
    *,
    tokens_max: int,
    overlong: Overlong = "drop",
    template_arguments: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Mixture:
    """Read, render and mix. Amounts count the prompts that are left after over-long ones are dropped.

    Raises DataError with the problems of all files.
    """

    def prompts_of(path: Path, label: str) -> tuple[Sequence[Prompt], int, int]:
        rendered = render(
            read_rows(path),
            tokenizer,
            path=path,
            label=label,
            tokens_max=tokens_max,
            overlong=overlong,
            template_arguments=template_arguments,
        )
        return rendered.prompts, rendered.rows, rendered.overlong

    return Mixture(*mix(files, prompts_of, seed=seed))


def mix(
    files: Sequence[DataFileConfig], read: Callable[[Path, str], tuple[Sequence[AnyItem], int, int]], *, seed: int
) -> tuple[tuple[AnyItem, ...], tuple[FileCount, ...]]:
    """Items of all files. `read` receives a path and a short name for it, and gives items, rows and over-long rows.

    Raises DataError with the problems of all files.
    """
    items: list[AnyItem] = []
    counts: list[FileCount] = []
    problems: list[Problem] = []
    labels = file_labels([file.path for file in files])
    for index, (file, label) in enumerate(zip(files, labels, strict=True)):
        path = Path(file.path)
        try:
            found, rows, overlong = read(path, label)
            taken = take(len(found), file.amount, path=path, key=(seed, index))
        except DataError as error:
            problems += error.problems
            continue
        items += [found[i] for i in taken]
        counts.append(FileCount(file.path, rows, overlong, len(taken)))
    if problems:
        raise DataError(problems)
    return tuple(items), tuple(counts)


def take(available: int, amount: Amount, *, path: Path, key: tuple[int, ...] = (0,)) -> np.ndarray:
    """int64 indices of the items taken from a file that has `available`; the choice depends on `key` only.

    An integer takes that many different ones; a float takes each floor(amount) times and a random share for the rest.
    They are in the file's order, pass after pass: without shuffling, copies of an item are far from each other.
    """
    if amount == "all":
        return np.arange(available)
    if isinstance(amount, int):
        if amount > available:
            raise DataError(
                Problem(
                    f"{path}: not enough rows",
                    given=f"amount: {amount}",
                    needed=f"at most {available}, the rows that are usable",
                    fix=f"use amount: all, or a share such as {amount / available:.2f} to repeat rows",
                )
            )
        copies, rest = 0, amount
    else:
        copies, rest = divmod(round(amount * available), available)
    if copies + rest == 0:
        raise DataError(
            Problem(
                f"{path}: no row is taken", given=f"amount: {amount} of {available} rows", needed="at least one row"
            )
        )
    return np.concatenate([np.tile(np.arange(available), copies), np.sort(permutation(available, *key)[:rest])])


def file_labels(paths: Sequence[str]) -> list[str]:
    """A short name for each file: its own, with as many parent folders as tell it from the others."""
    parts = [Path(os.path.abspath(path)).parts for path in paths]
    return ["/".join(own[-_depth(own, parts) :]).replace("//", "/") for own in parts]


def _depth(own: tuple[str, ...], parts: Sequence[tuple[str, ...]]) -> int:
    others = [other for other in parts if other != own]
    return next((d for d in range(1, len(own)) if all(other[-d:] != own[-d:] for other in others)), len(own))

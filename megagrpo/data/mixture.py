"""Several data files, each with an amount, as one list: which rows of each an epoch takes, and in what order."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar

import numpy as np

from megagrpo.data.files import row_count
from megagrpo.errors import DataError, Problem
from megagrpo.recipe.schema import DataFileConfig

Amount = int | float | Literal["all"]


class Item(Protocol):
    """A prompt or an example: a dataclass whose content must be the same when a run continues."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def id(self) -> str: ...

    @property
    def tokens(self) -> Sequence[int] | np.ndarray: ...

    def content(self) -> bytes: ...


AnyItem = TypeVar("AnyItem", bound=Item)


@dataclass(frozen=True, slots=True)
class FileCount:
    """What became of one file: its rows, the over-long among them (dropped or truncated), and the items taken."""

    path: str
    rows: int
    overlong: int
    used: int


@dataclass(frozen=True, slots=True)
class Mixture(Generic[AnyItem]):
    """The prompts or examples of one epoch, file after file. A row that is taken twice is in it twice."""

    items: tuple[AnyItem, ...]
    files: tuple[FileCount, ...]


def mix(
    files: Sequence[DataFileConfig], read: Callable[[Path, str], tuple[Sequence[AnyItem], int, int]], *, seed: int
) -> Mixture[AnyItem]:
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
    return Mixture(tuple(items), tuple(counts))


def epoch_rows(files: Sequence[DataFileConfig]) -> int:
    """Rows of one epoch, over-long ones included, from the files' row counts alone. Raises DataError for a file that
    cannot be read."""
    return sum(taken_count(row_count(Path(file.path)), file.amount) for file in files)


def taken_count(available: int, amount: Amount) -> int:
    """How many items an amount takes from a file that has `available`."""
    if amount == "all":
        return available
    return amount if isinstance(amount, int) else round(amount * available)


def take(available: int, amount: Amount, *, path: Path, key: tuple[int, ...] = (0,)) -> np.ndarray:
    """int64 indices of the items taken from a file that has `available`; the choice depends on `key` only.

    An integer takes that many different ones; a float takes each floor(amount) times and a random share for the rest.
    They are in the file's order, pass after pass: without shuffling, copies of an item are far from each other.
    """
    if amount == "all":
        return np.arange(available)
    count = taken_count(available, amount)
    if isinstance(amount, int) and amount > available:
        needed = f"at most {available}, the rows that are usable"
        fix = f"use amount: all, or a share such as {amount / available:.2f} to repeat rows"
        raise DataError(Problem(f"{path}: not enough rows", f"amount: {amount}", needed, fix))
    if count == 0:
        given = f"amount: {amount} of {available} rows"
        raise DataError(Problem(f"{path}: no row is taken", given, needed="at least one row"))
    copies, rest = (0, count) if isinstance(amount, int) else divmod(count, available)
    return np.concatenate([np.tile(np.arange(available), copies), np.sort(permutation(available, *key)[:rest])])


def permutation(size: int, *key: int) -> np.ndarray:
    """int64 [size], a permutation of 0..size-1 drawn from `key`: the same on every machine and with every numpy.

    Sorts raw 64-bit draws: numpy promises the bit stream of PCG64, but not the algorithm of Generator.permutation.
    """
    return np.argsort(np.random.PCG64(np.random.SeedSequence(key)).random_raw(size), kind="stable")


def file_labels(paths: Sequence[str]) -> list[str]:
    """A short name for each file: its own, with as many parent folders as tell it from the others."""
    parts = [Path(os.path.abspath(path)).parts for path in paths]
    return ["/".join(own[-_depth(own, parts) :]).replace("//", "/") for own in parts]


def _depth(own: tuple[str, ...], parts: Sequence[tuple[str, ...]]) -> int:
    others = [other for other in parts if other != own]
    return next((d for d in range(1, len(own)) if all(other[-d:] != own[-d:] for other in others)), len(own))

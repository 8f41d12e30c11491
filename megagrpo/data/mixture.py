"""A sequence of several sources, each with an amount: the rows of each that an epoch takes, their order and counts."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate, islice, pairwise
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar, overload

import numpy as np

from megagrpo.data.files import row_count
from megagrpo.data.locations import files_of, is_remote
from megagrpo.data.store import Stored
from megagrpo.errors import DataError, MachineError, Problem
from megagrpo.recipe.schema.data import EntryConfig

Amount = int | float | Literal["all"]


class Item(Protocol):
    """A prompt or an example: a dataclass whose content must be the same when a run resumes."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def id(self) -> str: ...

    @property
    def tokens(self) -> Sequence[int] | np.ndarray: ...

    def content(self) -> bytes: ...


AnyItem = TypeVar("AnyItem", bound=Item)
AnyFact = TypeVar("AnyFact")
Made = TypeVar("Made")
AnyEntry = TypeVar("AnyEntry", bound=EntryConfig)
OVERLAPS_SHOWN = 100
COUNTS_FILE = "data.json"
REPEATED_MAX = 1e4
"""The most times that an epoch takes a row; amounts in the recipe have the same limit."""


@dataclass(frozen=True, slots=True)
class FileCount:
    """The counts of one file: its rows, those with a fault, and the items taken for an epoch.

    Over-long items are dropped or truncated, duplicates dropped, contaminated ones dropped or reported.
    """

    path: str
    rows: int
    overlong: int
    taken: int
    duplicates: int = 0
    disagreeing: int = 0
    """Duplicates whose ground truth differs from that of every earlier copy."""
    contaminated: int = 0
    overlaps: tuple[tuple[str, str], ...] = ()
    """Ids of contaminated prompts, each with the id of a held-out prompt; at most OVERLAPS_SHOWN."""

    def text(self, noun: str) -> str:
        """Returns a line with the counts."""
        duplicates = "duplicates" + f" ({self.disagreeing} with another ground truth)" * bool(self.disagreeing)
        named = {"over-long": self.overlong, duplicates: self.duplicates, "contaminated": self.contaminated}
        faults = "".join(f", {count} {name}" for name, count in named.items() if count)
        return f"{self.path}: {self.taken} {noun} of {self.rows} rows{faults}"


Marked = tuple[np.ndarray, Mapping[str, Any]]
"""Flags of a part's items that are dropped, bool [items], and its faults, by field of FileCount."""


class Mixed(Sequence[AnyItem]):
    """The items of an epoch, in memory only while they are read. `taken` holds their rows in the concatenated parts."""

    def __init__(self, parts: Sequence[Stored[AnyItem]], taken: np.ndarray) -> None:
        self._parts = parts
        self._starts = [0, *accumulate(map(len, parts))]
        self._taken = taken  # int64 [items]

    def __len__(self) -> int:
        return len(self._taken)

    @overload
    def __getitem__(self, index: int) -> AnyItem: ...

    @overload
    def __getitem__(self, index: slice) -> list[AnyItem]: ...

    def __getitem__(self, index: int | slice) -> AnyItem | list[AnyItem]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        row = int(self._taken[index])
        part = int(np.searchsorted(self._starts, row, side="right")) - 1
        return self._parts[part].item(row - self._starts[part])

    def facts(self, of: Callable[[Stored[AnyItem]], Iterator[AnyFact]]) -> Iterator[AnyFact]:
        """Yields a fact of each item, in order. `of` yields those of a part; every pass calls it for its parts."""
        passes = [0, *(np.flatnonzero(np.diff(self._taken) <= 0) + 1).tolist(), len(self)]
        for begin, end in pairwise(passes):
            rows = self._taken[begin:end]  # they ascend
            for part, first, after in zip(self._parts, self._starts, self._starts[1:], strict=False):
                wanted = rows[np.searchsorted(rows, first) : np.searchsorted(rows, after)] - first
                if len(wanted) == after - first:
                    yield from of(part)
                elif len(wanted):
                    chosen = np.zeros(after - first, bool)
                    chosen[wanted] = True
                    yield from (fact for fact, take in zip(of(part), chosen.tolist(), strict=True) if take)


def names(items: Sequence[AnyItem]) -> Iterator[str]:
    """Yields the ids of all items, in their order."""
    return items.facts(lambda part: part.names()) if isinstance(items, Mixed) else (item.id for item in items)


def fingerprint(items: Sequence[AnyItem]) -> str:
    """Returns a hash of ids and contents, in order. Other files, rows, template or amounts change it."""
    contents: Iterator[bytes] = (item.content() for item in items)
    if isinstance(items, Mixed):
        contents = items.facts(lambda part: part.contents())
    digest = hashlib.blake2b(digest_size=16)
    for name, content in zip(names(items), contents, strict=True):
        digest.update(f"{name}\0".encode() + content)
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Mixture(Generic[AnyItem]):
    """The prompts or examples of one epoch, entry after entry. A row that is taken twice is in it twice."""

    items: Sequence[AnyItem]
    files: tuple[FileCount, ...]

    def lines(self, noun: str) -> Iterator[str]:
        """Yields a line for each file, and one for each contaminated prompt that is named."""
        for file in self.files:
            yield file.text(noun)
            for prompt, held_out in file.overlaps[:3]:
                yield f"  {prompt} overlaps with {held_out}, which is evaluated on"
            if len(file.overlaps) > 3:
                yield f"  and more, named in {COUNTS_FILE}"


def write_counts(mixtures: Mapping[str, Mixture[Any]], directory: Path) -> None:
    """Writes COUNTS_FILE: by section of the recipe, the number of its items, their fingerprint, and every file with its
    counts. Raises MachineError."""
    report = {
        name: {"items": len(of.items), "digest": fingerprint(of.items), "files": [asdict(file) for file in of.files]}
        for name, of in mixtures.items()
    }
    try:
        (directory / COUNTS_FILE).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        where, fix = str(directory / COUNTS_FILE), "make room, then start the same command again"
        raise MachineError(Problem(where, error.strerror or str(error), "a file that can be written", fix)) from None


def mix(
    entries: Sequence[AnyEntry],
    read: Callable[[AnyEntry, str, str], Stored[AnyItem]],
    *,
    seed: int,
    mark: Callable[[Sequence[Any]], Sequence[Marked]] | None = None,
) -> Mixture[AnyItem]:
    """Mixes the items of all entries. `read` receives an entry, one of its files and its label, and returns its part.

    `mark` marks the items of all parts that are left out; amounts count the others. Raises DataError with the problems
    of all files.
    """
    problems: list[Problem] = []
    paths = [_noting(problems, files_of, entry.location) or [] for entry in entries]
    files = [(entry, path) for entry, of_entry in zip(entries, paths, strict=True) for path in of_entry]
    labels = file_labels([path for _, path in files])
    read_parts = [_noting(problems, read, *file, label) for file, label in zip(files, labels, strict=True)]
    parts = [part for part in read_parts if part is not None]
    if problems:
        raise DataError(problems)
    marks = mark(parts) if mark else [(np.zeros(len(part), bool), {}) for part in parts]
    starts = [0, *accumulate(map(len, parts))]
    kept = iter([start + np.flatnonzero(~dropped) for start, (dropped, _) in zip(starts, marks, strict=False)])
    # Rows of each entry, summed over all parts.
    usable = [np.concatenate([*islice(kept, len(of_entry)), np.zeros(0, np.int64)]) for of_entry in paths]
    sizes = list(map(len, usable))
    taken = [
        _noting(problems, partial(take, size, amount, path=entry.location, key=(seed, index)))
        for index, (entry, size, amount) in enumerate(zip(entries, sizes, amounts(entries, sizes), strict=True))
    ]
    if problems:
        raise DataError(problems)
    rows = np.concatenate([of_entry[chosen] for of_entry, chosen in zip(usable, taken, strict=True)])
    times = np.bincount(np.searchsorted(starts, rows, side="right") - 1, minlength=len(parts))
    counts = [
        FileCount(path, part.figures["rows"], part.figures["overlong"], used, **faults)
        for (_, path), part, (_, faults), used in zip(files, parts, marks, times.tolist(), strict=True)
    ]
    return Mixture(Mixed(parts, rows), tuple(counts))


def _noting(problems: list[Problem], make: Callable[..., Made], *arguments: Any) -> Made | None:
    """Returns what `make` makes, or adds the problems of its DataError and returns None."""
    try:
        return make(*arguments)
    except DataError as error:
        problems += error.problems
        return None


def epoch_rows(entries: Sequence[EntryConfig]) -> int:
    """Counts the rows of one epoch, over-long ones included, from the files' row counts alone. Raises DataError for a
    file that cannot be read."""
    sizes = [sum(map(row_count, files_of(entry.location))) for entry in entries]
    return sum(map(taken_count, sizes, amounts(entries, sizes)))


def amounts(entries: Sequence[EntryConfig], sizes: Sequence[int]) -> list[Amount]:
    """Returns the amount of each entry, given their `sizes` in items: its own, or the one that follows from its weight.

    Weights are shares of the shortest epoch that has every item at least once.
    """
    weights = [entry.weight for entry in entries]
    if any(weight is None for weight in weights):
        return [entry.amount for entry in entries]
    copies = [weight / size for weight, size in zip(weights, sizes, strict=True) if weight and size]
    return [
        weight / size / min(copies) if weight and size else "all" for weight, size in zip(weights, sizes, strict=True)
    ]


def taken_count(available: int, amount: Amount) -> int:
    """Returns the number of items that an amount takes from a file of `available` items."""
    if amount == "all":
        return available
    return amount if isinstance(amount, int) else round(amount * available)


def take(available: int, amount: Amount, *, path: str | Path, key: tuple[int, ...] = (0,)) -> np.ndarray:
    """Returns int64 indices of the items taken from a file of `available` items; the choice depends on `key` only.

    An integer takes that many different items; a float takes each floor(amount) times and a random share for the rest.
    Indices are in the file's order, pass after pass: without shuffling, copies of an item are far from each other.
    """
    if available == 0:
        given, needed = "every row is over-long, a duplicate or contaminated", "at least one row"
        raise DataError(
            Problem(f"{path}: no row is left", given, needed, "remove the entry, or change what drops rows")
        )
    if amount == "all":
        return np.arange(available)
    if isinstance(amount, float) and amount > REPEATED_MAX:
        given, needed = f"a weight that repeats each row {amount:,.0f} times", f"at most {REPEATED_MAX:,.0f} times"
        fix = "lower this weight, or raise the weights of larger entries"
        raise DataError(Problem(f"{path}: too few rows for its weight", given, needed, fix))
    count = taken_count(available, amount)
    if isinstance(amount, int) and amount > available:
        needed = f"at most {available}, the rows that are usable"
        fix = f"use amount: all, or a share such as {amount / available:.2f} to repeat rows"
        raise DataError(Problem(f"{path}: not enough rows", f"amount: {amount}", needed, fix))
    if count == 0:
        given = f"amount: {amount} of {available} rows"
        fix = "raise the amount; an integer counts rows"
        raise DataError(Problem(f"{path}: no row is taken", given, "at least one row", fix))
    copies, rest = (0, count) if isinstance(amount, int) else divmod(count, available)
    return np.concatenate([np.tile(np.arange(available), copies), np.sort(permutation(available, *key)[:rest])])


def permutation(size: int, *key: int) -> np.ndarray:
    """Returns a permutation of 0..size-1, int64 [size], drawn from `key`: the same on every machine and numpy version.

    Sorts raw 64-bit draws: numpy promises the bit stream of PCG64, but not the algorithm of Generator.permutation.
    """
    return np.argsort(np.random.PCG64(np.random.SeedSequence(key)).random_raw(size), kind="stable")


def file_labels(paths: Sequence[str]) -> list[str]:
    """Returns a short name for each file: its own, with as many parent folders as tell it from the others."""
    parts = [tuple(path.split("/")) if is_remote(path) else Path(os.path.abspath(path)).parts for path in paths]
    by_end: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
    for whole in set(parts):
        for depth in range(1, len(whole)):
            by_end.setdefault(whole[-depth:], set()).add(whole)

    def depth_of(whole: tuple[str, ...]) -> int:
        return next((d for d in range(1, len(whole)) if len(by_end[whole[-d:]]) == 1), len(whole))

    return ["/".join(whole[-depth_of(whole) :]).replace("//", "/") for whole in parts]

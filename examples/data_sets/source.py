"""The own files of a published data set: from the hub, found by split, read with every bad row named."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megagrpo.data.files import Record
from megagrpo.data.prepare import Prepared, PromptRow, write_splits
from megagrpo.data.rows import read, simple_schema
from megagrpo.errors import DataError, Problem, first_line

PATTERNS = ["*.parquet", "*.json", "*.jsonl", "*.jsonl.gz", "*.jsonl.zst", "*.arrow"]
Problems = Callable[[Record, str], list[Problem]]
"""Finds the mistakes of a record, whose file and line are given."""


def downloaded(name: str) -> Path:
    """Returns the folder with the data files of a data set, from the local cache or the hub. Raises DataError.

    HF_HUB_OFFLINE, HF_TOKEN and HF_ENDPOINT are honoured.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, IncompleteSnapshotError

    try:
        return Path(snapshot_download(name, repo_type="dataset", allow_patterns=PATTERNS))
    except (OSError, HFValidationError, IncompleteSnapshotError) as error:
        given = f"{name}: {type(error).__name__}: {first_line(error)}"
        needed = "a data set in the local cache, or one that can be downloaded"
        fix = "check the name, the network, HF_HUB_OFFLINE and HF_TOKEN; or copy its files here (--source)"
        raise DataError(Problem("the Hugging Face hub does not give the data set", given, needed, fix)) from None


def records_of(paths: Iterable[Path], columns: tuple[str, ...], problems_of: Problems) -> list[tuple[Path, Record]]:
    """Reads all rows, each with its file. Raises DataError naming each bad row of every file."""
    schema = simple_schema(columns, lambda record, number, where: problems_of(record, where) or record, "docs/data.md")
    records: list[tuple[Path, Record]] = []
    problems: list[Problem] = []
    for path in paths:
        try:
            records += ((path, record) for record in read(path, schema))
        except DataError as error:
            problems += error.problems
    if problems:
        raise DataError(problems)
    return records


@dataclass(frozen=True)
class Splits:
    """A data set with a train and a test split: the folders and names under which it is published, and its rows."""

    name: str
    folders: Sequence[str]
    names: Sequence[str]
    columns: tuple[str, ...]
    problems_of: Problems
    row: Callable[[Record, Path, dict[str, object]], PromptRow]
    """Makes a prompt of a record, its file, and its split and index."""

    def prepare(self, source: Path, output: Path) -> Prepared:
        """Reads both splits from `source`, writes train.parquet and test.parquet to `output`. Raises DataError if a
        split is not found, or naming each bad row."""
        files = {split: self.files(source, split) for split in ("train", "test")}
        rows: dict[str, list[PromptRow]] = {}
        problems: list[Problem] = []
        for split, paths in files.items():
            try:
                records = records_of(paths, self.columns, self.problems_of)
            except DataError as error:
                problems += error.problems
                continue
            rows[split] = [
                self.row(record, path, {"split": split, "index": index}) for index, (path, record) in enumerate(records)
            ]
        if problems:
            raise DataError(problems)
        return write_splits(output, [*files["train"], *files["test"]], train=rows["train"], test=rows["test"])

    def files(self, source: Path, split: str) -> list[Path]:
        """Returns all matches of the first of `names` that has any, in the first of `folders`. Raises DataError."""
        if not source.is_dir():
            raise DataError(Problem(str(source), "no such folder", f"the folder with {self.name}'s own files"))
        for folder in self.folders:
            for name in self.names:
                if paths := sorted(source.glob(f"{folder}/{name.format(split=split)}")):
                    return paths
        tried = " or ".join(name.format(split=split) for name in self.names)
        given = ", ".join(sorted(path.name for path in source.iterdir())) or "an empty folder"
        needed = f"{tried} in it, or in {', '.join(self.folders[1:])}"
        raise DataError(Problem(f"{source}: no file of the {split} split", given, needed))

"""Counts of the data's rows: lines for the console, and data.json in the run's directory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megagrpo.data.cursor import fingerprint
from megagrpo.data.mixture import FileCount, Mixture
from megagrpo.errors import MachineError, Problem

FILE = "data.json"


def lines(mixtures: Mapping[str, Mixture[Any]], noun: str) -> Iterator[str]:
    """Yields a line for each file, and one for each contaminated prompt that is named."""
    for mixture in mixtures.values():
        for file in mixture.files:
            yield line(file, noun)
            for prompt, held_out in file.overlaps[:3]:
                yield f"  {prompt} overlaps with {held_out}, which is evaluated on"
            if len(file.overlaps) > 3:
                yield f"  and more, named in {FILE}"


def line(file: FileCount, noun: str) -> str:
    """Returns the line with the counts of one file."""
    duplicates = "duplicates" + f" ({file.disagreeing} with another ground truth)" * bool(file.disagreeing)
    named = {"over-long": file.overlong, duplicates: file.duplicates, "contaminated": file.contaminated}
    faults = "".join(f", {count} {name}" for name, count in named.items() if count)
    return f"{file.path}: {file.taken} {noun} of {file.rows} rows{faults}"


def write(mixtures: Mapping[str, Mixture[Any]], directory: Path) -> None:
    """Writes FILE: by section of the recipe, the number of its items, a digest of them (data/cursor.py), and every file
    with its counts. Raises MachineError."""
    report = {
        name: {
            "items": len(mixture.items),
            "digest": fingerprint(mixture.items),
            "files": [asdict(file) for file in mixture.files],
        }
        for name, mixture in mixtures.items()
    }
    try:
        (directory / FILE).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        where, fix = str(directory / FILE), "make room, then start the same command again"
        raise MachineError(Problem(where, error.strerror or str(error), "a file that can be written", fix)) from None

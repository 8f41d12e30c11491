"""The part of a checkpoint about groups that no step has trained on: their samples so far, and when they began."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import pydantic

from megagrpo.checkpoint.groups import read_groups, write_groups
from megagrpo.checkpoint.store import Checkpoint
from megagrpo.errors import Problem, UnusableCheckpointError, brief, first_line
from megagrpo.types import Group, Sample

PENDING = "pending.safetensors"
"""In a checkpoint's rank directory."""
NAMES = ("numbers", "versions", "next_number", "cursor", "dropped", "joints")
"""Fields that _Notes copies from Pending."""
Count = Annotated[int, pydantic.Field(ge=0, le=10**12)]


@dataclass(frozen=True)
class Pending:
    """Groups of three kinds in order: those that dynamic sampling has dropped since the last step; those that have
    begun, in the order of their numbers; drawn prompts that have not begun."""

    groups: Sequence[Group]  # with the samples that are there, and scores if all are and were scored
    numbers: Sequence[int]  # of those that have begun, dropped ones among them
    versions: Sequence[int]  # the newest weights when they began
    next_number: int
    cursor: Mapping[str, Any]  # the place in the data behind them
    dropped: int = 0
    joints: Sequence[Mapping[int, Sequence[int]]] = ()  # as in Order, of those that have begun
    unfinished: Callable[[], Sequence[Sequence[Sample]]] = tuple
    """Reads, by group, its unfinished samples that have tokens. () if that is not kept."""


@dataclass(frozen=True)
class _Notes:
    numbers: tuple[Count, ...]
    versions: tuple[Count, ...]
    next_number: Count
    cursor: dict[str, Any]
    dropped: Count = 0
    joints: tuple[dict[Count, tuple[Count, ...]], ...] = ()
    unfinished: tuple[Count, ...] = ()
    """Number of unfinished samples of each group, its last ones. () in files of earlier versions."""


def write_pending(path: Path, pending: Pending) -> None:
    """Writes pending groups. Raises CheckpointError."""
    notes = {name: getattr(pending, name) for name in NAMES}
    unfinished = pending.unfinished() or [()] * len(pending.groups)
    whole = [
        replace(group, samples=(*group.samples, *goes_on))
        for group, goes_on in zip(pending.groups, unfinished, strict=True)
    ]
    write_groups(path, whole, notes | {"unfinished": [len(goes_on) for goes_on in unfinished]})


def pending_of(checkpoint: Checkpoint | None) -> Pending | None:
    """Reads pending groups; None if there are none. Raises UnusableCheckpointError if the file is not as written."""
    path = checkpoint.rank_directory / PENDING if checkpoint else None
    if path is None or not path.exists():
        return None
    groups, values = read_groups(path)
    try:
        notes = pydantic.TypeAdapter(_Notes).validate_python(values)
    except pydantic.ValidationError as error:
        raise UnusableCheckpointError(Problem(str(path), first_line(error), "pending groups")) from None
    if not notes.dropped <= len(notes.numbers) == len(notes.versions) <= len(groups):
        given = f"{len(notes.numbers)} numbers and {len(notes.versions)} versions of {len(groups)} groups"
        raise UnusableCheckpointError(Problem(str(path), given, "a number and a version of each that has begun"))
    lengths = [len(group.samples) for group in groups]
    counts = notes.unfinished or (0,) * len(groups)
    if len(counts) != len(groups) or any(count > length for count, length in zip(counts, lengths, strict=True)):
        given = f"{brief(counts)} unfinished ones of {brief(lengths)} samples"
        raise UnusableCheckpointError(Problem(str(path), given, "at most the samples of each group"))
    parts = [(group, length - count) for group, length, count in zip(groups, lengths, counts, strict=True)]
    finished = [replace(group, samples=group.samples[:cut]) for group, cut in parts]
    unfinished = [group.samples[cut:] for group, cut in parts]
    return Pending(finished, **{name: getattr(notes, name) for name in NAMES}, unfinished=lambda: unfinished)

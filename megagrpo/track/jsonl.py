"""JSON in the run's directory. In lines: metrics.jsonl (a line per step), mismatch.jsonl and schedule.jsonl
(trainer/schedule_log.py)."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from megagrpo.errors import MachineError, Problem

METRICS_FILE, MISMATCH_FILE, SCHEDULE_FILE = "metrics.jsonl", "mismatch.jsonl", "schedule.jsonl"
PLAN_FILE = "plan.json"
"""The output of `megagrpo plan --json` for the recipe of the run's last start."""
Number = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
"""A number of a line; null is one that was not finite, and is read as NaN."""
Count = Annotated[int, Field(ge=0, le=10**15)]
MISMATCH_FIGURES = ("mean", "p99", "max", "k1", "k3", "ratio_mean", "effective_share")
OWN_ROUTES = ("mean", "p99", "max", "k3")
"""Figures of the mismatch with the trainer's own routes."""


@dataclass(frozen=True)
class WorstToken:
    """One token with different logprobs by the trainer and an engine. Logprobs are in nats."""

    prompt_id: str
    sample: int  # index among the samples of the prompt
    position: int  # in the response, from 0
    token: int
    before: str  # the text that it follows
    text: str
    after: str
    train_logprob: Number
    rollout_logprob: Number
    weight_version: int  # of the weights that sampled it

    @property
    def difference(self) -> float:
        return abs(self.train_logprob - self.rollout_logprob)


@dataclass(frozen=True)
class StepProof:
    """The counts of a step's trained response tokens by which it proves that what was sampled is what was trained."""

    tokens: Count
    versions: tuple[tuple[Count, Count], ...]  # weight versions in ascending order, each with its tokens
    verified: Count  # sampled by versions that this run verified, by digest on every engine, before they sampled
    routed: Count | None  # passed the experts that the engine chose; None: routes are not replayed
    kept: Count | None  # have the set that they were drawn from; None: that is the whole vocabulary
    quantization: str | None  # of the engines' weights
    same_bits: bool  # the trainer's logprobs are of weights with the bits that the engines hold
    route_differences: tuple[Number, ...] | None = None  # as in rank_results.StepMetrics
    own_routes: dict[str, Number] | None = None  # OWN_ROUTES of the mismatch, had the trainer's routers chosen


@dataclass(frozen=True)
class MismatchRecord:
    """One line of mismatch.jsonl. MISMATCH_FIGURES are those of algorithm.mismatch.Mismatch."""

    step: int
    tokens: int
    mean: Number
    p99: Number
    max: Number
    k1: Number
    k3: Number
    ratio_mean: Number
    effective_share: Number
    worst: tuple[WorstToken, ...]  # largest difference first
    proof: StepProof | None = None  # None: an earlier version wrote the line


class StepLines:
    """A file of JSON objects that each have a `step`, flushed line by line. NaN and infinity become null.

    A run that starts (resumed_step 0) empties it. A run that resumes after `resumed_step` removes the lines of later
    steps, which it will write again; if `unlogged`, also that step's line. Unreadable lines, such as one that was cut
    off, go to a file of their own, which `say` names.
    """

    def __init__(self, path: Path, resumed_step: int, say: Callable[[str], None], unlogged: bool = False) -> None:
        kept, unread = list[bytes](), list[bytes]()
        if resumed_step and path.exists():
            with path.open("rb") as lines:
                for line in lines:
                    whole = line if line.endswith(b"\n") else line + b"\n"
                    try:
                        if json.loads(line)["step"] <= resumed_step - unlogged:
                            kept.append(whole)
                    except (ValueError, KeyError, TypeError, RecursionError):
                        unread.append(whole)
        if unread:
            aside = path.with_name(f"{path.name}.unreadable")
            with aside.open("ab") as file:
                file.writelines(unread)
            say(f"warning: {path}: {len(unread)} lines cannot be read: set aside in {aside}")
        part = path.with_name(f"{path.name}.part")
        part.write_bytes(b"".join(kept))
        part.replace(path)
        # Absolute, and without a buffer: bytes that a full disk refused must not be written at close.
        self._path, self._file = path.absolute(), path.open("ab", buffering=0)

    def append(self, line: dict[str, Any]) -> None:
        """Appends a line. Raises MachineError if there is no room for it, or if the file was moved or deleted."""
        require_in_place(self._path, self._file.fileno())
        left = f"{json.dumps(finite(line), ensure_ascii=False, allow_nan=False)}\n".encode(errors="replace")
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            fix = "make room, then start the same command again: it continues from the newest checkpoint"
            given = error.strerror or str(error)
            raise MachineError(Problem(str(self._path), given, "room for the run's files", fix)) from error

    def close(self) -> None:
        self._file.close()


def require_in_place(path: Path, descriptor: int) -> None:
    """Raises MachineError if this open file, or a directory above it, was renamed or deleted."""
    if not path.exists() or not os.path.samestat(path.stat(), os.fstat(descriptor)):
        needed = "the run's directory where it is, until the run's end"
        fix = "move it back, if it still exists, and start the same command again"
        raise MachineError(Problem(str(path), "renamed, deleted or replaced during the run", needed, fix))


def step_entries(lines: Iterable[bytes | str]) -> Iterator[dict[str, Any]]:
    """Yields the objects of lines that have a step. Skips unreadable lines: still being written, or cut off."""
    for line in lines:
        try:
            entry = json.loads(line)
            int(entry["step"])
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            continue
        yield entry


def read_json(path: Path) -> dict[str, Any]:
    """Reads the object in a file; returns {} if there is none."""
    try:
        read = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError, RecursionError):
        return {}
    return read if isinstance(read, dict) else {}


def as_number(value: Any) -> float:
    """Returns a value of a file as a float; NaN for anything but a number, and for an integer too large for a float."""
    try:
        return float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return math.nan


def leaves(tree: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    """Yields each leaf of nested values with its path, such as train.layout.tensor; lists of mappings are numbered."""
    for key, value in tree.items():
        if isinstance(value, list) and any(isinstance(entry, Mapping) for entry in value):
            value = {str(index): entry for index, entry in enumerate(value)}
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{within}{key}.")
        else:
            yield f"{within}{key}", value


def finite(value: Any) -> Any:
    """Returns the value for JSON: NaN and infinity become null."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

"""metrics.jsonl as trackers read it: line after line, while the run writes it."""

from __future__ import annotations

import json
import math
import os
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

AHEAD_MAX = 256
"""The maximum number of lines held in memory."""


@dataclass(frozen=True)
class Line:
    """A step's metrics, NaN where they were not finite. seconds: the time of logging, since 1970."""

    step: int
    seconds: float
    metrics: dict[str, float]


class MetricLines:
    """The lines of steps after `after`. The file is opened again after a rewind of the run has replaced it."""

    def __init__(self, path: Path, after: int) -> None:
        self._path, self._after = path, after
        self._file: BinaryIO | None = None
        self._ahead = deque[Line]()

    def ahead(self) -> deque[Line]:
        """Returns the next whole lines, AHEAD_MAX at most. Raises OSError."""
        while len(self._ahead) < AHEAD_MAX and (file := self._opened()):
            begin, text = file.tell(), file.readline()
            if not text.endswith(b"\n"):  # it is still being written
                file.seek(begin)
                if not self._is_replaced(file):
                    break
                self._ahead.clear()  # they may be others now
                self._close()
            elif (line := _line(text)) and line.step > self._after:
                self._ahead.append(line)
        return self._ahead

    @property
    def after(self) -> int:
        """Returns the last step that was taken."""
        return self._after

    def take(self, count: int) -> None:
        """Removes the first `count` lines, which were sent."""
        for _ in range(count):
            self._after = max(self._after, self._ahead.popleft().step)

    def again(self, after: int) -> None:
        """Restarts at the file's beginning, with the lines of steps after `after`."""
        self._after = after
        self._ahead.clear()
        self._close()

    def _opened(self) -> BinaryIO | None:
        if self._file is None and self._path.exists():
            self._file = self._path.open("rb")
        return self._file

    def _is_replaced(self, file: BinaryIO) -> bool:
        return self._path.exists() and not os.path.samestat(self._path.stat(), os.fstat(file.fileno()))

    def _close(self) -> None:
        if self._file:
            self._file.close()
        self._file = None


def _line(text: bytes) -> Line | None:
    """Parses a line; returns None for an unreadable one, which the run sets aside when it resumes."""
    try:
        values = json.loads(text)
        step, seconds = int(values.pop("step")), float(values.pop("time"))
        return Line(step, seconds, {str(k): math.nan if v is None else float(v) for k, v in values.items()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None

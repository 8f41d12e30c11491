"""The work of a process, and of those that it waits for, as a Chrome trace (Perfetto, chrome://tracing).

Code that works or waits reports it (`record`, `span`); spans are kept only between `begin` and `take`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Span:
    """Something that `who` did. Seconds are time.monotonic's of this process."""

    who: str  # such as `driver`, `engine 1`, `train rank 0`
    what: str
    begin: float
    end: float


class Timeline:
    """Spans of this process, from `begin` to `take`. Any thread may add."""

    def __init__(self) -> None:
        self._spans: list[Span] | None = None

    def begin(self) -> None:
        """Starts to keep spans."""
        self._spans = []

    def take(self) -> list[Span]:
        """Returns the spans kept since `begin`, and stops keeping them."""
        spans, self._spans = self._spans or [], None
        return spans

    def record(self, who: str, what: str, begin: float, end: float) -> None:
        """Records a span by its fields, if spans are kept."""
        if (spans := self._spans) is not None:  # `take` may set it to None at any time
            spans.append(Span(who, what, begin, end))

    @contextmanager
    def span(self, who: str, what: str) -> Iterator[None]:
        """Records the block as a span in which `who` does `what`."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self.record(who, what, begin, time.monotonic())


TIMELINE = Timeline()
"""The timeline of this process."""


def write_chrome_trace(path: Path, spans: Sequence[Span], began: float) -> None:
    """Writes JSON in the Trace Event Format: a process for each `who`, with as many rows as it did things at once.

    began: time.monotonic() that is 0 in the trace. Raises OSError.
    """
    events: list[dict[str, Any]] = []
    for process, who in enumerate(sorted({span.who for span in spans}, key=_in_order), start=1):
        events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": who}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}})
        for row, span in _rows([span for span in spans if span.who == who]):
            times = {"ts": round(1e6 * (span.begin - began), 1), "dur": round(1e6 * (span.end - span.begin), 1)}
            events.append({"ph": "X", "name": span.what, "pid": process, "tid": row, **times})
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


def _in_order(who: str) -> tuple[bool, str, int]:
    """Returns a sort key: the driver, then the others by name, their numbers as numbers."""
    name, _, number = who.rpartition(" ")
    return (who != "driver", name, int(number)) if number.isdecimal() else (who != "driver", who, 0)


def _rows(spans: Sequence[Span]) -> Iterator[tuple[int, Span]]:
    """Yields each span with its row: the first in which it lies inside the open span, or in which no span is open.
    Viewers draw a row's spans as a stack."""
    rows: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: (span.begin, -span.end)):
        for open_spans in rows:
            while open_spans and open_spans[-1].end <= span.begin:
                open_spans.pop()
            if not open_spans or span.end <= open_spans[-1].end:
                break
        else:
            rows.append(open_spans := [])
        open_spans.append(span)
        yield next(row for row, spans_of_row in enumerate(rows) if spans_of_row is open_spans), span

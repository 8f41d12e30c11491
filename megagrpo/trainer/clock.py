"""Seconds per phase of a step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class PhaseClock:
    """Adds up wall-clock seconds by phase name until `take` empties it."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """Metrics `seconds/<phase>` since the last call."""
        taken = {f"seconds/{name}": seconds for name, seconds in self._seconds.items()}
        self._seconds = {}
        return taken

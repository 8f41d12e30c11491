"""A tracker of the tests' own: one file, and one line in TRACKERS."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from megagrpo.section import PositiveInt, Section
from megagrpo.track.tracked_run import Line, TrackedRun

FILE = "toy.jsonl"
CALL_SECONDS = 0.02


class ToyConfig(Section):
    """A toy."""

    times: PositiveInt = 1
    """Factor of each reward."""


class Toy(TrackedRun):
    """A file with a line for each step that it was sent, and the run's status."""

    title = "Toy"
    section = ToyConfig
    field = Field(ToyConfig(), description="On, for the tests.")
    settings: ToyConfig

    def open(self) -> int:
        return max(map(int, received(self.directory)), default=-1)

    def log(self, lines: Sequence[Line]) -> int:
        for line in lines:
            self._append(json.dumps([line.step, self.settings.times * line.metrics["reward/mean"]]))
            time.sleep(CALL_SECONDS)  # a kill comes between two lines
        return lines[-1].step

    def finish(self, status: str) -> None:
        self._append(json.dumps(["status", status]))

    def _append(self, line: str) -> None:
        with (self.directory / FILE).open("a") as file:
            os.write(file.fileno(), f"{line}\n".encode())


def received(directory: Path) -> dict[str, float]:
    """Values by step; a step that came twice is an error."""
    path = directory / FILE
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    steps = [step for step, _ in lines if step != "status"]
    assert len(set(steps)) == len(steps), steps
    return {str(step): value for step, value in lines if step != "status"}

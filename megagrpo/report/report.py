"""The whole report of a run: one section after the other."""

from __future__ import annotations

from pathlib import Path

from megagrpo.errors import Problem, ReportError
from megagrpo.report import mismatch


def report(directory: Path, steps: int) -> str:
    """What there is to say of the run in `directory`; tables show its last `steps` steps. Raises ReportError."""
    if not directory.is_dir():
        raise ReportError(
            Problem(
                f"{directory}: no such directory",
                needed="the directory of a run: track.directory and name of its recipe, such as runs/NAME",
            )
        )
    return "\n".join(mismatch.section(mismatch.read(directory), steps))

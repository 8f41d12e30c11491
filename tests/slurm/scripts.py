"""Slurm scripts as their user leaves them: three lines edited."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPTS = REPOSITORY / "slurm"
EDIT = re.compile(r"^.*?( *# EDIT (\d).*)$", re.MULTILINE)


def edited(script: Path, *lines: str) -> str:
    """The script's text with one of `lines` on each line marked EDIT, before the mark."""
    return EDIT.sub(lambda marked: lines[int(marked[2]) - 1] + marked[1], script.read_text())


def overrides(recipe: dict[str, Any]) -> list[str]:
    """A whole recipe as overrides of another: its sections take the place of that one's."""
    return [f"{section}={json.dumps(value)}" for section, value in recipe.items()]

"""One thing that the doctor looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "absent", "doubtful", "wrong"]


@dataclass(frozen=True)
class Finding:
    """What was found of one part of an environment.

    absent: an optional part that is not here; `remedy` says what it is for. doubtful: it may fail in some uses. wrong:
    nothing runs before it is put right.
    """

    part: str
    state: State
    found: str
    remedy: str = ""

"""Numbers as text: bytes and seconds with a unit that suits them, and runs of numbers."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

BYTE_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
SECOND_UNITS = ((86400.0, "days"), (3600.0, "h"), (120.0, "min"), (1.0, "s"), (1e-3, "ms"))


def byte_text(number: float) -> str:
    """Formats bytes as `61.2 GiB`, `512 B`."""
    for size, unit in BYTE_UNITS:
        if abs(number) >= size:
            return f"{_short(number / size)} {unit}"
    return f"{number:.0f} B"


def second_text(seconds: float) -> str:
    """Formats seconds as `3.42 s`, `12 ms`, `2.5 h`."""
    for size, unit in SECOND_UNITS:
        if seconds >= size:
            return f"{_short(seconds / (60.0 if unit == 'min' else size))} {unit}"
    return "0 s" if seconds == 0 else f"{_short(seconds * 1e6)} us"


def spans(numbers: Iterable[int]) -> str:
    """Formats numbers as `0-3, 8-11`."""
    runs = []
    for _, run in groupby(enumerate(sorted(set(numbers))), lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        runs.append(f"{members[0]}-{members[-1]}" if len(members) > 1 else f"{members[0]}")
    return ", ".join(runs)


def _short(number: float) -> str:
    """Formats a number to three figures, and from 100 on as an integer."""
    return f"{number:.0f}" if abs(number) >= 100 else f"{number:.1f}" if abs(number) >= 10 else f"{number:.2f}"

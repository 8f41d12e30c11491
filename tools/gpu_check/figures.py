"""Findings of a check: figures with the range that they should be in, and what to do about one that is not."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Figure:
    """One number of a check. With neither `low` nor `high` it is only reported."""

    name: str
    value: float
    unit: str = ""
    low: float | None = None
    high: float | None = None
    fix: str = ""
    """Advice if it is out of range."""
    note: str = ""
    """More that is worth knowing, such as the names of kernels."""

    @property
    def fits(self) -> bool:
        above = self.low is None or self.value >= self.low
        return math.isfinite(self.value) and above and (self.high is None or self.value <= self.high)

    @property
    def expected(self) -> str:
        match self.low, self.high:
            case None, None:
                return ""
            case None, high:
                return f"at most {high:g}"
            case low, None:
                return f"at least {low:g}"
            case low, high:
                return f"{low:g}" if low == high else f"{low:g} to {high:g}"

    @property
    def mark(self) -> str:
        """A figure that is only reported has none."""
        return "WRONG" if not self.fits else "ok" if self.expected else "-"

    @property
    def text(self) -> str:
        value = f"{self.value:.4g} {self.unit}".rstrip()
        return f"{self.name:<58} {value:>14}"

    def row(self, check: str) -> str:
        """A line for the table of all checks."""
        return f"{check:<12} {self.text}   {self.expected:<16} {self.mark}"

    def drawn(self) -> Iterator[str]:
        """Yields the lines that are printed when the check has found it."""
        yield f"  {self.mark:<5} {self.text}   {self.expected}".rstrip()
        if self.note:
            yield f"        {self.note}"
        if not self.fits and self.fix:
            yield f"        fix: {self.fix}"

    def as_json(self) -> dict[str, Any]:
        finite = self.value if math.isfinite(self.value) else str(self.value)
        return asdict(self) | {"value": finite, "fits": self.fits}

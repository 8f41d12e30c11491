"""Detection of a slow engine: its responses grow much slower than those of the other engines, time after time."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

from megagrpo.errors import Problem

SPEED_REPORTS = 12
"""Reports of tokens so far, from one speed to the next: servers send tokens in parts of many."""
SLOW_TIMES = 8.0
"""A request on a full engine may take a few times longer than on one that is nearly empty. This is more."""
RECENT_TIMES = 3.0
"""A speed is too old after so many times `seconds`: a report comes with a sample, so it may be late; engines rest."""


@dataclass
class Speeds:
    """Tokens per second of a request on each engine, as sampling engines report about every `seconds`."""

    seconds: float
    _last: dict[str, tuple[float, float]] = field(default_factory=dict)
    """The last speed of each engine, and when it was reported."""
    _slow_at: dict[str, float] = field(default_factory=dict)
    _restarted: set[str] = field(default_factory=set)

    def problem(self, engine: str, speed: float, now: float) -> Problem | None:
        """Returns the problem of an engine that is slow now and was the last time, beside engines that sampled
        recently; else None. Returns it once per engine, as the engine's node may be the slow part."""
        others = [told for name, (told, at) in self._last.items() if name != engine and self._recent(at, now)]
        self._last[engine] = speed, now
        if not others or speed * SLOW_TIMES >= median(others):
            self._slow_at.pop(engine, None)
            return None
        slow_at, self._slow_at[engine] = self._slow_at.get(engine), now
        if slow_at is None or not self._recent(slow_at, now) or engine in self._restarted:
            return None
        self._restarted.add(engine)
        given, needed = f"{speed:.2f} tokens/s of each response", f"about the {median(others):.2f} of other engines"
        fix = "look at its node: clocks and temperatures of its GPUs, and what else runs there"
        return Problem(f"rollout: {engine} is slow", given, needed, fix)

    def _recent(self, at: float, now: float) -> bool:
        return now - at < RECENT_TIMES * self.seconds

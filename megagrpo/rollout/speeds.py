"""Which engine is slow: its responses grow much slower than those of the other engines, time after time."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

from megagrpo.errors import Problem

SPEED_REPORTS = 12
"""Reports of what requests have so far, from one speed to the next: servers send tokens in parts of many."""
SLOW_TIMES = 8.0
"""A request on a full engine may take a few times longer than on one that is nearly empty. This is more."""
RECENT_TIMES = 3.0
"""A report comes with a sample, and may so be late; and engines rest."""


@dataclass
class Speeds:
    """Tokens a second of a request on each engine, as engines that sample say about every `seconds`."""

    seconds: float
    _last: dict[str, tuple[float, float]] = field(default_factory=dict)
    """The speed of each engine, and when it was told."""
    _slow_at: dict[str, float] = field(default_factory=dict)
    _restarted: set[str] = field(default_factory=set)

    def problem(self, engine: str, speed: float, now: float) -> Problem | None:
        """Why an engine that tells this speed `now` is to be started again; None if it is not. It is if it was slow
        the last time, too, beside engines that have sampled not long ago: once, as its node may be what is slow."""
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

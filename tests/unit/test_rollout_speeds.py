"""Slow engines, and the interval at which an engine reports on its requests."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megagrpo.cluster import engines
from megagrpo.cluster.engine_answers import Speeds
from megagrpo.cluster.engines import SPEED_REPORTS, Answers, EngineActor
from megagrpo.rollout.engine import SoFar
from megagrpo.types import KeptSets, Sample


def slow_at(*told: float | None, others: Sequence[float | None] = (40.0, 30.0)) -> list[int]:
    """The minutes in which engine 0 is to be started again, which tells these speeds, one a minute, beside others."""
    speeds, found = Speeds(seconds=60.0), []
    for minute, speed in enumerate(told):
        now = 60.0 * minute
        for name, other in enumerate(others, start=1):
            assert other is None or speeds.problem(f"engine {name}", other, now) is None
        if speed is not None and speeds.problem("engine 0", speed, now):
            found.append(minute)
    return found


def test_an_engine_is_slow_that_is_much_slower_than_the_others_twice_in_a_row() -> None:
    assert slow_at(4.0, 4.0) == [1]
    assert slow_at(*[5.0] * 10) == [], "as slow as a full engine beside empty ones"
    assert slow_at(*[4.0, 20.0] * 10) == []
    assert slow_at(4.0, None, 4.0) == [2], "it rested between"
    assert slow_at(*[4.0, None, None, None] * 10) == []


def test_an_engine_that_is_slow_again_is_left_alone() -> None:
    assert slow_at(*[4.0] * 10) == [1]


def test_an_engine_is_compared_with_those_that_sample_in_the_same_time() -> None:
    assert slow_at(*[4.0] * 10, others=()) == []
    speeds = Speeds(seconds=60.0)
    assert speeds.problem("engine 1", 200.0, 0.0) is None
    assert all(speeds.problem("engine 0", 4.0, 200.0 + 60.0 * minute) is None for minute in range(10))


class Telling:
    """An engine's actor, whose requests have `counts` tokens by ticket."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.counts = 0.0, {1: 10, 2: 10}
        monkeypatch.setattr(engines.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(engines, "prepare_process", lambda *given: None)
        fake = SimpleNamespace(so_far=self.so_far, rests=lambda: False)
        monkeypatch.setattr(engines, "make_engine", lambda *given: fake)
        self.actor: Any = EngineActor.__ray_metadata__.modified_class()
        self.actor.start(SimpleNamespace(device="cpu", recipe=None, gpus=()))

    def so_far(self) -> SoFar:
        none, ends = np.empty(0), np.cumsum(list(self.counts.values()), dtype=np.int64)
        return SoFar(np.array(list(self.counts), np.int64), ends, none, none, none, KeptSets(none, ends))

    def end(self, ticket: int) -> None:
        none = np.zeros(self.counts.pop(ticket))
        self.actor._answered(ticket, Sample("p", ticket, none, none, none, "stop", ""))

    def told(self, reports: int, tokens: Sequence[int] = ()) -> list[float]:
        """Speeds told in so many reports, before each of which the first requests sample so many tokens."""
        found = []
        for _ in range(reports):
            self.now += 5.0
            self.counts |= {ticket: self.counts[ticket] + new for ticket, new in zip(self.counts, tokens, strict=False)}
            answers: Answers = self.actor.finished(0.0)[0]
            found += [] if answers.speed is None else [answers.speed]
        return found


def test_a_speed_is_that_of_requests_that_went_on(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Telling(monkeypatch)
    assert engine.told(SPEED_REPORTS, [50]) == [10.0], "the second has ended in a batch that goes on"
    assert engine.told(SPEED_REPORTS - 1, [50, 100]) == []
    assert engine.told(1, [50, 100]) == [15.0]
    assert engine.told(SPEED_REPORTS) == [], "none goes on"


def test_requests_that_have_ended_since_count_for_the_time_that_they_took(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Telling(monkeypatch)
    for ticket in range(3, SPEED_REPORTS + 2):
        engine.counts = {ticket: 0}
        assert engine.told(1) == []
        engine.now += 2.5
        engine.counts[ticket] += 50
        engine.end(ticket)
        assert list(engine.actor.finished(5.0)[0].samples) == [ticket]
    assert engine.told(1) == [20.0]

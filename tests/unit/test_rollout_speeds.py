"""Which engines are slow, and how fast an engine says that its requests go on."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megagrpo.cluster import engines
from megagrpo.cluster.engines import Answers, EngineActor
from megagrpo.rollout.engine import SoFar
from megagrpo.rollout.speeds import SPEED_REPORTS, Speeds


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
    assert slow_at(*[4.0, None] * 10) == [], "it rested between"


def test_an_engine_that_is_slow_again_is_left_alone() -> None:
    assert slow_at(*[4.0] * 10) == [1]


def test_an_engine_is_compared_with_those_that_sample_in_the_same_time() -> None:
    assert slow_at(*[4.0] * 10, others=()) == []
    speeds = Speeds(seconds=60.0)
    assert speeds.problem("engine 1", 200.0, 0.0) is None
    assert all(speeds.problem("engine 0", 4.0, 100.0 + 60.0 * minute) is None for minute in range(10))


def test_a_speed_is_that_of_requests_that_were_there_all_the_time_and_went_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of three tickets: one goes on, one has ended in a batch that goes on, one comes later."""
    now, counts = 0.0, {1: 10, 2: 10}

    def so_far() -> SoFar:
        none, ends = np.empty(0), np.cumsum(list(counts.values()))
        return SoFar(np.array(list(counts)), ends, none, none, none)

    monkeypatch.setattr(engines.time, "monotonic", lambda: now)
    monkeypatch.setattr(engines, "_prepare", lambda spec: None)
    fake = SimpleNamespace(so_far=so_far, rests=lambda: False)
    monkeypatch.setattr(engines, "make_engine", lambda *given: fake)
    actor: Any = EngineActor.__ray_metadata__.modified_class()
    actor.start(None)

    def told(reports: int, *, tokens: int) -> list[float]:
        nonlocal now
        found = []
        for _ in range(reports):
            now += 5.0
            counts[1] += tokens
            answers: Answers = actor.finished(0.0)[0]
            found += [] if answers.speed is None else [answers.speed]
        return found

    assert told(SPEED_REPORTS, tokens=50) == [], "nothing was there before"
    counts[3] = 7
    assert told(SPEED_REPORTS, tokens=50) == [10.0]
    counts[3] += 600
    assert told(SPEED_REPORTS, tokens=0) == [10.0]
    assert told(SPEED_REPORTS, tokens=0) == [], "none goes on"

"""The engines' answers: who is asked, who runs which request since when, tokens so far; and who is silent or slow.

It does not know which engines sample. Its callers hold a lock.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import ray

from megagrpo.cluster.engines import SPEED_REPORTS, Answers
from megagrpo.errors import EngineError, Problem
from megagrpo.rollout.engine import SoFar
from megagrpo.timeline import TIMELINE
from megagrpo.types import Request, Sample

ABORT_MARGIN_SECONDS = 60.0
"""After rollout.timeout_seconds an engine aborts its requests, which takes up to 30 s, and sends its samples. If it
counted as dead earlier, a few long samples would cost all the others."""
ANSWER_SECONDS = 5.0
"""Interval at which an engine answers even without new samples; the answer has the tokens so far of its requests."""
SILENT_SECONDS = 300.0
"""Time limit for an engine with requests and verified weights to sample a token."""
READ_SECONDS = 10.0
"""Timeout for reading the tokens so far of an engine's requests from its node."""

SLOW_TIMES = 8.0
"""A request on a full engine may take a few times longer than on one that is nearly empty. This is more."""
RECENT_TIMES = 3.0
"""A speed is outdated after this many times `seconds`: reports come with samples, so they may be late."""


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
        others = [speed for name, (speed, at) in self._last.items() if name != engine and self._recent(at, now)]
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


class EngineAnswers:
    """The engines' next answers, and what their last ones reported. For one thread at a time."""

    def __init__(self, timeout_seconds: float) -> None:
        """Expects nothing yet. timeout_seconds: rollout.timeout_seconds, after which an engine aborts a request."""
        self._longest_seconds = timeout_seconds + ABORT_MARGIN_SECONDS
        self._speeds = Speeds(seconds=SPEED_REPORTS * ANSWER_SECONDS)
        self._asked: dict[ray.ObjectRef[Answers], tuple[str, ray.ObjectRef[SoFar]]] = {}
        """Next answers: the engine, and the tokens so far that come with it."""
        self._heard: dict[str, float] = {}
        """Time of each engine's last answer."""
        self._handed: dict[int, float] = {}
        """Time at which each request was handed to an engine, by ticket."""
        self.so_far: dict[str, ray.ObjectRef[SoFar]] = {}
        """Tokens so far of each engine's requests, last reported; read only if needed. Large ones stay on its node."""
        self.coming: dict[ray.ObjectRef[SoFar], tuple[float, Mapping[int, Request]]] = {}
        """Tokens so far of lost engines' requests, on their way: the wait's deadline, and the requests by ticket."""

    @property
    def expected(self) -> list[ray.ObjectRef[Any]]:
        """Returns the answers, and the tokens so far, that are on their way."""
        return [*self._asked, *self.coming]

    def ask(self, engine: str, actor: Any) -> None:
        """Asks an engine for its next answer, unless it was asked."""
        if all(engine != other for other, _ in self._asked.values()):
            self._heard[engine] = time.monotonic()
            answer, so_far = actor.finished.remote(ANSWER_SECONDS)
            self._asked[answer] = engine, so_far

    def hand(self, actor: Any, requests: Mapping[int, Request]) -> None:
        """Hands requests to an engine, by ticket."""
        actor.begin.remote(requests)
        self._handed |= dict.fromkeys(requests, time.monotonic())

    def pop(self, ref: ray.ObjectRef[Any]) -> tuple[str, ray.ObjectRef[SoFar]] | None:
        """Returns the engine whose next answer this is, and the tokens so far beside it. None if it was forgotten."""
        return self._asked.pop(ref, None)

    def take(self, engine: str, answer: Answers, so_far: ray.ObjectRef[SoFar]) -> tuple[EngineError, bool] | None:
        """Takes an answer. Returns the error of an engine to be restarted, and whether it failed or is only slow."""
        now = time.monotonic()
        for ticket, sample in answer.samples.items():
            if (begun := self._handed.pop(ticket, None)) is not None:
                TIMELINE.record(engine, f"sample {sample.index} of prompt {sample.prompt_id}", begun, now)
        if answer.reported:
            self.so_far[engine] = so_far
        slow = answer.speed is not None and self._speeds.problem(engine, answer.speed, now)
        if answer.silent_seconds > SILENT_SECONDS:
            given, needed = f"no token for {answer.silent_seconds:.0f} s", f"one within {SILENT_SECONDS:g} s"
            return EngineError(Problem(f"rollout: {engine} hangs", given, needed)), True
        return (EngineError(slow), False) if slow else None

    def silence(self, engine: str, tickets: Iterable[int]) -> EngineError | None:
        """Returns the error of an engine that does not answer, or has one of its requests longer than any may take."""
        now = time.monotonic()
        silent = now - self._heard[engine]
        unread = [ref for ref, (other, _) in self._asked.items() if other == engine]  # an answer may be here already
        if silent > ANSWER_SECONDS + ABORT_MARGIN_SECONDS and not (unread and ray.wait(unread, timeout=0)[0]):
            return EngineError(Problem(f"rollout: no answer from {engine}", f"nothing after {silent:.0f} s", "samples"))
        oldest = now - min((self._handed[ticket] for ticket in tickets), default=now)
        if oldest > self._longest_seconds:
            given = f"a request without a sample after {oldest:.0f} s"
            needed = f"one within {self._longest_seconds:g} s (rollout.timeout_seconds, and a minute)"
            return EngineError(Problem(f"rollout: {engine}", given, needed))
        return None

    def forget(self, engine: str, tickets: Iterable[int]) -> None:
        """Forgets a lost engine and its requests, but not their tokens so far."""
        self._asked = {ref: answer for ref, answer in self._asked.items() if answer[0] != engine}
        for ticket in tickets:
            self._handed.pop(ticket, None)

    def expect(self, so_far: ray.ObjectRef[SoFar], lost: Mapping[int, Request]) -> None:
        """Expects the tokens so far of a lost engine's requests, for READ_SECONDS."""
        self.coming[so_far] = time.monotonic() + READ_SECONDS, lost


def read_so_far(parts: Iterable[ray.ObjectRef[SoFar]], requests: Mapping[int, Request]) -> dict[int, Sample]:
    """Reads the tokens so far of these requests, by ticket. Skips a node that is lost, or too slow."""
    samples: dict[int, Sample] = {}
    for ref in parts:
        with suppress(ray.exceptions.RayError, OSError, MemoryError):
            samples |= ray.get(ref, timeout=READ_SECONDS).samples(requests)
    return samples

"""Requests of engines that are lost: what they had sampled comes from a node that may be silent."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray

from megagrpo.cluster import engine_answers
from megagrpo.cluster.engines import Answers
from megagrpo.cluster.rollouts import Rollouts
from megagrpo.cluster.waiting import Wait
from megagrpo.errors import EngineError, Problem
from megagrpo.rollout.engine import SoFar
from megagrpo.types import Prompt, Request, Sample
from tests.loop.small_run import wait_until
from tests.tiny_run import recipe_with

ASYNC = ("cluster.placement=disaggregated", "schedule=async")


def sampled(at: Request) -> Sample:
    three = np.array([1, 2, 3], np.int32)
    return Sample(at.prompt_id, at.index, three, -three.astype(np.float32), 0 * three, "abort", "")


class Engines:
    """Two. Their answers, and what they say of requests that run, are `there` or on their way."""

    def __init__(self, *given: Any) -> None:
        self.names = ("engine 0", "engine 1")
        self.runtime: Any = SimpleNamespace(shares_gpus=False, watch=SimpleNamespace(check=lambda: None))
        self.recipe: Any = None
        self.tokenizer_directory = Path()
        self.by_name = {name: self._actor(name) for name in self.names}
        self.begun: dict[str, dict[int, Request]] = {name: {} for name in self.names}
        self.there: set[str] = set()
        self.speeds: dict[str, float] = {}
        self.starting: Callable[[], list[str]] = list
        self.restarts: dict[str, object] = {}

    def _actor(self, name: str) -> Any:
        def finished(seconds: float) -> tuple[str, str]:
            return f"answer of {name}", f"so far of {name}"

        begin = SimpleNamespace(remote=lambda requests: self.begun[name].update(requests))
        return SimpleNamespace(begin=begin, finished=SimpleNamespace(remote=finished))

    def wait_until_ready(self) -> None: ...

    def restart(self, engine: str) -> None: ...

    def give_up(self) -> None:
        self.by_name.clear()

    def look(self, *, may_start: bool) -> dict[str, None]:
        return dict.fromkeys(self.starting()) if may_start else {}

    def wait(self, refs: Sequence[str], num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        time.sleep(0.001)
        return [ref for ref in refs if ref in self.there], [ref for ref in refs if ref not in self.there]

    def get(self, ref: str, timeout: float) -> SoFar:
        if ref not in self.there:
            time.sleep(timeout)
            raise ray.exceptions.GetTimeoutError
        return SoFar.of({ticket: sampled(at) for ticket, at in self.begun[ref.removeprefix("so far of ")].items()})

    def answered(self, ref: str, name: str) -> Answers:
        self.there.discard(ref)
        return Answers({}, reported=True, silent_seconds=0.0, speed=self.speeds.get(ref.removeprefix("answer of ")))


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Engines:
    found = Engines()
    monkeypatch.setattr(Wait, "answer_of", lambda wait, *given: found.answered(*given))
    monkeypatch.setattr(ray, "wait", found.wait)
    monkeypatch.setattr(ray, "get", found.get)
    return found


def rollouts_with(engines: Engines, *overrides: str) -> Rollouts:
    """Both engines serve."""
    engines.recipe = recipe_with(*overrides)
    rollouts = Rollouts(engines)  # type: ignore[arg-type]
    rollouts.wait_until_ready()
    rollouts.serve(engines.by_name)
    return rollouts


@pytest.mark.parametrize("case", ["comes", "late", "one version"])
def test_what_ran_on_a_lost_engine_goes_on_once_its_tokens_come_and_nothing_else_waits_for_them(
    case: str, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_answers, "READ_SECONDS", 0.0 if case == "late" else 300.0)
    rollouts = rollouts_with(engines, *(() if case == "one version" else ASYNC))
    lost, other = (rollouts.order(Prompt(name, (1, 2), "sums", "2"), 1) for name in "ab")
    rollouts.add([lost])
    engines.there.add("answer of engine 0")
    wait_until(lambda: "engine 0" in rollouts._answers.so_far, "what engine 0 has so far", 60)
    if case == "one version":
        engines.there.add("so far of engine 0")
    rollouts.lose("engine 0", engines.by_name["engine 0"], EngineError(Problem("engine 0", "died")))
    rollouts.add([other])
    if case == "comes":
        assert {at.prompt_id for at in engines.begun["engine 1"].values()} == {"b"}, "the other waits for tokens"
        assert rollouts.pool.running([lost])
        engines.there.add("so far of engine 0")
        assert len(rollouts.so_far()()) == len(lost.requests), "a checkpoint has them, too"
    own = engines.begun["engine 1"]
    wait_until(lambda: len(own) == len(lost.requests) + len(other.requests), "all requests on engine 1", 60)
    begun = [at.begun for at in own.values() if at.prompt_id == "a"]
    assert [one and len(one.tokens) for one in begun] == [3 if case == "comes" else None] * len(lost.requests)
    rollouts._stop_collecting()


def test_requests_of_a_slow_engine_go_on_elsewhere(engines: Engines) -> None:
    rollouts = rollouts_with(engines, *ASYNC)
    asked = rollouts.order(Prompt("a", (1, 2), "sums", "2"), 1)
    rollouts.add([asked])
    engines.speeds = {"engine 0": 4.0, "engine 1": 40.0}
    engines.there.add("so far of engine 0")
    for _ in range(2):
        assert not rollouts.lost
        for name in ("engine 1", "engine 0"):
            engines.there.add(f"answer of {name}")
            wait_until(lambda name=name: f"answer of {name}" not in engines.there, f"that {name} is heard", 60)
    own = engines.begun["engine 1"]
    wait_until(lambda: len(own) == len(asked.requests), "all requests on engine 1", 60)
    assert list(rollouts.lost) == ["engine 0"]
    assert all(at.begun is not None for at in own.values())
    rollouts._stop_collecting()


def test_the_longest_wait_for_an_engine_begins_when_the_run_waits_for_one(engines: Engines) -> None:
    rollouts = rollouts_with(engines, "rollout.no_engine_timeout_seconds=1")
    for name, actor in engines.by_name.items():
        rollouts.lose(name, actor, EngineError(Problem(name, "died")))
    time.sleep(1.5)  # ranks train meanwhile
    to_come = ["engine 0"]
    engines.starting = lambda: [to_come.pop()] if rollouts._waiting_for_engines and to_come else []
    assert list(rollouts.wait_for_engines()) == ["engine 0"]
    rollouts.lose("engine 0", engines.by_name["engine 0"], EngineError(Problem("engine 0", "died")))
    with pytest.raises(EngineError, match="no engine is left"):
        rollouts.wait_for_engines()
    rollouts._stop_collecting()


def test_no_engine_is_there_once_they_are_given_up(engines: Engines) -> None:
    rollouts = rollouts_with(engines)
    rollouts.lose("engine 0", engines.by_name["engine 0"], EngineError(Problem("engine 0", "died")))
    rollouts._started.add("engine 0")  # it waits for weights
    rollouts.give_up()
    assert rollouts._up() == {}

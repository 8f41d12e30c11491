"""Turns of agents in the engines' pool: bound to one engine, held with the tokens that they have, and dropped."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.demo.model import make_tokenizer
from megagrpo.cluster.agent_turns import AgentTurns
from megagrpo.errors import MegagrpoError
from megagrpo.rollout.pool import Order, Pool
from megagrpo.rollout.requests import after_begun, nothing_sampled, training_requests
from megagrpo.types import Prompt, Request, Sample
from tests.loop import digits_agent
from tests.loop.small_run import wait_until
from tests.tiny_run import recipe_with

SECONDS = 120.0
TOKENIZER = make_tokenizer()


class Engines:
    """Two. What they have is answered when a test says so."""

    def __init__(self, directory: Path, *more: str) -> None:
        overrides = (f"agent.function={digits_agent.__file__}:rollout", "agent.tokens_max=300", "agent.processes=2")
        self.recipe = recipe_with(*overrides, *more, f"track.directory={directory}")
        TOKENIZER.save_pretrained(directory / "tokenizer")
        self.pool, self.changed = Pool(None, continues=True), threading.Condition()
        self.failures: list[MegagrpoError] = []
        self.running: dict[str, dict[int, Request]] = {"a": {}, "b": {}}
        self.engines_of: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
        for engine in self.running:
            self.pool.join(engine)
        self.fail, self.say = self.failures.append, print
        rollouts: Any = self
        self.turns = AgentTurns(self.recipe, directory / "tokenizer", rollouts)

    def order(self, name: str) -> Order:
        prompt = Prompt(name, (1,), "sums", "2", messages=({"role": "user", "content": f"{name}="},))
        return Order(training_requests(self.recipe, prompt, 1), prompt=prompt)

    def add(self, *orders: Order) -> None:
        with self.changed:
            self.turns.add(orders, first=False)
            self.hand_out()

    def hand_out(self) -> None:
        for engine, requests in self.pool.hand_out().items():
            self.running[engine] |= requests
            for request in requests.values():
                self.engines_of[request.prompt_id, request.index].add(engine)

    def take_back(self, orders: Iterable[Order]) -> None:
        """They have sampled a token of each."""
        for engine, tickets in self.pool.withdraw(orders).items():
            for ticket in tickets:
                request = self.running[engine].pop(ticket)
                self.take(engine, ticket, after_begun(request, sampled(request, "1", "abort")))

    def take(self, engine: str, ticket: int, sample: Sample) -> None:
        for order in self.pool.answered(engine, {ticket: sample}):
            order.on_complete(order)

    def work(self) -> None:
        """Ends all that runs."""
        with self.changed:
            for engine, requests in self.running.items():
                for ticket in list(requests):
                    request = requests.pop(ticket)
                    self.take(engine, ticket, after_begun(request, sampled(request, "23", "stop")))
            self.hand_out()

    def wait_for(self, *orders: Order) -> None:
        def complete() -> bool:
            self.work()
            return bool(self.failures) or all(order.complete for order in orders)

        wait_until(complete, "all samples", SECONDS)
        assert not self.failures

    def turns_that_run(self) -> int:
        with self.changed:
            return sum(map(len, self.running.values()))


def sampled(request: Request, text: str, finish: str) -> Sample:
    tokens = np.array([*TOKENIZER.encode(text), *([TOKENIZER.eos_token_id] if finish == "stop" else [])], np.int32)
    zeros = np.zeros(len(tokens), np.float32)
    return Sample(request.prompt_id, request.index, tokens, zeros, zeros.astype(np.int32), finish, text)  # type: ignore[arg-type]


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Engines]:
    found = Engines(tmp_path)
    yield found
    found.turns.close()


def test_a_rollout_stays_on_one_engine_and_both_have_some(engines: Engines) -> None:
    orders = [engines.order(name) for name in "pqrs"]
    engines.add(*orders)
    engines.wait_for(*orders)
    assert all(len(names) == 1 for names in engines.engines_of.values())
    assert {name for names in engines.engines_of.values() for name in names} == {"a", "b"}
    for order in orders:
        for sample in order.finished():
            assert sample.agent is not None
            assert (sample.finish, sample.agent.error, len(sample.agent.turns)) == ("stop", "", 2)
            assert sample.agent.reward == {"score": 1.0, "length": 2.0}


def test_turns_that_are_held_go_on_after_their_tokens(engines: Engines) -> None:
    held, other = engines.order("p"), engines.order("q")
    engines.add(held)
    wait_until(lambda: engines.turns_that_run() == 4, "the first turns", SECONDS)
    with engines.changed:
        turns = engines.turns.hold([held])
        engines.take_back(turns)
        assert not engines.pool.running(turns)
    engines.add(other)
    engines.wait_for(other)
    assert not held.samples
    engines.add(held)
    engines.wait_for(held)
    assert held.continued == 4
    for sample in held.finished():
        assert sample.agent is not None
        assert TOKENIZER.decode(sample.tokens[: sample.agent.turns[0].tokens], skip_special_tokens=True) == "123"


def test_an_order_that_is_complete_by_then_is_not_held(engines: Engines) -> None:
    done, held = engines.order("p"), engines.order("q")
    engines.add(done, held)
    engines.wait_for(done)
    with engines.changed:
        engines.take_back(engines.turns.hold([done, held]))
        assert done not in engines.turns._held
    engines.add(held)
    engines.wait_for(held)


def test_the_clock_of_a_turn_stands_still_while_its_engine_is_held_and_then_its_rollout_is_late(tmp_path: Path) -> None:
    engines = Engines(tmp_path, "agent.turn_timeout_seconds=3")
    try:
        first = engines.order("o")  # starts the agents' processes, whose turns then begin together
        engines.add(first)
        engines.wait_for(first)
        orders = [engines.order(name) for name in "pq"]
        with engines.changed:
            engines.pool.held.add("b")
        engines.add(*orders)
        wait_until(lambda: engines.turns_that_run() == 8, "the first turns, on the other engine", SECONDS)
        with engines.changed:
            engines.pool.held |= {"a"}
            engines.pool.held.discard("b")
        other = engines.order("r")
        engines.add(other)
        wait_until(lambda: other.complete, "turns that are late", SECONDS)
        assert not any(order.samples for order in orders), "their engine samples nothing"
        with engines.changed:
            engines.pool.held.discard("a")
        wait_until(lambda: all(order.complete for order in orders), "the others", SECONDS)
        for sample in (sample for order in (*orders, other) for sample in order.finished()):
            assert sample.agent is not None
            assert sample.agent.counts["late"] == 1.0
            assert (sample.finish, sample.agent.error) == ("abort", "a turn took longer than 3 s")
        assert engines.turns_that_run() == 0, "engines get them back"
    finally:
        engines.turns.close()


def test_rollouts_that_are_dropped_leave_engines_and_pool(engines: Engines) -> None:
    dropped, other = engines.order("p"), engines.order("q")
    engines.add(dropped)
    wait_until(lambda: engines.turns_that_run() == 4, "the first turns", SECONDS)
    with engines.changed:
        engines.take_back(engines.turns.drop([dropped]))
    assert engines.turns_that_run() == 0
    engines.add(other)
    engines.wait_for(other)
    assert not dropped.samples


def test_a_turn_that_the_engine_gives_up_masks_its_rollout(engines: Engines) -> None:
    order = engines.order("p")
    engines.add(order)
    wait_until(lambda: engines.turns_that_run() == 4, "the first turns", SECONDS)
    with engines.changed:
        for engine, requests in engines.running.items():
            for ticket in list(requests):
                engines.take(engine, ticket, nothing_sampled(requests.pop(ticket)))
    engines.wait_for(order)
    for sample in order.finished():
        assert sample.agent is not None
        assert sample.finish == "abort"
        assert sample.agent.error
        assert "failed" not in sample.agent.counts

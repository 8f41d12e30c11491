"""Requests to engines: none is lost or sampled twice, whatever engines do; loads are even, and orders stay together."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from megagrpo.errors import EngineError
from megagrpo.rollout.pool import LOSSES_MAX, Order, Pool
from megagrpo.types import Request, Sample, SamplingParams

SAMPLING = SamplingParams(max_tokens=100)


def order(name: str, count: int, bound: str = "") -> Order:
    return Order([Request(name, index, (1, 2), index, SAMPLING) for index in range(count)], bound=bound)


def sample(request: Request, tokens: int, finish: str = "stop") -> Sample:
    """Makes an engine's sample: the tokens so far, and `tokens` more."""
    begun = 0 if request.begun is None else len(request.begun.tokens)
    none = np.zeros(begun + tokens, np.int32)
    return Sample(request.prompt_id, request.index, none, none.astype(np.float32), none, finish, "")  # type: ignore[arg-type]


class Pools(RuleBasedStateMachine):
    """Engines join, answer, give back and are lost; orders come, are withdrawn and come again."""

    @initialize(slots=st.sampled_from([None, 1, 3, 8]))
    def start(self, slots: int | None) -> None:
        self.pool = Pool(slots)
        self.on_engine: dict[str, dict[int, Request]] = {}
        self.orders: list[Order] = []
        self.completed: list[Order] = []
        self.away: list[Order] = []
        self.known: dict[tuple[str, int], int] = {}
        """Tokens that were told of each request."""
        self.engine_of: dict[str, str] = {}
        """Engines that have had what is bound to them, since they joined."""

    def hand_out(self) -> None:
        for engine, requests in self.pool.hand_out().items():
            self.on_engine[engine] |= requests
            for request in requests.values():
                if bound := self.orders[int(request.prompt_id)].bound:
                    assert self.engine_of.setdefault(bound, engine) == engine, "it went elsewhere"
                begun = 0 if request.begun is None else len(request.begun.tokens)
                assert begun == self.known.get((request.prompt_id, request.index), 0), "tokens were lost"

    def tell(self, ticket: int, request: Request, tokens: int) -> dict[int, Sample]:
        """Reports so many more tokens of a request that continues."""
        so_far = sample(request, tokens, "abort")
        self.known[request.prompt_id, request.index] = len(so_far.tokens)
        return {ticket: so_far}

    @rule(count=st.integers(1, 6), first=st.booleans(), bound=st.sampled_from(["", "", "one", "two"]))
    def add(self, count: int, first: bool, bound: str) -> None:
        self.orders.append(order(str(len(self.orders)), count, bound))
        self.pool.add([self.orders[-1]], first=first)
        self.hand_out()

    @rule(engine=st.sampled_from("abc"))
    def join(self, engine: str) -> None:
        self.pool.join(engine)
        self.on_engine.setdefault(engine, {})
        self.hand_out()

    @rule(engine=st.sampled_from("abc"), data=st.data())
    def leave(self, engine: str, data: st.DataObject) -> None:
        so_far: dict[int, Sample] = {}
        self.engine_of = {bound: other for bound, other in self.engine_of.items() if other != engine}
        for number, request in self.on_engine.pop(engine, {}).items():
            if data.draw(st.booleans()):
                so_far |= self.tell(number, request, data.draw(st.integers(0, 3)))
        for ticket in self.pool.engines.get(engine, {}).values():
            ticket.losses = 0  # how often is another test's matter
        lost = self.pool.leave(engine)
        assert self.pool.running(ticket.order for ticket in self.pool.orphaned.values()) == bool(lost)
        self.hand_out()
        self.pool.put_back(lost, so_far)
        self.hand_out()

    @precondition(lambda self: any(self.on_engine.values()))
    @rule(data=st.data(), tokens=st.integers(0, 3))
    def answer(self, data: st.DataObject, tokens: int) -> None:
        engine = data.draw(st.sampled_from(sorted(name for name, running in self.on_engine.items() if running)))
        ticket = data.draw(st.sampled_from(sorted(self.on_engine[engine])))
        request = self.on_engine[engine].pop(ticket)
        self.completed += self.pool.answered(engine, {ticket: sample(request, tokens)})
        self.hand_out()

    @rule()
    def withdraw(self) -> None:
        self.away = [each for each in self.orders if not each.complete]
        for engine, tickets in self.pool.withdraw(self.away).items():
            answers: dict[int, Sample] = {}
            for ticket in tickets:
                answers |= self.tell(ticket, self.on_engine[engine].pop(ticket), 2)
            self.completed += self.pool.answered(engine, answers)
        assert not self.pool.running(self.away)
        assert not self.pool.hand_out()

    @rule()
    def add_again(self) -> None:
        self.pool.add(self.away)
        self.away = []
        self.hand_out()

    @invariant()
    def engines_have_what_the_pool_says_and_no_more_than_their_slots(self) -> None:
        if not hasattr(self, "pool"):
            return
        assert {name: set(running) for name, running in self.pool.engines.items()} == {
            name: set(running) for name, running in self.on_engine.items()
        }
        if self.pool.slots:
            assert all(len(running) <= self.pool.slots for running in self.on_engine.values())
            running = {(at.prompt_id, at.index) for on in self.on_engine.values() for at in on.values()}
            wait = {
                self.engine_of.get(each.bound, "")
                for each in self.orders
                for index in each.missing()
                if each not in self.away and (each.requests[index].prompt_id, index) not in running
            }
            free = {name for name, on in self.on_engine.items() if len(on) < self.pool.slots}
            assert not free & wait, "a slot is free while a request waits that is bound to its engine"
            assert not free or "" not in wait, "a slot is free while a request waits that may go anywhere"

    @invariant()
    def no_request_runs_twice_and_orders_complete_once(self) -> None:
        if not hasattr(self, "pool"):
            return
        running = [(each.prompt_id, each.index) for on in self.on_engine.values() for each in on.values()]
        assert len(set(running)) == len(running)
        assert len(set(map(id, self.completed))) == len(self.completed)
        assert set(map(id, self.completed)) == {id(each) for each in self.orders if each.complete}
        for each in self.orders:
            for index, got in each.samples.items():
                begun = each.requests[index].begun
                assert begun is None or len(got.tokens) >= len(begun.tokens), "tokens were lost"


TestPools = Pools.TestCase


def test_a_request_that_ends_one_engine_after_another_ends_the_run() -> None:
    pool = Pool(8)
    for engine in "abcde":
        pool.join(engine)
    pool.add([order("p", 1)])
    for _ in range(2):  # merely slow
        (engine,) = pool.hand_out()
        pool.put_back(pool.leave(engine, failed=False), {})
    for _ in range(LOSSES_MAX - 1):
        (engine,) = pool.hand_out()
        pool.put_back(pool.leave(engine), {})
    (engine,) = pool.hand_out()
    with pytest.raises(EngineError, match="sample 0 of prompt p"):
        pool.leave(engine)


def test_a_request_that_goes_on_after_fewer_tokens_than_before_did_not_go_on_behind_them() -> None:
    one = order("p", 1)
    for tokens in (5, 9, 8):
        one.resume_after(0, sample(replace(one.requests[0], begun=None), tokens, "abort"))
    assert one.joints == {0: [5, 8]}


@given(st.lists(st.integers(1, 4), max_size=40), st.integers(1, 5))
def test_without_a_limit_orders_stay_together_and_loads_are_even(counts: list[int], engines: int) -> None:
    pool = Pool(None)
    for engine in range(engines):
        pool.join(f"engine {engine}")
    pool.add(order(str(i), count) for i, count in enumerate(counts))
    handed = pool.hand_out()
    assert sorted((r.prompt_id, r.index) for to in handed.values() for r in to.values()) == sorted(
        (str(i), index) for i, count in enumerate(counts) for index in range(count)
    )
    for i in range(len(counts)):
        assert sum(any(request.prompt_id == str(i) for request in to.values()) for to in handed.values()) == 1
    loads = [len(handed.get(f"engine {engine}", {})) for engine in range(engines)]
    assert max(loads) - min(loads) <= max(counts, default=0)


def test_what_is_bound_goes_to_one_engine_and_holds_back_nothing_else_and_goes_elsewhere_once_that_is_lost() -> None:
    pool = Pool(2)
    for engine in "ab":
        pool.join(engine)
    pool.add([order(f"{name} {turn}", 1, name) for name in "xy" for turn in range(3)])
    handed = pool.hand_out()
    assert [sorted(at.prompt_id[0] for at in handed[engine].values()) for engine in "ab"] == [["x", "x"], ["y", "y"]]
    first = next(iter(handed["b"]))
    pool.answered("b", {first: sample(handed["b"][first], 1)})
    assert [at.prompt_id for at in pool.hand_out()["b"].values()] == ["y 2"]
    pool.put_back(pool.leave("a"), {})
    assert pool.hand_out() == {}, "the other engine is full"
    for ticket in list(pool.engines["b"]):
        pool.answered("b", {ticket: sample(pool.engines["b"][ticket].request, 1)})
    assert {at.prompt_id[0] for at in pool.hand_out()["b"].values()} == {"x"}
    pool.release("x")
    pool.join("a")
    pool.add([order("x 3", 1, "x")])
    assert list(pool.hand_out()) == ["a"]


def test_a_group_is_sampled_by_one_engine_that_has_room() -> None:
    pool = Pool(8)
    for engine in "ab":
        pool.join(engine)
    pool.add([order("p", 6), order("q", 6)])
    handed = pool.hand_out()
    assert sorted({request.prompt_id for request in to.values()} == {"p"} for to in handed.values()) == [False, True]


def test_what_is_wanted_first_goes_to_engines_before_what_waits() -> None:
    pool = Pool(2)
    pool.join("a")
    pool.add([order("background", 4)])
    pool.hand_out()
    pool.add([order("evaluation", 1), order("evaluation too", 1)], first=True)
    for number in (0, 1):
        pool.answered("a", {number: sample(pool.engines["a"][number].request, 1)})
    assert [request.prompt_id for request in pool.hand_out()["a"].values()] == ["evaluation", "evaluation too"]


def test_engines_that_are_held_get_nothing_and_the_slots_that_drain_there_are_idle() -> None:
    pool = Pool(2)
    for engine in ("a", "b"):
        pool.join(engine)
    pool.add([order("runs", 4), order("waits", 4)])
    running = pool.hand_out()
    pool.held.update(["a", "b"])
    assert (pool.idle_share(held_sample=True), pool.idle_share(held_sample=False)) == (0.0, 1.0)
    ticket, request = next(iter(running["a"].items()))
    pool.answered("a", {ticket: sample(request, 3)})
    assert not pool.hand_out()
    assert pool.idle_share(held_sample=True) == 0.25
    pool.join("b")
    assert pool.idle_share(held_sample=False) == 0.5
    pool.join("a")
    assert list(pool.hand_out()) == ["a"]


def test_a_request_that_an_engine_gives_up_on_goes_on_first_as_long_as_it_gets_tokens() -> None:
    pool, asked, other = Pool(1, continues=True), order("a", 1), order("b", 1)
    pool.join("engine")
    pool.add([asked, other])
    for tokens in (5, 7):
        ((ticket, request),) = pool.hand_out()["engine"].items()
        assert request.prompt_id == "a"
        assert pool.answered("engine", {ticket: sample(request, tokens, "abort")}) == []
    ((ticket, request),) = pool.hand_out()["engine"].items()
    assert len(request.begun.tokens) == 12  # type: ignore[union-attr]
    assert pool.answered("engine", {ticket: sample(request, 0, "abort")}) == [asked], "it hangs"

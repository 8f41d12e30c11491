"""Orders whose rollouts come from agents. Each turn of a rollout is an order of its own in the pool of the engines."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from megagrpo.agents.chat import chat_of
from megagrpo.agents.host import TICK_SECONDS, AgentHost
from megagrpo.agents.processes import program_of
from megagrpo.recipe.defaults import run_directory
from megagrpo.recipe.schema import Recipe
from megagrpo.rollout.pool import Order
from megagrpo.types import Request, Sample

if TYPE_CHECKING:
    from megagrpo.cluster.rollouts import Rollouts

GATHER_SECONDS = 0.003
"""Turns that come within this time go to engines together: the embedded engine samples batch after batch."""


class AgentTurns:
    """A bridge that hands rollouts to the host of the agents, and their turns to the pool. Callers of its methods hold
    `changed`."""

    def __init__(self, recipe: Recipe, tokenizer_directory: Path, engines: Rollouts) -> None:
        """Creates the agents' host. Raises AgentError if the agent's file cannot be read."""
        if (agent := recipe.agent) is None:
            raise ValueError("no agent")
        self._turn_seconds = agent.turn_timeout_seconds or math.inf
        self._engines, self._pool, self._changed = engines, engines.pool, engines.changed
        self._turns: dict[Order, set[Order]] = {}
        """Turns that wait or run, by the order of their rollouts."""
        self._held: set[Order] = set()
        self._new: list[tuple[Order, Order]] = []
        self.host = AgentHost(
            agent,
            program_of(agent),
            recipe.sequence_tokens_max,
            run_directory(recipe).absolute() / "logs",
            lambda: chat_of(recipe, agent, tokenizer_directory),
            self._ask,
            finished=self._finished,
            failed=engines.fail,
            sampling=self._sampling,
            say=lambda line: engines.say(line),
            prepare_seconds=recipe.cluster.start_timeout_seconds,
        )

    def add(self, orders: Sequence[Order], *, first: bool) -> None:
        """Starts the rollouts of these orders; resumes those that were held."""
        held = self._held.intersection(orders)
        self._held -= held
        self._pool.add(turn for order in held for turn in self._turns.get(order, ()))
        self.host.begin(orders, first=first)

    def hold(self, orders: Collection[Order]) -> list[Order]:
        """Makes agents wait before their next turns. Returns the turns to be given back."""
        self._held |= {order for order in orders if not order.complete}
        self.host.hold(orders)
        return [turn for order in orders for turn in self._turns.get(order, ())]

    def drop(self, orders: Collection[Order]) -> list[Order]:
        """Cancels the rollouts of these orders. Returns the turns to be given back."""
        self._held -= set(orders)
        self.host.cancel(orders)
        return [turn for order in orders for turn in self._turns.pop(order, ())]

    def close(self) -> None:
        """Closes the host. The caller must not hold `changed`."""
        self.host.close()

    # --- in the host's thread -----------------------------------------------------------------------------------------

    async def _ask(self, request: Request, key: str) -> Sample:
        """Generates one turn of the rollout with this key."""
        loop, order = asyncio.get_running_loop(), self.host.order_of(key)
        answer: asyncio.Future[Sample] = loop.create_future()

        def settle(sample: Sample) -> None:
            if not answer.done():
                answer.set_result(sample)

        def complete(turn: Order) -> None:
            with suppress(RuntimeError):  # the run ends: the loop is closed
                loop.call_soon_threadsafe(settle, turn.samples[0])

        turn = Order([request], complete, bound=key)
        if not self._new:
            loop.call_later(GATHER_SECONDS, self._begin_turns)
        self._new.append((order, turn))
        try:
            return await self._in_time(answer, order, key)
        finally:
            if (order, turn) in self._new:
                self._new.remove((order, turn))
            else:
                with self._changed:
                    turns = self._turns.get(order, set())
                    turns.discard(turn)
                    if not turns:
                        self._turns.pop(order, None)
                    if not turn.complete:  # the agent has gone away
                        self._engines.take_back([turn])
                    order.continued += turn.continued

    async def _in_time(self, answer: asyncio.Future[Sample], order: Order, key: str) -> Sample:
        """Waits for the answer. A turn that exceeds its timeout ends together with its rollout. The clock stops while
        the rollout is held or its engine samples nothing."""
        left = self._turn_seconds
        while not answer.done():
            before = time.monotonic()
            await asyncio.wait({answer}, timeout=None if left == math.inf else TICK_SECONDS)
            left -= time.monotonic() - before if order not in self._held and self._sampling([key]) else 0.0
            if left <= 0 and not answer.done():
                self.host.late(key, f"a turn took longer than {self._turn_seconds:g} s")
                left = math.inf
        return answer.result()

    def _begin_turns(self) -> None:
        new, self._new = self._new, []
        with self._changed:
            for order, turn in new:
                self._turns.setdefault(order, set()).add(turn)
            self._pool.add(turn for order, turn in new if order not in self._held)
            self._engines.hand_out()

    def _finished(self, order: Order, index: int, key: str, sample: Sample | None) -> None:
        with self._changed:
            self._pool.release(key)
            if sample is None:
                return
            order.samples[index] = sample
            if complete := order.complete:
                self._held.discard(order)
        if complete:
            order.on_complete(order)
        with self._changed:
            self._changed.notify_all()

    def _sampling(self, keys: Iterable[str]) -> set[str]:
        with self._changed:
            return {key for key in keys if self._pool.samples(key)}

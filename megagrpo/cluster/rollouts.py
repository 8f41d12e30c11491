"""The engines as the trainer sees them: prompts in, groups out.

A thread collects samples and hands requests to engines with free slots. If an engine fails, its requests move to
others, and it restarts beside them. The next weight sync after that gives it weights, and it samples again. If no
engine is left, the thread that waits for samples gives weights to the first that has restarted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import ray

from megagrpo.cluster.engine_answers import EngineAnswers, read_so_far
from megagrpo.cluster.engines import CLOSE_SECONDS, EngineActors, ask_engine
from megagrpo.cluster.waiting import SLICE_SECONDS, Wait
from megagrpo.errors import REPORT, EngineError, MegagrpoError, Problem
from megagrpo.progress import progress
from megagrpo.rollout.engine import MemoryTag
from megagrpo.rollout.pool import Order, Pool
from megagrpo.rollout.requests import evaluation_requests, training_order
from megagrpo.types import Group, Prompt, Sample

if TYPE_CHECKING:
    from megagrpo.cluster.agent_turns import AgentTurns

RETRY_SECONDS = 10.0
"""Pause before an engine that could not start is retried, while the run waits for one."""


class Rollouts:
    """Started engines, which are ready after `wait_until_ready`. For engines that keep their weights, `serve_all` takes
    the place of weight syncs."""

    def __init__(self, engines: EngineActors) -> None:
        self.engines, self._runtime, self._recipe = engines, engines.runtime, engines.recipe
        recipe = self._recipe
        self.bring_back: Callable[[], None] | None = None
        """Gives weights to an engine that has restarted, when none is left. Set by the weight sync or an evaluation."""
        self.say: Callable[[str], None] = lambda line: None
        """Prints a line for the user. Set together with `bring_back`."""
        self.changed = threading.Condition()
        """Guards all fields below. Notified when an order is complete, or an engine is lost or has restarted."""
        streams, at_once = recipe.rollout.kind.streams, recipe.rollout.requests_at_once
        self.pool = Pool(at_once if streams else None, continues=not recipe.one_version)
        self._answers = EngineAnswers(recipe.rollout.timeout_seconds)
        self.lost: dict[str, MegagrpoError] = {}
        """Engines that do not sample because they failed, and why."""
        self._started: set[str] = set()
        """Engines that wait for weights."""
        self._retry_at: dict[str, float] = {}
        """Time at which an engine that could not start is retried."""
        self._seconds_without_engine = 0.0
        """Seconds that `wait_for_engines` has waited since an engine last sampled."""
        self._waiting_for_engines = False
        """True inside `wait_for_engines`."""
        self._idle_seconds = 0.0
        """Sum of seconds times the share of idle slots, since `idle` was last called."""
        self._seconds = 0.0
        """All seconds since then."""
        self._counted_at = 0.0
        """Time up to which both are counted; 0 before an engine has served."""
        self._failure: MegagrpoError | OSError | None = None
        self._closed = False
        self._agents: AgentTurns | None = None
        if recipe.agent:
            from megagrpo.cluster.agent_turns import AgentTurns  # a gateway costs a start that needs none seconds

            self._agents = AgentTurns(recipe, engines.tokenizer_directory, self)
        self._restarts_counted = 0
        self._collecting = threading.Thread(target=self._collect, name="collects samples", daemon=True)
        self._collecting.start()

    def wait_until_ready(self) -> None:
        """Raises EngineError naming the engines that did not start in `cluster.start_timeout_seconds`."""
        self.engines.wait_until_ready()
        with self.changed:
            self._started = set(self.engines.by_name)

    @property
    def serving(self) -> int:
        """Returns the number of engines that sample."""
        return len(self.pool.engines)

    def wait_for_engines(self) -> dict[str, Any]:
        """Waits until an engine can get weights; returns the actors of all such engines, by name. Meanwhile it retries
        engines that could not start. On GPUs that training shares, lost engines start only during this call.

        Raises EngineError if there is none for rollout.no_engine_timeout_seconds, and what the run's watch raises.
        """
        with self.changed:
            self._waiting_for_engines = True
        try:
            while True:
                began = time.monotonic()
                with self.changed:
                    self._require_collecting()
                    for engine in self.lost:
                        waits = engine in self._started or engine in self.engines.restarts
                        if not waits and time.monotonic() > self._retry_at.get(engine, 0.0):
                            self.say(f"warning: restarting {engine}: it could not start before")
                            self.engines.restart(engine)
                    up = self._up()
                    if up and not (self._runtime.shares_gpus and self.engines.restarts):
                        return up
                    self._require_patience()
                    self.changed.wait(SLICE_SECONDS)
                self._runtime.watch.check()
                if self.lost and not self.serving:
                    self._seconds_without_engine += time.monotonic() - began
        finally:
            self._waiting_for_engines = False

    def serve(self, engines: Mapping[str, Any]) -> None:
        """Hands requests to these actors' engines, which have the newest weights, unless they were lost meanwhile."""
        with self.changed:
            self._count_idle()
            for engine, actor in engines.items():
                if self._up().get(engine) is not actor:
                    continue
                self._started.discard(engine)
                self.pool.join(engine)
                self._seconds_without_engine = 0.0
                if self.lost.pop(engine, None):
                    self.say(f"{engine} samples again, with verified weights ({self._left()})")
                self._answers.ask(engine, actor)
            self.hand_out()

    def serve_all(self) -> None:
        """Lets all started engines sample from the weights that they have. Waits and raises as `wait_for_engines`."""
        self.serve(self.wait_for_engines())

    def lose(self, engine: str, actor: Any, error: MegagrpoError, *, failed: bool = True) -> None:
        """Restarts this actor's engine, which has failed or is slow. It gets no requests meanwhile."""
        with self.changed:
            if self._up().get(engine) is not actor:
                return
            self.lost[engine] = error
            self._started.discard(engine)
            self._answers.forget(engine, self.pool.engines.get(engine, ()))
            try:
                requests = self.pool.leave(engine, failed=failed)
            except EngineError as too_often:
                self._failure = too_often
            else:
                so_far = self._answers.so_far.pop(engine, None)
                if so_far is None or self._recipe.one_version:
                    self.pool.put_back(requests, {})
                else:
                    self._answers.expect(so_far, requests)
            self.engines.restart(engine)
            first = error.problems[0]
            self.say(f"warning: restarting {engine}: {first.where}: {first.given} ({self._left()})")
            self.hand_out()
            self.changed.notify_all()

    def give_up(self) -> None:
        """Kills all engines, even busy ones, without the time that `close` gives them. None can be used afterwards."""
        self._stop_collecting()
        self.engines.give_up()

    def generate(self, prompts: Sequence[Prompt], step: int) -> list[Group]:
        """Generates the training orders of a step. Returns groups in the order of the prompts."""
        return self._groups([self.order(prompt, step) for prompt in prompts])

    def generate_for_evaluation(self, prompts: Mapping[str, Sequence[Prompt]]) -> dict[str, list[Group]]:
        """Generates responses to the prompts of evaluation sets. Returns groups by the sets' names. The seeds are the
        same at every evaluation, so that only the weights differ."""
        sets = self._recipe.eval.of_sets()
        requests = [evaluation_requests(self._recipe, sets[name], of_set) for name, of_set in prompts.items()]
        pairs = zip(chain(*prompts.values()), chain(*requests), strict=True)
        groups = iter(self._groups([Order(of_prompt, prompt=prompt) for prompt, of_prompt in pairs]))
        return {name: list(islice(groups, len(of_set))) for name, of_set in prompts.items()}

    def release_memory(self, tags: Sequence[MemoryTag] = ("weights", "kv_cache")) -> bool:
        """Frees the engines' memory for training on the same devices, once dropped requests have ended there. Returns
        whether engines can free it. Raises as `wait` does."""
        rollout = self._recipe.rollout
        if self._recipe.cluster.placement != "colocated" or not rollout.kind.releases_memory(rollout):
            return False
        with self.changed:
            busy = any(self.pool.engines.values())
        if busy:
            self.wait(lambda: not any(self.pool.engines.values()))
        with self.changed:
            up = self._up()
        releasing = {name: ask_engine(actor, "release_memory", tags) for name, actor in up.items()}
        seconds = self._recipe.cluster.start_timeout_seconds
        wait = Wait("release_memory", seconds, EngineError, self._runtime.watch)
        _, failed = wait.settle(releasing, CLOSE_SECONDS)
        for name, error in failed.items():
            self.lose(name, up[name], error)
        return bool(up)

    def order(self, prompt: Prompt, step: int, on_complete: Callable[[Order], None] = lambda order: None) -> Order:
        """Returns the training_order of a prompt. `add` starts it."""
        return training_order(self._recipe, prompt, step, on_complete)

    def add(self, orders: Sequence[Order], *, first: bool = False) -> None:
        """Queues orders, or resumes withdrawn ones. first: before all that wait."""
        with self.changed:
            (self._agents or self.pool).add(orders, first=first)
            self.hand_out()

    def so_far(self) -> Callable[[], dict[tuple[Order, int], Sample]]:
        """Returns a function that reads the tokens so far of each unfinished request, by its order and index. It reads
        them from the engines' nodes, at any later time, in any thread."""
        with self.changed:
            everywhere = (*self.pool.engines.values(), self.pool.orphaned)
            tickets = {number: ticket for running in everywhere for number, ticket in running.items()}
            requests = {number: ticket.request for number, ticket in tickets.items()}
            parts = [*self._answers.so_far.values(), *self._answers.coming]

        def read() -> dict[tuple[Order, int], Sample]:
            samples = read_so_far(parts, requests)
            return {(tickets[number].order, tickets[number].index): sample for number, sample in samples.items()}

        return read

    def drop(self, orders: Sequence[Order]) -> None:
        """Cancels orders for good; their samples are lost."""
        with self.changed:
            self.take_back(self._agents.drop(orders) if self._agents else orders)

    def withdraw(self, orders: Sequence[Order]) -> None:
        """Takes orders back, with the tokens sampled so far, until they are added again; agents wait meanwhile. Raises
        as `wait` does."""
        with self.changed:
            requests = self._agents.hold(orders) if self._agents else orders
            self.take_back(requests)
        self.wait(lambda: not self.pool.running(requests))

    def wait(self, until: Callable[[], bool]) -> None:
        """Waits until `until`, called with `changed` held, is true. Raises EngineError if no engine is left and none
        comes back, and what the run's watch raises."""
        while True:
            with self.changed:
                self._require_collecting()
                if until():
                    return
                none_left = bool(self.lost) and not self.pool.engines
                if not none_left:
                    self.changed.wait(SLICE_SECONDS)
            if none_left:
                if self.bring_back is None:
                    raise EngineError(problem for error in self.lost.values() for problem in error.problems)
                self.bring_back()
            self._runtime.watch.check()

    def hold(self, engines: Iterable[str]) -> None:
        """Gives these engines no further requests until `serve`, which is called once they have new weights."""
        with self.changed:
            if self.pool.engines:
                self._count_idle()
            self.pool.held.update(engines)

    def drain(self) -> None:
        """Holds all engines, and waits until their requests have ended. Raises as `wait` does."""
        self.hold(self.pool.engines)
        self.wait(lambda: not any(self.pool.engines.get(engine) for engine in self.pool.held))

    def idle(self) -> tuple[float, float]:
        """Returns, since the last call: idle seconds of a slot, mean over all engines' slots; all seconds."""
        with self.changed:
            self._count_idle()
            idle, seconds = self._idle_seconds, self._seconds
            self._idle_seconds = self._seconds = 0.0
        return idle, seconds

    def agents_restarted(self) -> int:
        """Returns the number of agent processes that were restarted since the last call."""
        restarts = self._agents.host.restarts if self._agents else 0
        new, self._restarts_counted = restarts - self._restarts_counted, restarts
        return new

    def close(self) -> None:
        """Ends the engines and the servers that they started: in up to 30 s, or 5 s for engines that still start."""
        if self._agents:
            self._agents.close()
        self._stop_collecting()
        self.engines.close()

    # --- called by agents' turns too (agent_turns.py) -----------------------------------------------------------------

    def hand_out(self) -> None:
        """Hands requests that wait to engines with free slots. The caller holds `changed`."""
        self._count_idle()
        for engine, requests in self.pool.hand_out().items():
            self._answers.hand(self.engines.by_name[engine], requests)

    def take_back(self, orders: Iterable[Order]) -> None:
        """Takes the requests of these orders back from the engines. The caller holds `changed`."""
        for engine, tickets in self.pool.withdraw(orders).items():
            self.engines.by_name[engine].give_back.remote(tickets)

    def fail(self, error: MegagrpoError) -> None:
        """Ends all waits for samples with this error."""
        with self.changed:
            self._failure = error
            self.changed.notify_all()

    # --- orders of a step or an evaluation ----------------------------------------------------------------------------

    def _groups(self, orders: Sequence[Order]) -> list[Group]:
        """Generates responses to these orders, waits for all, and returns the prompts' groups."""
        self.add(orders, first=True)  # the caller waits for them, but not for requests of background sampling
        count = sum(len(order.requests) for order in orders)
        with ExitStack() as undoing, progress("generating", count, "responses") as work:
            undoing.callback(self.drop, orders)

            def all_complete() -> bool:
                work.done = sum(len(order.samples) for order in orders)
                return work.done == work.total

            self.wait(all_complete)
            undoing.pop_all()
        return [order.group() for order in orders]

    # --- the thread that collects -------------------------------------------------------------------------------------

    def _collect(self) -> None:
        try:
            while not self._closed:
                with self.changed:
                    self._look_at_restarts()
                    expected = self._answers.expected
                if not expected:
                    time.sleep(SLICE_SECONDS)
                    continue
                ray.wait(expected, num_returns=1, timeout=SLICE_SECONDS)
                ready, _ = ray.wait(expected, num_returns=len(expected), timeout=0)
                for ref in ready:
                    self._take(ref)
                self._put_back(ready)
                with self.changed:
                    for engine, tickets in list(self.pool.engines.items()):
                        if silence := self._answers.silence(engine, tickets):
                            self.lose(engine, self.engines.by_name[engine], silence)
        except (MegagrpoError, OSError) as error:
            self._failure = error

    def _take(self, ref: ray.ObjectRef[Any]) -> None:
        """Takes an engine's answer: its samples, or the error with which it failed."""
        with self.changed:
            expected = self._answers.pop(ref)
        if expected is None or self._closed:
            return
        engine, so_far = expected
        try:
            answer = Wait("rollout", SLICE_SECONDS, EngineError, watch=None).answer_of(ref, engine)
        except (OSError, MemoryError) as error:
            answer = EngineError(Problem("rollout: this process cannot read samples", str(error)))
        completed: list[Order] = []
        with self.changed:
            if engine not in self.pool.engines:
                return
            actor = self.engines.by_name[engine]
            if isinstance(answer, MegagrpoError):
                self.lose(engine, actor, answer)
            else:
                self._count_idle()
                completed = self.pool.answered(engine, answer.samples)
                if loss := self._answers.take(engine, answer, so_far):
                    reason, failed = loss
                    self.lose(engine, actor, reason, failed=failed)
                else:
                    self._answers.ask(engine, actor)
            self.hand_out()
        for order in completed:
            order.on_complete(order)
        with self.changed:
            self.changed.notify_all()

    def _count_idle(self) -> None:
        now = time.monotonic()
        seconds, self._counted_at = now - (self._counted_at or now), now
        self._idle_seconds += seconds * self.pool.idle_share(held_sample=self._recipe.pause == "finish")
        self._seconds += seconds

    def _look_at_restarts(self) -> None:
        """Advances the restarts: an engine that has restarted waits for weights."""
        may_start = self._waiting_for_engines or not self._runtime.shares_gpus
        for engine, error in self.engines.look(may_start=may_start).items():
            if error is None:
                self._started.add(engine)
                self.say(f"{engine} has started again: the next weight sync brings it up to date")
            else:
                self.lost[engine] = EngineError([*self.lost[engine].problems[:1], *error.problems])
                self._retry_at[engine] = time.monotonic() + RETRY_SECONDS
                first = error.problems[0]
                self.say(f"warning: {engine} could not start: {first.where}: {first.given} ({self._left()})")
            self.changed.notify_all()

    def _put_back(self, ready: Sequence[ray.ObjectRef[Any]]) -> None:
        """Moves requests of lost engines to others, once their tokens so far are here or too late."""
        with self.changed:
            coming = list(self._answers.coming.items())
        for so_far, (until, lost) in coming:
            if so_far in ready or time.monotonic() > until:
                samples = read_so_far([so_far] if so_far in ready else [], lost)
                with self.changed:
                    del self._answers.coming[so_far]
                    self.pool.put_back(lost, samples)
                    self.hand_out()
                    self.changed.notify_all()

    def _stop_collecting(self) -> None:
        self._closed = True
        with self.changed:
            self.pool.engines.clear()
            self._started.clear()
        if self._collecting.is_alive():
            self._collecting.join(CLOSE_SECONDS)

    # --- which engines there are --------------------------------------------------------------------------------------

    def _up(self) -> dict[str, Any]:
        """Returns the actors of the engines that sample, or wait for weights."""
        up = [name for name in self.engines.names if name in self.pool.engines or name in self._started]
        return {name: self.engines.by_name[name] for name in up}

    def _left(self) -> str:
        return f"{self.serving} of {len(self.engines.names)} engines sample"

    def _require_collecting(self) -> None:
        if self._failure is not None:
            raise self._failure
        require_alive(self._collecting)
        if self._agents:
            require_alive(self._agents.host.thread)

    def _require_patience(self) -> None:
        """Raises EngineError, with the reason of each loss, if the run has waited too long for a sampling engine."""
        limit = self._recipe.rollout.no_engine_timeout_seconds
        if self._seconds_without_engine > limit:
            given, needed = f"none for {limit:g} s", "one that starts and gets verified weights"
            fix = "look at the engines' logs for the first error; rollout.no_engine_timeout_seconds is the longest wait"
            problems = [problem for error in self.lost.values() for problem in error.problems]
            raise EngineError([Problem("rollout: no engine is left", given, needed, fix), *problems])


def require_alive(thread: threading.Thread) -> None:
    """Raises EngineError if a thread of the run has ended with an unexpected error."""
    if not thread.is_alive():
        given = "it has ended: its traceback is in the output of this process"
        raise EngineError(Problem(f"the thread that {thread.name}", given, fix=REPORT))

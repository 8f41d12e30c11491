"""The host of agents' rollouts: begins, ends and cancels them in agent processes.

An event loop in a thread of its own serves the gateway and talks with the agent processes. A process that dies loses
its rollouts, and is restarted.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from megagrpo.agents.answers import MODEL, Ask
from megagrpo.agents.chat import Chat
from megagrpo.agents.gateway import Gateway
from megagrpo.agents.processes import AgentProcess, Program
from megagrpo.agents.turns import Limits, reported
from megagrpo.errors import REPORT, AgentError, MegagrpoError, Problem
from megagrpo.recipe.schema.agent import AgentConfig
from megagrpo.rollout.pool import Order
from megagrpo.types import FinishReason, Sample

TICK_SECONDS = 0.25
"""Precision of rollouts' time limits."""
BLOCKED_SECONDS = 60.0
"""Timeout for an agent process to report that it has ended a rollout. Only a blocked event loop reaches it."""
START_SECONDS = 120.0
"""Timeout for an agent process to import the function's file."""
START_FAILURES_MAX = 3
"""Consecutive failures of a process to start that end the run."""
EVENTS_MAX = 10_000
"""Most events that an agent may report of one rollout; the rest is dropped."""
LIMIT_CODES = ("turn_limit_exceeded", "context_length_exceeded")
"""Codes of the gateway's refusals at a limit of a rollout."""
CLOSE_SECONDS = 15.0

Finished = Callable[[Order, int, str, Sample | None], None]


@dataclass(eq=False)
class Hosted:
    """One request of an order, and the process that runs its rollout."""

    order: Order
    index: int
    slot: Slot
    key: str
    opened: float
    left_seconds: float
    events: list[dict[str, Any]] = field(default_factory=list)


@dataclass(eq=False)
class Slot:
    """An agent process and its replacements."""

    number: int
    process: AgentProcess | None = None
    """None until it is ready."""
    rollouts: dict[str, Hosted] = field(default_factory=dict)
    """Rollouts that have not ended, by key."""
    cancelled: dict[str, float] = field(default_factory=dict)
    """Monotonic time in seconds of each cancellation that it has not confirmed, by the rollout's key."""


class AgentHost:
    """The runner of agents' rollouts. Its methods are for any thread, unless they say otherwise."""

    def __init__(
        self,
        agent: AgentConfig,
        program: Program,
        tokens_max: int,
        logs: Path,
        chat: Callable[[], Chat],
        ask: Ask,
        finished: Finished,
        failed: Callable[[MegagrpoError], None],
        sampling: Callable[[Iterable[str]], Collection[str]],
        say: Callable[[str], None],
        prepare_seconds: float = START_SECONDS,
    ) -> None:
        """Starts the host's thread. tokens_max: of a conversation. chat, ask: of the gateway. finished: takes a
        rollout's key and sample, None if it was cancelled. failed: takes the error that ends the run. sampling: returns
        the keys whose engine samples; the time limits of others pause. The host's thread calls all of these.
        prepare_seconds: timeout of the file's `prepare` in a process."""
        self._agent, self._program, self._tokens_max, self._logs = agent, program, tokens_max, logs
        self._finished, self._failed, self._sampling, self._say = finished, failed, sampling, say
        self._prepare_seconds = prepare_seconds
        self._slots = [Slot(number) for number in range(agent.processes)]
        self._waiting: deque[tuple[Order, int]] = deque()
        self._running: dict[Order, dict[int, Hosted]] = {}
        self._held: set[Order] = set()
        self._opened: dict[str, Hosted] = {}
        """Rollouts by key, until their samples are there."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._loaded = self._said_failure = False
        self.restarts = 0
        """Processes that ended and were started again."""
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._chat, self._ask = chat, ask
        self.thread = threading.Thread(target=self._run, name="hosts agents", daemon=True)
        self.thread.start()

    def order_of(self, key: str) -> Order:
        """Returns the order of the rollout with this key, until its sample is there. Runs in the host's thread."""
        return self._opened[key].order

    def late(self, key: str, why: str) -> None:
        """Ends the rollout with this key for a time limit, unless it has ended. Runs in the host's thread."""
        self._leave(self._opened[key], late=why)

    def begin(self, orders: Sequence[Order], *, first: bool = False) -> None:
        """Begins their rollouts without a sample, if `first` before those that wait. Resumes held rollouts."""
        self._call(self._begin, orders, first)

    def hold(self, orders: Collection[Order]) -> None:
        """Holds back their rollouts until `begin`, and pauses the time limits of those that have begun."""
        self._call(self._hold, orders)

    def cancel(self, orders: Collection[Order]) -> None:
        """Cancels their rollouts, which get no sample."""
        self._call(self._cancel, orders)

    def close(self) -> None:
        """Stops all agent processes, and the gateway."""
        self._call(self._closing.set)
        self.thread.join(CLOSE_SECONDS)

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        if self.thread.is_alive():
            self._loop.call_soon_threadsafe(function, *arguments)

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except MegagrpoError as error:
            self._failed(error)

    async def _serve(self) -> None:
        self._gateway = Gateway(self._chat(), self._ask, parser=self._agent.parser)
        await self._gateway.start()
        try:
            for slot in self._slots:
                self._spawn(self._tend(slot))
            self._spawn(self._watch())
            await self._closing.wait()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._gateway.stop()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            unexpected = Problem("the thread that hosts agents", f"{type(error).__name__}: {error}", fix=REPORT)
            self._failed(error if isinstance(error, MegagrpoError) else AgentError(unexpected))

    # --- processes ----------------------------------------------------------------------------------------------------

    async def _tend(self, slot: Slot) -> None:
        """Keeps a process running: restarts it whenever it ends. Raises AgentError if it does not start."""
        failures = 0
        while True:
            was_ready, reason = await self._one_process(slot)
            failures = 0 if was_ready else failures + 1
            if failures == START_FAILURES_MAX:
                fix = f"look at {self._log(slot)} for the first error"
                raise AgentError(Problem(f"agent process {slot.number}", reason, "one that starts", fix))
            lost = list(slot.rollouts.values())
            slot.rollouts.clear()
            slot.cancelled.clear()
            if was_ready:
                self.restarts += 1
                self._say(f"restarting agent process {slot.number}: {reason} ({len(lost)} rollouts are lost)")
            for rollout in lost:
                self._end(rollout, error=f"the agent's process ended ({reason})")
            if failures:
                await asyncio.sleep(2.0**failures - 1)

    async def _one_process(self, slot: Slot) -> tuple[bool, str]:
        """Runs one process from its start to its end. Returns whether it was ready, and why it ended."""
        process = await AgentProcess.start(self._program, self._log(slot))
        ready, reason = False, ""
        started = self._loop.call_later(START_SECONDS, process.stop)
        try:
            async for message in process.messages():
                if "event" in message or "end" in message:
                    self._take(slot, message)
                elif "loaded" in message:
                    started.cancel()
                    started = self._loop.call_later(self._prepare_seconds, process.stop)
                    reason = f"not ready (cluster.start_timeout_seconds ends it after {self._prepare_seconds:g} s), "
                elif "ready" in message:
                    ready, reason = True, ""
                    started.cancel()
                    slot.process, self._loaded = process, True
                    self._fill()
                elif "failed" in message:
                    reason = f"{message['failed']}, "
                    if not self._loaded:
                        named = f"{self._program.function} of {self._program.file}"
                        given = f"{named}: {message['trace'] or message['failed']}".rstrip()
                        needed = "a function that can be called with (task, endpoint) and agent.arguments"
                        raise AgentError(Problem("the agent cannot be loaded", given, needed))
        except (ValueError, KeyError, TypeError) as error:
            reason = f"it sent an invalid message ({error}), "
        finally:
            started.cancel()
            slot.process = None
            how = await asyncio.shield(process.end())
        return ready, reason + how

    def _take(self, slot: Slot, message: Mapping[str, Any]) -> None:
        if "event" in message:
            rollout = slot.rollouts.get(message["event"])
            if rollout is not None and len(rollout.events) < EVENTS_MAX:
                values = {name: value for name, value in message.items() if name != "event"}
                rollout.events.append(reported(values, time.monotonic() - rollout.opened))
            return
        error, outcome = str(message["error"]), {name: message[name] for name in ("reward", "turn_rewards")}
        slot.cancelled.pop(message["end"], None)
        rollout = slot.rollouts.pop(message["end"], None)
        if rollout is None:
            return
        if error and not self._said_failure:
            self._said_failure = True
            self._say(f"warning: the agent failed for the first time: {message['trace'] or error}".rstrip())
        self._end(rollout, **outcome, error=error)

    async def _watch(self) -> None:
        """Ends rollouts that reach their time limit, and processes that are blocked."""
        before = time.monotonic()
        while True:
            await asyncio.sleep(TICK_SECONDS)
            now = time.monotonic()
            passed, before = now - before, now
            running = [
                rollout for slot in self._slots for rollout in slot.rollouts.values() if rollout.order not in self._held
            ]
            sampling = self._sampling([rollout.key for rollout in running])
            for rollout in running:
                rollout.left_seconds -= passed if rollout.key in sampling else 0.0
                if rollout.left_seconds <= 0:
                    self.late(rollout.key, f"the rollout took longer than {self._agent.timeout_seconds:g} s")
            for slot in self._slots:
                if slot.process and any(now > since + BLOCKED_SECONDS for since in slot.cancelled.values()):
                    self._say(
                        f"agent process {slot.number} does not answer for {BLOCKED_SECONDS:g} s: a call blocks it"
                    )
                    slot.cancelled.clear()
                    slot.process.stop()

    # --- rollouts -----------------------------------------------------------------------------------------------------

    def _begin(self, orders: Sequence[Order], first: bool) -> None:
        self._held.difference_update(orders)
        waiting = [
            (order, index) for order in orders for index in order.missing() if index not in self._running.get(order, ())
        ]
        if first:
            self._waiting.extendleft(reversed(waiting))
        else:
            self._waiting += waiting
        self._fill()

    def _hold(self, orders: Collection[Order]) -> None:
        held = set(orders)
        self._waiting = deque((order, index) for order, index in self._waiting if order not in held)
        self._held |= {order for order in held if self._running.get(order)}
        self._fill()

    def _cancel(self, orders: Collection[Order]) -> None:
        self._hold(orders)
        self._held.difference_update(orders)
        for order in orders:
            for rollout in self._running.pop(order, {}).values():
                self._leave(rollout)

    def _leave(self, rollout: Hosted, late: str = "") -> None:
        """Ends the rollout, and cancels it in its process, unless it has ended."""
        slot = rollout.slot
        if slot.rollouts.pop(rollout.key, None) is None:
            return
        if slot.process:
            slot.cancelled[rollout.key] = time.monotonic()
            slot.process.send({"cancel": rollout.key})
        self._end(rollout, late=late)

    def _fill(self) -> None:
        """Begins rollouts that wait, while there is room. Each process takes at most its share."""
        if not self._waiting:
            return
        running = {
            slot: sum(rollout.order not in self._held for rollout in slot.rollouts.values()) for slot in self._slots
        }
        at_once = self._agent.rollouts_at_once
        share = -(-at_once // len(self._slots))
        while self._waiting and sum(running.values()) < at_once:
            free = [slot for slot in self._slots if slot.process and running[slot] < share]
            if not free:
                return
            slot = min(free, key=running.__getitem__)
            self._open(*self._waiting.popleft(), slot)
            running[slot] += 1

    def _open(self, order: Order, index: int, slot: Slot) -> None:
        agent, request, prompt = self._agent, order.requests[index], order.prompt
        if prompt is None or slot.process is None:
            raise ValueError("a rollout of an agent needs its prompt, and a process")
        limits = Limits(agent.turns_max, self._tokens_max, request.sampling, request.seed)
        key = self._gateway.open(prompt.id, index, limits, prompt.messages)
        rollout = Hosted(order, index, slot, key, time.monotonic(), agent.timeout_seconds)
        self._running.setdefault(order, {})[index] = rollout
        self._opened[key] = slot.rollouts[key] = rollout
        task = {
            **{name: getattr(prompt, name) for name in ("id", "ground_truth", "data_source", "ability")},
            "sample": index,
            "seed": request.seed,
            "messages": list(map(dict, prompt.messages)),
            "extra_info": dict(prompt.extra_info),
            "limits": {
                "turns_max": agent.turns_max,
                "tokens_max": self._tokens_max,
                "timeout_seconds": agent.timeout_seconds,
            },
        }
        endpoint = {"base_url": f"{self._gateway.url}/v1", "api_key": key, "model": MODEL}
        slot.process.send({"begin": key, "task": task, "endpoint": endpoint})

    def _end(self, rollout: Hosted, **outcome: Any) -> None:
        self._spawn(self._end_with(rollout, **outcome))

    async def _end_with(
        self, rollout: Hosted, *, reward: Any = None, turn_rewards: Any = None, error: str = "", late: str = ""
    ) -> None:
        order, index, key = rollout.order, rollout.index, rollout.key
        record = await self._gateway.close(key)
        del self._opened[key]
        of_order = self._running.get(order, {})
        if of_order.get(index) is not rollout:
            self._finished(order, index, key, None)  # it was cancelled
            return
        del of_order[index]
        if not of_order:
            del self._running[order]
            self._held.discard(order)
        sample = record.sample(order.requests[index], "stop", turn_rewards)
        if sample.agent is None:
            raise ValueError("a record without its rollout")
        run = sample.agent
        refused = record.limited and any(run.counts.get(f"refused/{code}") for code in LIMIT_CODES)
        error = error or run.error
        failed = bool(error) and not refused and not record.aborted  # an exception at a limit is no failure
        masked = self._agent.when_late == "mask" if late else self._agent.when_failed == "mask"
        finish: FinishReason = "length" if late or failed or record.limited or record.aborted else "stop"
        if masked and (late or failed or record.aborted):
            finish = "abort"
        run = replace(
            run,
            reward=reward,
            error=late or record.aborted or error,
            counts={**run.counts, **({"late": 1.0} if late else {"failed": 1.0} if failed else {})},
            events=tuple(sorted([*run.events, *rollout.events], key=itemgetter("at"))),
        )
        self._finished(order, index, key, replace(sample, finish=finish, agent=run))
        self._fill()

    def _log(self, slot: Slot) -> Path:
        return self._logs / f"agents_{slot.number}.log"

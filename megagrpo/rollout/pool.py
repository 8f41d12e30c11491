"""The distribution of requests: engines with free slots pull them, and others resume those of a lost engine.

Knows no process and no clock. Requests that are wanted together are an Order: a group's, or a part of an evaluation's.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from weakref import WeakSet

from megagrpo.errors import EngineError, Problem
from megagrpo.types import Group, Prompt, Request, Sample

LOSSES_MAX = 3
"""The run ends when so many engines were lost with the same request on them: it may be the cause."""


@dataclass(eq=False)
class Order:
    """Requests that are wanted together. `on_complete` is called once the last sample is there.

    While an order is withdrawn, `requests` hold their tokens so far, and the order can be added again.
    """

    requests: list[Request]
    on_complete: Callable[[Order], None] = lambda order: None
    prompt: Prompt | None = None
    """The prompt of all requests, for an agent, which reads more of it than its tokens."""
    bound: str = ""
    """Orders of one binding go to one engine while it lives: it has read their first tokens. "": any engine."""
    samples: dict[int, Sample] = field(default_factory=dict)
    """By index of the request."""
    joints: dict[int, list[int]] = field(default_factory=dict)
    """By index of a request, the token counts after which it was resumed. These tokens are then read, not sampled: the
    last bits of what follows differ."""
    continued: int = 0
    """Number of times that a request was resumed after tokens of its own."""

    @property
    def complete(self) -> bool:
        return len(self.samples) == len(self.requests)

    def finished(self) -> tuple[Sample, ...]:
        """Returns the finished samples, in the order of their requests."""
        return tuple(self.samples[index] for index in sorted(self.samples))

    def group(self) -> Group:
        """Joins the samples to the prompt's group. Raises EngineError unless there is one of it for each request."""
        if self.prompt is None or [one.prompt_id for one in self.finished()] != [self.prompt.id] * len(self.requests):
            given = f"{len(self.samples)} samples of prompts {sorted({one.prompt_id for one in self.finished()})}"
            needed = f"{len(self.requests)} samples of {self.prompt and self.prompt.id}"
            raise EngineError(Problem("rollout: the samples are not those that were requested", given, needed))
        return Group(self.prompt, self.finished())

    def missing(self) -> list[int]:
        """Returns the indices of the requests without a sample."""
        return [index for index in range(len(self.requests)) if index not in self.samples]

    def resume_after(self, index: int, sample: Sample) -> None:
        """Makes the next engine resume this request after the tokens of `sample`."""
        request = self.requests[index]
        if 0 < len(sample.tokens) < request.sampling.max_tokens:  # a continued run may have another limit
            self.requests[index] = replace(request, begun=sample)
            kept = [at for at in self.joints.get(index, []) if at < len(sample.tokens)]  # its last token may be gone
            self.joints[index] = [*kept, len(sample.tokens)]
            self.continued += 1


@dataclass(eq=False)
class Ticket:
    """A request of an order on its way through the pool."""

    order: Order
    index: int
    losses: int = 0

    @property
    def request(self) -> Request:
        return self.order.requests[self.index]


class Pool:
    """Requests that wait, and requests on engines. Orders are served in the order in which they came.

    An order's requests go to one engine while it has room, because it then reads their prompt once. `slots` is how many
    requests one engine runs at once; None: any number, and the engine with the fewest gets the next order.
    """

    def __init__(self, slots: int | None, *, continues: bool = False) -> None:
        """Creates an empty pool. continues: a request that an engine aborts is resumed, if it has new tokens."""
        self.slots, self._continues = slots, continues
        self.engines: dict[str, dict[int, Ticket]] = {}
        """Requests that run, by engine and number of their ticket."""
        self.orphaned: dict[int, Ticket] = {}
        """Requests of engines that have left, until they are put back."""
        self.held: set[str] = set()
        """Engines that get weights, and no requests until they have joined with them."""
        self._waiting: deque[Ticket] = deque()
        self._waiting_on: defaultdict[str, deque[Ticket]] = defaultdict(deque)
        """Tickets bound to a living engine, by engine."""
        self._unplaced: deque[Ticket] = deque()
        """Tickets of bindings that have no engine yet."""
        self._engine_of: dict[str, str] = {}
        """Living engines, by binding."""
        self._withdrawn: WeakSet[Order] = WeakSet()  # some are never added again
        self._next = 0

    def idle_share(self, *, held_sample: bool) -> float:
        """Returns the share of all engines' slots that sample nothing: free ones, and unless `held_sample` all of held
        engines. Without a limit each engine is one slot."""
        if not self.engines:
            return 1.0
        sampling = [running for engine, running in self.engines.items() if held_sample or engine not in self.held]
        return 1 - sum(min(1.0, len(running) / (self.slots or 1)) for running in sampling) / len(self.engines)

    def add(self, orders: Iterable[Order], *, first: bool = False) -> None:
        """Queues the requests without a sample; `first`: before those that wait already."""
        tickets: list[Ticket] = []
        for order in orders:
            self._withdrawn.discard(order)
            tickets += (Ticket(order, index) for index in order.missing())
        for ticket in reversed(tickets) if first else tickets:
            self._wait(ticket, first=first)

    def samples(self, bound: str) -> bool:
        """Returns whether the engine of this binding may have requests; if it has none yet, whether any engine may."""
        engines = [self._engine_of[bound]] if bound in self._engine_of else self.engines
        return any(engine not in self.held for engine in engines)

    def release(self, bound: str) -> None:
        """Forgets a binding, which gets no more requests."""
        self._engine_of.pop(bound, None)

    def join(self, engine: str) -> None:
        """Lets an engine have requests: its weights are those of all others."""
        self.engines.setdefault(engine, {})
        self.held.discard(engine)

    def leave(self, engine: str, *, failed: bool = True) -> dict[int, Request]:
        """Removes a lost engine. Returns its requests by ticket, to be put back. Raises EngineError if one of them was
        too often on engines that had `failed`."""
        running = self.engines.pop(engine, {})
        self._engine_of = {bound: other for bound, other in self._engine_of.items() if other != engine}
        self._unplaced.extendleft(reversed(self._waiting_on.pop(engine, deque())))
        self.orphaned |= running
        for ticket in running.values():
            ticket.losses += failed
        worst = max(running.values(), key=lambda ticket: ticket.losses, default=None)
        if worst is not None and worst.losses >= LOSSES_MAX:
            at = worst.request
            given = f"{worst.losses} engines were lost while they sampled it, {engine} the last"
            fix = "look at the engines' logs for the first error"
            raise EngineError(
                Problem(f"sample {at.index} of prompt {at.prompt_id}", given, "an engine that lives", fix)
            )
        return {number: ticket.request for number, ticket in running.items()}

    def put_back(self, lost: Iterable[int], so_far: Mapping[int, Sample]) -> None:
        """Queues these lost tickets first, for other engines, each resumed after its tokens so far."""
        for number in reversed(list(lost)):
            ticket = self.orphaned.pop(number)
            if number in so_far:
                ticket.order.resume_after(ticket.index, so_far[number])
            if ticket.order not in self._withdrawn:
                self._wait(ticket, first=True)

    def hand_out(self) -> dict[str, dict[int, Request]]:
        """Hands waiting requests to engines. Returns them by engine and ticket."""
        handed: dict[str, dict[int, Request]] = {}
        free = [engine for engine in self.engines if engine not in self.held]
        self._hand_out_bound(free, handed)
        rooms = [(-self._room(engine), rank, engine) for rank, engine in enumerate(free)]
        heapq.heapify(rooms)
        while self._waiting and rooms and rooms[0][0] != 0:
            negative, rank, engine = heapq.heappop(rooms)
            order, together = self._waiting[0].order, 0
            while self._waiting and together < -negative and self._waiting[0].order is order:
                self._hand(self._waiting.popleft(), engine, handed)
                together += 1
            heapq.heappush(rooms, (negative + together, rank, engine))
        return handed

    def _hand_out_bound(self, free: Sequence[str], handed: dict[str, dict[int, Request]]) -> None:
        """Hands bound requests to their engines; unplaced ones to the engine with room that has the fewest bindings."""
        for engine in free:
            waiting = self._waiting_on[engine]
            for _ in range(min(self._room(engine), len(waiting))):
                self._hand(waiting.popleft(), engine, handed)
        if not self._unplaced:
            return
        bound = Counter(self._engine_of.values())
        while self._unplaced and (with_room := [engine for engine in free if self._room(engine)]):
            ticket = self._unplaced.popleft()
            if ticket.order.bound not in self._engine_of:
                chosen = min(with_room, key=lambda each: (bound[each], len(self.engines[each])))
                self._engine_of[ticket.order.bound] = chosen
                bound[chosen] += 1
            engine = self._engine_of[ticket.order.bound]
            if engine in with_room:
                self._hand(ticket, engine, handed)
            else:
                self._waiting_on[engine].append(ticket)

    def _hand(self, ticket: Ticket, engine: str, handed: dict[str, dict[int, Request]]) -> None:
        self.engines[engine][self._next] = ticket
        handed.setdefault(engine, {})[self._next] = ticket.request
        self._next += 1

    def answered(self, engine: str, answers: Mapping[int, Sample]) -> list[Order]:
        """Takes samples from an engine; returns the orders that they complete. A request that was given back resumes
        when its order is added again."""
        completed = []
        for number, sample in answers.items():
            ticket = self.engines.get(engine, {}).pop(number, None)
            if ticket is None:  # the engine left, and the request went elsewhere
                continue
            order = ticket.order
            if order in self._withdrawn and sample.finish == "abort":
                order.resume_after(ticket.index, sample)
                continue
            before = ticket.request.begun.tokens if ticket.request.begun else ()
            goes_on = len(before) < len(sample.tokens) < ticket.request.sampling.max_tokens
            if self._continues and sample.finish == "abort" and goes_on:
                order.resume_after(ticket.index, sample)
                self._wait(ticket, first=True)
                continue
            order.samples[ticket.index] = sample
            if order.complete:
                self._withdrawn.discard(order)
                completed.append(order)
        return completed

    def withdraw(self, orders: Iterable[Order]) -> dict[str, list[int]]:
        """Takes orders back: unqueues waiting requests; returns running ones, by engine, which are to be given back."""
        self._withdrawn |= set(orders)
        self._waiting, self._unplaced = self._kept(self._waiting), self._kept(self._unplaced)
        self._waiting_on = defaultdict(
            deque, {engine: self._kept(waiting) for engine, waiting in self._waiting_on.items()}
        )
        running = {
            engine: [number for number, ticket in tickets.items() if ticket.order in self._withdrawn]
            for engine, tickets in self.engines.items()
        }
        return {engine: numbers for engine, numbers in running.items() if numbers}

    def running(self, orders: Iterable[Order]) -> bool:
        """Returns whether an engine still has requests of these orders, or had them when it was lost."""
        wanted = set(orders)
        everywhere = (*self.engines.values(), self.orphaned)
        return any(ticket.order in wanted for tickets in everywhere for ticket in tickets.values())

    def _wait(self, ticket: Ticket, *, first: bool) -> None:
        queue = self._waiting
        if bound := ticket.order.bound:
            queue = self._waiting_on[self._engine_of[bound]] if bound in self._engine_of else self._unplaced
        queue.appendleft(ticket) if first else queue.append(ticket)

    def _kept(self, waiting: deque[Ticket]) -> deque[Ticket]:
        return deque(ticket for ticket in waiting if ticket.order not in self._withdrawn)

    def _room(self, engine: str) -> int:
        """Counts free slots. Without a limit, a large number less what runs: the idlest engine has most room."""
        return (self.slots or 2**60) - len(self.engines[engine])

"""The engine's actor: the engine of a recipe, in the process that holds it or calls its server.

A kind imports its engine when it makes one: the import takes seconds, and must follow prepare_process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import ray

from megagrpo.cluster.actors import prepare_process
from megagrpo.errors import EngineError, MegagrpoError, Problem
from megagrpo.processes.ports import free_port
from megagrpo.rollout.engine import Engine, EngineSpec, SoFar
from megagrpo.rollout.sglang.arguments import ServerNode
from megagrpo.types import Request, Sample
from megagrpo.weights.boxes import Place

if TYPE_CHECKING:
    from megagrpo.processes.store import StoreHost
    from megagrpo.rollout.sglang.server import Server

WATCH_SECONDS = 1.0
SPEED_REPORTS = 12
"""Reports of tokens so far, from one speed to the next: servers send tokens in parts of many."""


@dataclass(frozen=True)
class Answers:
    """An engine's answer: finished samples by ticket, and whether it reported the tokens so far of other requests."""

    samples: Mapping[int, Sample]
    reported: bool
    silent_seconds: float
    """Seconds without a new token, while the engine has requests to sample."""
    speed: float | None = None
    """Tokens per second of a request since the last speed, at every SPEED_REPORTS-th report; None at the others, or if
    no request that a report has seen has sampled more since."""


def ask_engine(actor: Any, method: str, *arguments: Any) -> ray.ObjectRef[Any]:
    """Calls a method of an EngineActor's engine. Ray shows the method's name in process titles and errors."""
    return actor.call.options(name=f"EngineActor.{method}").remote(method, *arguments)


@ray.remote(max_restarts=0, concurrency_groups={"requests": 1, "samples": 1})
class EngineActor:
    """The actor of an Engine (rollout/engine.py), for the driver: `call` calls it, and `update` three of its methods.

    Separate threads take requests and return samples, even while an update is open.
    """

    engine: Engine

    def start(self, spec: EngineSpec, other_nodes: Sequence[Any] = ()) -> None:
        """Makes the engine. `other_nodes`: EngineNodeActors that have their specs, if it is on several nodes."""
        prepare_process(spec.device, spec.recipe, spec.gpus)
        self._answers: SimpleQueue[tuple[int, Sample | MegagrpoError]] = SimpleQueue()
        self._reported = self._moved = time.monotonic()
        self._counts: dict[int, int] = {}
        self._reports = 0
        self._since: dict[int, tuple[float, int]] = {}
        """Time at which each request was first seen since the last speed, and its token count then."""
        self._sampled, self._seconds = 0, 0.0
        """Tokens and seconds of requests that have ended since the last speed."""
        self.engine = make_engine(spec, other_nodes)

    @ray.method(concurrency_group="requests")
    def begin(self, requests: Mapping[int, Request]) -> None:
        try:
            self.engine.begin(requests, self._answered)
        except MegagrpoError as error:
            for ticket in requests:
                self._answered(ticket, error)

    @ray.method(concurrency_group="requests")
    def give_back(self, tickets: Sequence[int]) -> None:
        self.engine.give_back(tickets)

    @ray.method(concurrency_group="samples", num_returns=2)
    def finished(self, seconds: float) -> tuple[Answers, SoFar | None]:
        """Returns samples by ticket: as soon as there is one, or none after `seconds`. Every `seconds` it reports the
        tokens so far of the other requests, in a second result that stays on this node until the driver reads it.
        Raises the error of a failed request."""
        found: dict[int, Sample] = {}
        so_far = speed = None
        with suppress(Empty):
            self._take(found, seconds)
        now = time.monotonic()
        if now >= self._reported + seconds:
            so_far, self._reported = self.engine.so_far(), now
            before, self._counts = self._counts, so_far.counts()
            if before != self._counts:
                self._moved = now
            speed = self._speed(now)
        if found or self.engine.rests():
            self._moved = now
        with suppress(Empty):  # what ends meanwhile is in both
            while True:
                self._take(found, 0)
        return Answers(found, so_far is not None, now - self._moved, speed), so_far

    def call(self, method: str, *arguments: Any) -> Any:
        """Calls another method of the engine and returns its answer."""
        return getattr(self.engine, method)(*arguments)

    def update(self, version: int) -> Sequence[Mapping[str, int]]:
        """Receives a whole update and returns, by engine rank, the digests of what arrived.

        The driver compares them before it calls commit_update.
        """
        self.engine.begin_update(version)
        self.engine.receive(version)
        return self.engine.end_update(version)

    def close(self) -> None:
        self.engine.close()

    def _speed(self, now: float) -> float | None:
        """Returns tokens per second of a request at every SPEED_REPORTS-th report. Called at each one."""
        self._reports += 1
        for ticket, count in self._counts.items():
            self._since.setdefault(ticket, (now, count))
        if self._reports % SPEED_REPORTS:
            return None
        for ticket in self._since.keys() & self._counts.keys():
            self._count_speed(ticket, self._counts[ticket], now)
        tokens, seconds = self._sampled, self._seconds
        self._sampled, self._seconds = 0, 0.0
        self._since = {ticket: (now, count) for ticket, count in self._counts.items()}
        return tokens / seconds if seconds else None

    def _count_speed(self, ticket: int, tokens: int, now: float) -> None:
        """Adds the tokens and seconds of a request since it was first seen, unless it sampled none: it waits, or has
        ended in a batch that goes on."""
        at, before = self._since.pop(ticket, (now, tokens))
        if tokens > before:
            self._sampled += tokens - before
            self._seconds += now - at

    def _answered(self, ticket: int, answer: Sample | MegagrpoError) -> None:
        self._answers.put((ticket, answer))

    def _take(self, found: dict[int, Sample], seconds: float) -> None:
        ticket, answer = self._answers.get(timeout=seconds)
        if isinstance(answer, MegagrpoError):
            raise answer
        found[ticket] = answer
        self._count_speed(ticket, len(answer.tokens), time.monotonic())


def visible_gpus(own: Sequence[Place], all_places: Iterable[Place]) -> tuple[int | str, ...]:
    """Returns the GPUs that an engine's process sees: its own first, the only ones it computes on, then the run's
    others on its node. It maps memory of training ranks and engine ranks there, which send weights to it."""
    first = [place.device for place in own if place.device is not None]
    nodes = {place.node for place in own}
    beside = {place.device for place in all_places if place.node in nodes and place.device is not None}
    return (*first, *sorted(beside.difference(first), key=str)) if first else ()


@ray.remote(max_restarts=0, max_concurrency=2)
class EngineNodeActor:
    """The server process of an engine on a node other than its first. It has ranks, and answers no requests."""

    spec: EngineSpec
    server: Server

    def prepare(self, spec: EngineSpec) -> None:
        prepare_process(spec.device, spec.recipe, spec.gpus)
        self.spec = spec

    def address(self) -> str:
        """Returns this node's IP address."""
        return ray.util.get_node_ip_address()

    def start(self, node: ServerNode) -> None:
        self.server = self.spec.recipe.rollout.kind.server(self.spec, node)

    def wait_for_end(self) -> Problem:
        """Returns once the server process has ended, with the end of its log."""
        while True:
            try:
                self.server.check_running()
            except EngineError as error:
                return error.problems[0]
            time.sleep(WATCH_SECONDS)

    def close(self) -> None:
        if hasattr(self, "server"):
            self.server.close()


def make_engine(spec: EngineSpec, other_nodes: Sequence[Any] = ()) -> Engine:
    """Makes the engine of a spec, ready to generate on return. Raises ModelError or EngineError."""
    kind = spec.recipe.rollout.kind
    server = _server_on_nodes(spec, other_nodes) if other_nodes else kind.server(spec)
    try:
        return kind.engine(spec, server)
    except MegagrpoError:
        if server:
            server.close()
        raise


def _server_on_nodes(spec: EngineSpec, others: Sequence[Any]) -> Server:
    """Starts the server of an engine on several nodes, one process on each, this one first. It ends with the others."""
    from megagrpo.processes.store import StoreHost

    here = ray.util.get_node_ip_address()
    addresses = (here, *ray.get([other.address.remote() for other in others]))
    meeting, port = StoreHost(here), free_port(here)
    nodes = [ServerNode(rank, len(addresses), meeting.address, port, addresses) for rank in range(len(addresses))]
    server: Server = spec.recipe.rollout.kind.server(spec, nodes[0])
    starting = [other.start.remote(node) for other, node in zip(others, nodes[1:], strict=True)]
    watch = threading.Thread(target=_end_with, args=(server, spec.name, others, starting, meeting), daemon=True)
    watch.start()
    return server


def _end_with(server: Server, name: str, others: Sequence[Any], starting: Sequence[Any], meeting: StoreHost) -> None:
    """Ends the server when one of its processes on another node ends: its ranks would wait for that one until a
    deadline. Keeps the store in which the ranks met."""
    try:
        ray.get(list(starting))
        [ended], _ = ray.wait([other.wait_for_end.remote() for other in others], num_returns=1)
        server.end(ray.get(ended))
    except (ray.exceptions.RayError, MegagrpoError) as error:
        server.end(Problem(f"{name}: another of its nodes", str(error)))

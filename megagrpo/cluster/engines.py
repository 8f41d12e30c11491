"""The engines' actors: each has the engine of a recipe, in the process that holds it or calls its server; the driver
starts and ends them, and restarts one beside engines that sample.

A kind imports its engine when it makes one: the import takes seconds, and must follow prepare_process.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import ray

from megagrpo.cluster.actors import prepare_process
from megagrpo.cluster.runtime import Runtime
from megagrpo.cluster.waiting import Wait, end_actors
from megagrpo.errors import EngineError, MegagrpoError, Problem
from megagrpo.processes.ports import free_port
from megagrpo.recipe.schema import Recipe
from megagrpo.rollout.engine import Engine, EngineNode, EngineSpec, SoFar
from megagrpo.rollout.server import Server
from megagrpo.types import Request, Sample
from megagrpo.weights.boxes import Manifest, Place

if TYPE_CHECKING:
    from megagrpo.processes.store import StoreHost

WATCH_SECONDS = 1.0
END_SECONDS = 30.0
CLOSE_SECONDS = 5.0
"""Time for an engine that may be stuck to close its server and remove its files, before it is killed."""
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
    """The actor of an Engine (rollout/engine.py), for the driver, which calls it by `call`.

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
        samples: dict[int, Sample] = {}
        so_far = speed = None
        with suppress(Empty):
            self._take(samples, seconds)
        now = time.monotonic()
        if now >= self._reported + seconds:
            so_far, self._reported = self.engine.so_far(), now
            before, self._counts = self._counts, so_far.counts()
            if before != self._counts:
                self._moved = now
            speed = self._speed(now)
        if samples or self.engine.rests():
            self._moved = now
        with suppress(Empty):  # what ends meanwhile is in both
            while True:
                self._take(samples, 0)
        return Answers(samples, so_far is not None, now - self._moved, speed), so_far

    def call(self, method: str, *arguments: Any) -> Any:
        """Calls another method of the engine and returns its answer."""
        return getattr(self.engine, method)(*arguments)

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
        ended while others of its batch run on."""
        at, before = self._since.pop(ticket, (now, tokens))
        if tokens > before:
            self._sampled += tokens - before
            self._seconds += now - at

    def _answered(self, ticket: int, answer: Sample | MegagrpoError) -> None:
        self._answers.put((ticket, answer))

    def _take(self, samples: dict[int, Sample], seconds: float) -> None:
        ticket, answer = self._answers.get(timeout=seconds)
        if isinstance(answer, MegagrpoError):
            raise answer
        samples[ticket] = answer
        self._count_speed(ticket, len(answer.tokens), time.monotonic())


def visible_gpus(of_engine: Sequence[Place], all_places: Iterable[Place]) -> tuple[int | str, ...]:
    """Returns the GPUs that an engine's process sees: its own first, the only ones it computes on, then the run's
    others on its node. It maps memory of training ranks and engine ranks there, which send weights to it."""
    first = [place.device for place in of_engine if place.device is not None]
    nodes = {place.node for place in of_engine}
    of_its_nodes = {place.device for place in all_places if place.node in nodes and place.device is not None}
    return (*first, *sorted(of_its_nodes.difference(first), key=str)) if first else ()


@ray.remote(max_restarts=0, max_concurrency=2)
class EngineNodeActor:
    """The server process of an engine on a node other than its first. It has ranks, and answers no requests."""

    spec: EngineSpec
    server: Server

    def prepare(self, spec: EngineSpec) -> None:
        prepare_process(spec.device, spec.recipe, spec.gpus)
        self.spec = spec

    def address(self) -> str:
        return ray.util.get_node_ip_address()

    def start(self, node: EngineNode) -> None:
        self.server = self.spec.recipe.rollout.kind.server(replace(self.spec, node=node).server)

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
    server = _server_on_nodes(spec, other_nodes) if other_nodes else kind.server(spec.server)
    try:
        return kind.engine(spec, server)
    except MegagrpoError:
        if server:
            server.close()
        raise


def _server_on_nodes(spec: EngineSpec, others: Sequence[Any]) -> Server:
    """Starts the server of an engine on several nodes, one process on each, this one first. It ends with the others."""
    from megagrpo.processes.store import StoreHost

    address = ray.util.get_node_ip_address()
    addresses = (address, *ray.get([other.address.remote() for other in others]))
    meeting, port = StoreHost(address), free_port("", EngineNode.LATER_PORTS)
    nodes = [EngineNode(rank, len(addresses), meeting.address, port, addresses) for rank in range(len(addresses))]
    server: Server = spec.recipe.rollout.kind.server(replace(spec, node=nodes[0]).server)
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


# --- in the driver ----------------------------------------------------------------------------------------------------


@dataclass
class Restart:
    """The restart of an engine: its old actors close, or are killed at `kill_at`; then its new ones start."""

    closing: list[ray.ObjectRef[None]]
    kill_at: float
    started: ray.ObjectRef[None] | None = None
    late_at: float = 0.0


class EngineActors:
    """One actor per engine, and one for each further node of an engine. The constructor starts them; they are ready
    after `wait_until_ready`. For one thread at a time."""

    def __init__(
        self,
        runtime: Runtime,
        recipe: Recipe,
        model_directory: Path,
        tokenizer_directory: Path,
        *,
        keeps_weights: bool = False,
    ) -> None:
        """Starts the engines. keeps_weights: they sample from the weights that they start with."""
        self.runtime, self.recipe, self._keeps_weights = runtime, recipe, keeps_weights
        self._model_directory, self.tokenizer_directory = model_directory, tokenizer_directory
        self._index = {f"engine {index}": index for index in range(recipe.rollout.engines)}
        self.names = tuple(self._index)
        self.by_name: dict[str, Any] = {}
        self._other_nodes: dict[str, list[Any]] = {}
        self._manifests: dict[str, list[Manifest]] = {}
        self._starting = {name: self._start(name) for name in self._index}
        self.restarts: dict[str, Restart] = {}

    def wait_until_ready(self) -> None:
        """Raises EngineError naming the engines that did not start in `cluster.start_timeout_seconds`."""
        self._wait(self._starting, "starting", bar="starting engines")

    def restart(self, engine: str) -> None:
        """Closes an engine, even a busy one. `look` then starts its replacement."""
        closing = [actor.close.remote() for actor in self._actors_of(engine)]
        self.restarts[engine] = Restart(closing, time.monotonic() + CLOSE_SECONDS)

    def look(self, *, may_start: bool) -> dict[str, MegagrpoError | None]:
        """Advances all restarts without waiting. Returns those that are over: None if started, or the error."""
        over: dict[str, MegagrpoError | None] = {}
        for engine, restart in self.restarts.items():
            if restart.started is None:
                _, open_ = ray.wait(restart.closing, num_returns=len(restart.closing), timeout=0)
                if may_start and (not open_ or time.monotonic() > restart.kill_at):
                    for actor in self._actors_of(engine):
                        ray.kill(actor)
                    restart.started = self._start(engine)
                    restart.late_at = time.monotonic() + self.recipe.cluster.start_timeout_seconds
            elif ray.wait([restart.started], timeout=0)[0]:
                starting = Wait("starting", self.recipe.cluster.start_timeout_seconds, EngineError, None)
                answer = starting.answer_of(restart.started, engine)
                over[engine] = answer if isinstance(answer, MegagrpoError) else None
            elif time.monotonic() > restart.late_at:
                given = f"nothing after {self.recipe.cluster.start_timeout_seconds:g} s"
                fix = "look at its log; cluster.start_timeout_seconds is the longest wait"
                over[engine] = EngineError(Problem(f"starting: no answer from {engine}", given, fix=fix))
        for engine in over:
            del self.restarts[engine]
        return over

    def manifests(self) -> dict[str, list[Manifest]]:
        """Returns the manifests of each engine's ranks. A restarted engine has the same: the recipe is the same."""
        if not self._manifests:
            manifests = {name: ask_engine(actor, "manifests") for name, actor in self.by_name.items()}
            self._manifests = self._wait(manifests, "manifests")
        return self._manifests

    def places(self) -> tuple[Place, ...]:
        """Returns node and device of every rank of every engine, in the order of `manifests`."""
        places: list[Place] = []
        for name, manifests in self.manifests().items():
            bundles = self.runtime.devices.bundles_of_engine[self._index[name]]  # an external engine has none
            places += self.runtime.places_of(bundles) or [Place(name)] * len(manifests)
        return tuple(places)

    def give_up(self) -> None:
        """Ends all engines, even those that are busy."""
        self._end(list(self.by_name), CLOSE_SECONDS)

    def close(self) -> None:
        """Ends the engines and their servers: in up to 30 s, or 5 s for those that still start or have failed."""
        _, starting = ray.wait(list(self._starting.values()), num_returns=len(self._starting), timeout=0)
        begun = [name for name, start in self._starting.items() if start in starting]
        self._end([name for name in {*begun, *self.restarts} if name in self.by_name], CLOSE_SECONDS)
        self._end(list(self.by_name), END_SECONDS)

    def _end(self, engines: Sequence[str], patience_seconds: float) -> None:
        """Asks these engines to close, and kills them. They cannot be used afterwards."""
        end_actors([actor for name in engines for actor in self._actors_of(name)], patience_seconds)
        for name in engines:
            del self.by_name[name], self._other_nodes[name]

    def _wait(self, results: Mapping[str, ray.ObjectRef[Any]], doing: str, bar: str = "") -> dict[str, Any]:
        seconds = self.recipe.cluster.start_timeout_seconds
        return Wait(doing, seconds, EngineError, self.runtime.watch).for_all(results, bar)

    def _actors_of(self, engine: str) -> list[Any]:
        return [self.by_name[engine], *self._other_nodes[engine]]

    def _start(self, engine: str) -> ray.ObjectRef[None]:
        index, runtime, share = self._index[engine], self.runtime, self.runtime.devices.engine_share
        first, *further = runtime.devices.node_bundles(index) or ((),)  # an external engine has none
        self.by_name[engine] = runtime.start(EngineActor, first, share)
        others = [runtime.start(EngineNodeActor, bundles, share) for bundles in further]
        for node, other in enumerate(others, 1):
            other.prepare.remote(self._spec(index, node))
        self._other_nodes[engine] = others
        return self.by_name[engine].start.remote(self._spec(index), others)

    def _spec(self, index: int, node: int = 0) -> EngineSpec:
        bundles = self.runtime.devices.node_bundles(index)
        return EngineSpec(
            recipe=self.recipe,
            index=index,
            model_directory=str(self._model_directory),
            tokenizer_directory=str(self.tokenizer_directory),
            device=self.runtime.device,
            gpus=visible_gpus(self.runtime.places_of(bundles[node] if bundles else ()), self.runtime.places),
            api_key=os.environ.get(self.recipe.rollout.api_key_variable or ""),
            keeps_weights=self._keeps_weights,
        )

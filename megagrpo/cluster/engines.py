"""The engine's actor: the engine of a recipe, in the process that holds it or calls its server.

Each kind of engine is imported where it is made: an import takes seconds, and must follow prepare_process.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import ray

from megagrpo.cluster.actors import prepare_process
from megagrpo.errors import EngineError, MegagrpoError, Problem
from megagrpo.processes.imports import importing
from megagrpo.processes.ports import free_port
from megagrpo.recipe.defaults import dtype_name, run_directory
from megagrpo.recipe.schema import Recipe
from megagrpo.rollout.engine import Engine, MemoryTag, SoFar
from megagrpo.rollout.sglang.arguments import ServerNode, server_arguments, server_environment
from megagrpo.rollout.speeds import SPEED_REPORTS
from megagrpo.types import Request, Sample
from megagrpo.weights.boxes import Manifest, Place

if TYPE_CHECKING:
    from megagrpo.processes.store import StoreHost
    from megagrpo.rollout.sglang.server import Server
    from megagrpo.weights.plan import WeightPlan
    from megagrpo.weights.transport.choice import Channel

WATCH_SECONDS = 1.0


@dataclass(frozen=True)
class EngineSpec:
    """All that travels from the driver to the process of engine `index` of a recipe, which makes the engine from it.

    `gpus` are the GPUs that its process on one node sees (visible_gpus), as the node names them; empty on CPUs.
    `api_key` is that of an external server. With `keeps_weights` the engine samples from the weights of the model
    directory, or of the external server, and gets no update.
    """

    recipe: Recipe
    index: int
    model_directory: str
    tokenizer_directory: str
    device: str
    gpus: tuple[int | str, ...]
    api_key: str | None = field(repr=False)
    keeps_weights: bool = False

    @property
    def name(self) -> str:
        return f"engine {self.index}"

    @property
    def threads(self) -> int:
        """Returns this engine's share of the node's cores, as if all engines of the run were on this node."""
        return max(1, (os.cpu_count() or 1) // self.recipe.rollout.engines)


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


@ray.remote(max_restarts=0, concurrency_groups={"requests": 1, "samples": 1})
class EngineActor:
    """An actor with the methods of Engine (rollout/engine.py), for the driver. `update` combines three of them.

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

    def manifests(self) -> list[Manifest]:
        return self.engine.manifests()

    def connect(self, plan: WeightPlan, destinations: Sequence[int], channel: Channel) -> None:
        self.engine.connect(plan, destinations, channel)

    def update(self, version: int) -> Sequence[Mapping[str, int]]:
        """Receives a whole update and returns, by engine rank, the digests of what arrived.

        The driver compares them before it calls commit_update.
        """
        self.engine.begin_update(version)
        self.engine.receive(version)
        return self.engine.end_update(version)

    def keep_weights(self, version: int) -> None:
        self.engine.keep_weights(version)

    def bucket_digests(self, tensor: str, destinations: Sequence[int]) -> list[Mapping[str, Mapping[str, int]]]:
        return self.engine.bucket_digests(tensor, destinations)

    def commit_update(self, version: int) -> None:
        self.engine.commit_update(version)

    def release_memory(self, tags: Sequence[MemoryTag]) -> None:
        self.engine.release_memory(tags)

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
        self.server = _started_server(self.spec, node)

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
    recipe, rollout = spec.recipe, spec.recipe.rollout
    if rollout.engine == "transformers":
        with importing():
            from megagrpo.rollout.transformers_engine import TransformersEngine

        return TransformersEngine(
            spec.model_directory,
            device=spec.device,
            dtype=dtype_name(recipe, spec.device),
            # The last bits of a product depend on its number of rows.
            requests_at_once=1 if recipe.deterministic else rollout.requests_at_once,
            threads=spec.threads,
            pause=recipe.pause,
            tokenizer_directory=spec.tokenizer_directory,
            name=spec.name,
        )
    server = None
    if rollout.engine == "sglang":
        server = _server_on_nodes(spec, other_nodes) if other_nodes else _started_server(spec)
    try:
        if server:
            server.wait_until_ready(recipe.cluster.start_timeout_seconds)
        from megagrpo.rollout.sglang.client import Endpoint
        from megagrpo.rollout.sglang.engine import SglangEngine

        return SglangEngine(
            server or Endpoint(rollout.urls[spec.index], spec.api_key),
            name=spec.name,
            engine=spec.index,
            model_directory=spec.model_directory,
            layout=rollout.layout,
            dtype=dtype_name(recipe, spec.device),
            device=spec.device,
            requests_at_once=rollout.requests_at_once,
            timeout_seconds=rollout.timeout_seconds,
            control_timeout_seconds=recipe.weights.timeout_seconds,
            pause=recipe.pause,
            quantization=None if spec.keeps_weights else rollout.quantization,
            tokenizer_directory=spec.tokenizer_directory,
            keeps_weights=spec.keeps_weights,
        )
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
    server = _started_server(spec, nodes[0])
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


def _started_server(spec: EngineSpec, node: ServerNode | None = None) -> Server:
    from megagrpo.rollout.sglang.server import Server

    recipe, rollout = spec.recipe, spec.recipe.rollout
    of_sets = (one.response_tokens_max or 0 for one in recipe.eval.of_sets().values())
    arguments = server_arguments(
        model_directory=spec.model_directory,
        layout=rollout.layout,
        dtype=dtype_name(recipe, spec.device),
        device=spec.device,
        requests_at_once=rollout.requests_at_once,
        tokens_per_request=max(recipe.sequence_tokens_max, recipe.data.prompt_tokens_max + max(of_sets, default=0)),
        longest_pause_seconds=recipe.weights.timeout_seconds,
        options=rollout.sglang.model_extra or {},
        deterministic=bool(recipe.deterministic),
        quantization=None if spec.keeps_weights else rollout.quantization,  # the files are not in float8
        loads_weights=spec.keeps_weights,
    )
    environment = server_environment(spec.device, rollout.layout.ranks, spec.threads, spec.index)
    name = spec.name
    if node is not None:
        arguments, environment = arguments | node.arguments, environment | node.environment
        name = f"{name} node {node.rank}" if node.rank else name
    log = run_directory(recipe) / "logs" / f"{name.replace(' ', '_')}.log"
    return Server(arguments, name=name, log=log.absolute(), python=rollout.sglang.python, environment=environment)

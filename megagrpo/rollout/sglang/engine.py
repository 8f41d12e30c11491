"""One SGLang server as an engine: samples by HTTP, weight updates while it is paused. The server is one that megagrpo
started, or one that runs already."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megagrpo.errors import EngineError, MegagrpoError, Problem
from megagrpo.rollout.engine import Done, Engine, EngineSpec, MemoryTag, SoFar
from megagrpo.rollout.kinds import CACHES_ELSEWHERE
from megagrpo.rollout.requests import nothing_sampled
from megagrpo.rollout.server import Server
from megagrpo.rollout.sglang.arguments import OWNED
from megagrpo.rollout.sglang.client import (
    Answer,
    BrokenConnection,
    Endpoint,
    RequestGate,
    ServedRoutes,
    SglangClient,
    generate_body,
)
from megagrpo.tokenizer import end_tokens, load_tokenizer, response_texts
from megagrpo.types import FinishReason, Request, Sample
from megagrpo.weights.boxes import Manifest
from megagrpo.weights.families import read_architecture
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.plan import WeightPlan
from megagrpo.weights.sides import sglang as sglang_side
from megagrpo.weights.transport.choice import Channel
from megagrpo.weights.transport.sglang import ServerWeights

NOTHING_OPEN = "no weight-update session is open"  # how SGLang refuses /end_weight_update


AS_STARTED = {
    "attn_cp_size": 1, "moe_dp_size": 1, "dcp_size": 1, "moe_dense_tp_size": None, "enable_eplb": False,
    "ep_num_redundant_experts": 0, "speculative_algorithm": None,
}  # fmt: skip
"""Arguments that change what a server's ranks hold: values of servers that megagrpo starts."""


def check_server(info: Mapping[str, Any], spec: EngineSpec, architecture: Architecture) -> None:
    """Checks that the ranks of the server of this /server_info hold what the plan of a sync expects. Raises
    EngineError, naming all arguments that differ."""
    layout = spec.recipe.rollout.layout
    wanted: dict[str, object] = AS_STARTED | {"dp_size": 1, "dtype": spec.dtype}
    wanted |= {"tp_size": layout.tensor, "ep_size": layout.expert, "pp_size": layout.pipeline}
    wanted |= {"attn_dp_size": layout.attention_data}
    if layout.attention_data > 1:
        wanted |= {"enable_dp_lm_head": True}
    wanted |= {} if spec.quantization else {"quantization": None}  # ours is in config.json: SGLang may name it or not
    if architecture.experts and info.get("device") != "cpu":
        wanted |= {"moe_runner_backend": "triton"}
    if spec.routes is not None and not info.get("enable_return_routed_experts"):
        fix = "start the server with --enable-return-routed-experts, or set algorithm.routing: own"
        needed = "routes of tokens, which the recipe replays"
        raise EngineError(Problem(f"{spec.name}: the server", "enable_return_routed_experts False", needed, fix))
    if spec.routes is not None and (stores := [name for name in CACHES_ELSEWHERE if info.get(name)]):
        needed, fix = "a cache on the device alone: routes are not moved with it", "start it without, or routing: own"
        raise EngineError(Problem(f"{spec.name}: the server", f"{stores[0]} True", needed, fix))
    if "shared_experts" in architecture.recomputes:
        wanted |= {"disable_shared_experts_fusion": True}
    wrong = {argument: info.get(argument) for argument, value in wanted.items() if info.get(argument) != value}
    if wrong:
        given = ", ".join(f"{argument} {value}" for argument, value in wrong.items())
        needed = ", ".join(f"{argument} {wanted[argument]}" for argument in wrong)
        keys = sorted({owner for argument in wrong if (owner := OWNED[argument]).startswith(("rollout.", "model."))})
        fix = f"change {', '.join(keys)}, or start the server so" if keys else "start the server so"
        raise EngineError(Problem(f"{spec.name}: the server is not what the recipe says", given, needed, fix))


class SglangEngine(Engine):
    """An engine over a server of its own, which `close` ends, or over one that runs already, at rollout.urls.

    At most `rollout.requests_at_once` requests are on the way. A request that runs or waits `rollout.timeout_seconds`
    after it began is aborted with the tokens that it has. `weights.timeout_seconds` limits every other request to the
    server. The recipe's `pause` decides what an update does to running requests. A pipeline finishes them first.

    A server that megagrpo started has no weights until the first update; those of another are unknown. Raises
    EngineError if a server's layout or dtype is another, ModelError if SGLang cannot hold the model so, or if there is
    no tokenizer.

    With `keeps_weights` the engine samples from the weights that the server has, as version 0, and no update ever
    comes. A server of others is then asked for nothing but /generate, and not changed: it may be of any layout.
    """

    def __init__(self, spec: EngineSpec, server: Server | None = None) -> None:
        super().__init__(spec.name)
        recipe, rollout, keeps_weights = spec.recipe, spec.recipe.rollout, spec.keeps_weights
        self._server, self._fixed_version = server, 0 if keeps_weights else None
        architecture = read_architecture(spec.model_directory)
        held = spec.dtype, spec.device, spec.index, spec.quantization
        self._manifests = [
            sglang_side.manifest(architecture, rollout.layout, rank, *held) for rank in range(rollout.layout.ranks)
        ]
        self._tokenizer: Any = load_tokenizer(spec.tokenizer_directory)
        self._stops = end_tokens(spec.model_directory, self._tokenizer)
        self._timeout, self._pause = rollout.timeout_seconds, recipe.pause
        if server:
            server.wait_until_ready(recipe.cluster.start_timeout_seconds)
        endpoint = Endpoint(server.url, server.api_key) if server else Endpoint(rollout.urls[spec.index], spec.api_key)
        control_seconds = recipe.weights.timeout_seconds
        self._client = SglangClient(endpoint, failure=self._failure, timeout_seconds=control_seconds)
        self._gate = RequestGate(rollout.requests_at_once)
        self._paused = self._update_open = False
        self._released: set[MemoryTag] = set()
        self._ends: dict[int, asyncio.Event] = {}
        """By ticket of a request: event that ends it with the tokens that it has. Lives on the client's loop."""
        self._routes: ServedRoutes | None = None
        if sizes := spec.routes:
            self._routes = ServedRoutes(sizes, len(architecture.layers), architecture.expert_layers)
        self._answers: dict[int, Answer] = {}
        """By ticket of a request that was sent. Lives there too."""
        try:
            self._info = self._client.get("/server_info")
            self._streams = bool(self._info.get("incremental_streaming_output"))
            if server or not keeps_weights:
                check_server(self._info, spec, architecture)
            if not (server or keeps_weights):
                # SGLang begins no update while one is open, which an earlier run may have left. A server that is paused
                # stays so until the first commit, because its weights may be a mixture of two versions.
                try:
                    self._end_update()
                except EngineError as error:
                    if NOTHING_OPEN not in str(error):
                        raise
        except MegagrpoError:
            self._client.close()
            raise
        self._weights = ServerWeights(self._client.post, spec.name, self._manifests, self._info)
        if not keeps_weights and (not server or self._info.get("load_format") == "dummy"):
            self.lose_weights()

    # --- samples ------------------------------------------------------------------------------------------------------

    def begin(self, requests: Mapping[int, Request], done: Done) -> None:
        """Starts to sample these requests. If an update begins meanwhile, those that are not sent yet wait for its end,
        and those that run are paused as the recipe says."""
        self.check_requests(requests.values())
        self._resume_memory(["kv_cache"])
        self._client.run(self._begin(requests, done))

    def give_back(self, tickets: Collection[int]) -> None:
        self._client.run(self._give_back(tickets))

    def so_far(self) -> SoFar:
        """Returns the tokens up to a server's last answer: none if it was started without streams of increments."""
        return self._client.run(self._so_far())

    def rests(self) -> bool:
        return self._server is None or self._gate.held or not self._answers

    async def _so_far(self) -> SoFar:
        return SoFar.of({ticket: answer.so_far() for ticket, answer in self._answers.items()})

    async def _begin(self, requests: Mapping[int, Request], done: Done) -> None:
        self._ends |= {ticket: asyncio.Event() for ticket in requests}
        for ticket, request in requests.items():
            self._client.start(self._answer(ticket, request, done))

    async def _give_back(self, tickets: Collection[int]) -> None:
        for ticket in self._ends.keys() & tickets:
            self._ends[ticket].set()

    async def _answer(self, ticket: int, request: Request, done: Done) -> None:
        end = self._ends[ticket]
        timer = asyncio.get_running_loop().call_later(self._timeout, end.set)
        try:
            answer: Sample | MegagrpoError = await self._generate_one(ticket, request, end)
        except MegagrpoError as error:
            answer = error
        finally:
            timer.cancel()
            del self._ends[ticket]
            self._answers.pop(ticket, None)
        done(ticket, answer)

    async def _generate_one(self, ticket: int, request: Request, end: asyncio.Event) -> Sample:
        while True:
            async with self._gate.turn(end) as wanted:
                if not wanted:
                    begun = request.begun or nothing_sampled(request)
                    return replace(begun, text=self._text(begun.tokens, "abort"))
                sent_to = self.version
                try:
                    answer = await self._send(ticket, request, end)
                except BrokenConnection:
                    # The seed is the same, and a server that still runs has dropped the first request.
                    again = replace(request, begun=self._answers[ticket].so_far())
                    answer = await self._send(ticket, again, end)
            sample = answer.sample(self._text, self.name, self._stops)
            # A request that was sent to one version, and has only tokens of later ones, waited in the server while
            # weights were written in place: it used keys and values of its prompt that the old weights had made.
            new = sample.versions[len(sample.versions) - answer.count :]
            stale = self._pause == "in_place" and sample.finish != "abort" and (new > sent_to).all()
            if not stale:
                return sample

    async def _send(self, ticket: int, request: Request, end: asyncio.Event) -> Answer:
        rid = uuid.uuid4().hex
        routes = self._routes if request.sampling.routes else None
        answer = self._answers[ticket] = Answer(request, self._fixed_version, routes)
        given = rid, self.version, self._stops
        body = generate_body(request, *given, streams=self._streams, routes=routes is not None)
        try:
            await self._client.generate(body, answer, end, held=lambda: self._gate.held)
        except BrokenConnection:
            if not answer.ended:
                raise
        except asyncio.CancelledError:
            # SGLang notices a closed connection late, and would go on sampling until then.
            self._client.start(self._client.abort(rid))
            raise
        return answer

    def _text(self, tokens: np.ndarray, finish: FinishReason) -> str:
        return response_texts(self._tokenizer, [(tokens, finish)])[0]

    # --- weights ------------------------------------------------------------------------------------------------------

    def manifests(self) -> list[Manifest]:
        return self._manifests

    def connect(self, plan: WeightPlan, destinations: Sequence[int], channel: Channel) -> None:
        was_open = self._update_open
        self._open_update()
        self._weights.connect(plan, destinations, channel)
        self.oldest = 0
        if not was_open:
            self._end_update()

    def pause(self) -> None:
        self._client.run(self._gate.hold())
        if self._pause == "finish":
            self._client.run(self._gate.drained())
        if not self._paused:
            self._client.post("/pause_generation", {"mode": "in_place" if self._pause == "finish" else self._pause})
            self._paused = True

    def open_update(self) -> None:
        self._resume_memory(["weights"])
        self._open_update()

    def receive_weights(self, version: int) -> None:
        self._weights.receive(version)

    def close_update(self) -> list[Mapping[str, int]]:
        arrived = self._weights.digests()
        self._end_update()
        return arrived

    def bucket_digests(self, tensor: str, destinations: Sequence[int]) -> list[Mapping[str, Mapping[str, int]]]:
        self._open_update()
        by_rank = self._weights.bucket_digests(tensor, destinations)
        self._end_update()
        return by_rank

    def label_weights(self, version: int) -> None:
        self._client.post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})
        # In place, running requests use the cache. Others do not take keys and values of other versions from it.
        if self._pause != "in_place" and "kv_cache" not in self._released:
            self._client.post("/flush_cache", {})
        self._client.post("/continue_generation", {})
        self._paused = False

    def resume(self) -> None:
        self._client.run(self._gate.release())

    def _open_update(self) -> None:
        if not self._update_open:
            self._client.post("/begin_weight_update", {})
            self._update_open = True

    def _end_update(self) -> None:
        self._client.post("/end_weight_update", {})
        self._update_open = False

    # --- memory -------------------------------------------------------------------------------------------------------

    def release_memory(self, tags: Sequence[MemoryTag] = ("weights", "kv_cache")) -> None:
        # Without enable_memory_saver, SGLang only pretends to, or ends.
        wanted = [tag for tag in tags if tag not in self._released]
        if not self._info.get("enable_memory_saver") or not wanted:
            return
        if count := self._client.run(self._gate.count()):
            where = f"{self.name}: release_memory"
            raise EngineError(Problem(where, given=f"{count} requests that run", needed="an engine that is idle"))
        self._client.post("/release_memory_occupation", {"tags": wanted})
        self._released |= set(wanted)
        if "weights" in wanted:
            self.lose_weights()

    def lose_weights(self) -> None:
        """Holds requests until the next update's end."""
        super().lose_weights()
        self._client.run(self._gate.hold())

    def _resume_memory(self, tags: Sequence[MemoryTag]) -> None:
        """Takes back memory that was released. Weights come back with what an update brings."""
        wanted = [tag for tag in tags if tag in self._released]
        if wanted:
            self._client.post("/resume_memory_occupation", {"tags": wanted})
            self._released -= set(wanted)

    # --- the server ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        super().close()
        self._weights.close()
        self._client.close()
        if self._server is not None:
            self._server.close()

    def _failure(self, action: str, given: str) -> Problem:
        """Returns the problem of a failed request, with the end of the server's log if megagrpo started it."""
        what = f"{action} failed"
        if self._server is not None:
            return self._server.problem(what, given)
        return Problem(f"{self.name}: {what}", given=given, needed="the server that rollout.urls names")

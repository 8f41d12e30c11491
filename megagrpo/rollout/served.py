"""An engine over a server, of any kind that streams: its requests, and the pause that a weight update makes in them."""

from __future__ import annotations

import asyncio
import uuid
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megagrpo.errors import EngineError, MegagrpoError, Problem
from megagrpo.rollout.answers import Answer
from megagrpo.rollout.client import BrokenConnection, Endpoint, EngineClient, RequestGate
from megagrpo.rollout.engine import Done, Engine, EngineSpec, MemoryTag, SoFar
from megagrpo.rollout.requests import nothing_sampled
from megagrpo.rollout.server import Server
from megagrpo.tokenizer import end_tokens, load_tokenizer, response_texts
from megagrpo.types import FinishReason, Request, Sample
from megagrpo.weights.boxes import Manifest
from megagrpo.weights.plan import WeightPlan
from megagrpo.weights.transport.choice import Channel
from megagrpo.weights.transport.loader import ServedWeights


class ServedEngine(Engine):
    """An engine over a server of its own, which `close` ends, or over one that runs already, at rollout.urls.

    At most `rollout.requests_at_once` requests are on the way. A request that runs or waits `rollout.timeout_seconds`
    after it began is aborted with the tokens that it has. `weights.timeout_seconds` limits every other request to the
    server. The recipe's `pause` decides what an update does to running requests. A pipeline finishes them first.

    A server that megagrpo started has no weights until the first update; those of another are unknown. With
    `keeps_weights` the engine samples from the weights that the server has, as version 0, and no update ever comes.

    A kind of engine implements `body`, `answer`, the steps of an update that differ, and those of `release_memory`.
    """

    _weights: ServedWeights
    """The weights of its server, which a kind of engine sets."""

    def __init__(
        self, spec: EngineSpec, server: Server | None, manifests: list[Manifest], client: type[EngineClient]
    ) -> None:
        super().__init__(spec.name)
        recipe, rollout = spec.recipe, spec.recipe.rollout
        self._server, self._fixed_version = server, 0 if spec.keeps_weights else None
        self._manifests = manifests
        self._tokenizer: Any = load_tokenizer(spec.tokenizer_directory)
        self._stops = end_tokens(spec.model_directory, self._tokenizer)
        self._timeout, self._pause = rollout.timeout_seconds, recipe.pause
        if server:
            server.wait_until_ready(recipe.cluster.start_timeout_seconds)
        endpoint = Endpoint(server.url, server.api_key) if server else Endpoint(rollout.urls[spec.index], spec.api_key)
        self._client = client(endpoint, failure=self._failure, timeout_seconds=recipe.weights.timeout_seconds)
        self._gate = RequestGate(rollout.requests_at_once)
        self._paused = False
        self._released: set[MemoryTag] = set()
        self._ends: dict[int, asyncio.Event] = {}
        """By ticket of a request: event that ends it with the tokens that it has. Lives on the client's loop."""
        self._answers: dict[int, Answer] = {}
        """By ticket of a request that was sent. Lives there too."""

    # --- samples ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def body(self, request: Request, request_id: str) -> dict[str, Any]:
        """Returns what is posted to generate one sample."""

    @abstractmethod
    def answer(self, request: Request) -> Answer:
        """Makes the answer into which a request's parts are read."""

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
        except (LookupError, TypeError, ValueError) as error:
            call = f"POST {self._client.GENERATE}"
            answer = EngineError(self._failure(call, f"an answer of another form: {error!r}"))
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
                    # A server that still runs has dropped the first request.
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
        request_id = uuid.uuid4().hex
        answer = self._answers[ticket] = self.answer(request)
        body = self.body(request, request_id)
        try:
            await self._client.generate(body, request_id, answer, end, held=lambda: self._gate.held)
        except BrokenConnection:
            if not answer.ended:
                raise
        except asyncio.CancelledError:
            # A server notices a closed connection late, and would go on sampling until then.
            self._client.start(self._client.abort(request_id))
            raise
        return answer

    def _text(self, tokens: np.ndarray, finish: FinishReason) -> str:
        return response_texts(self._tokenizer, [(tokens, finish)])[0]

    # --- weights ------------------------------------------------------------------------------------------------------

    def manifests(self) -> list[Manifest]:
        return self._manifests

    def connect(self, plan: WeightPlan, destinations: Sequence[int], channel: Channel) -> None:
        self._weights.connect(plan, destinations, channel)
        self.oldest = 0

    def open_update(self) -> None:
        self._resume_memory(["weights"])

    def receive_weights(self, version: int) -> None:
        self._weights.receive(version)

    def close_update(self) -> list[Mapping[str, int]]:
        return self._weights.digests()

    def bucket_digests(self, tensor: str, destinations: Sequence[int]) -> list[Mapping[str, Mapping[str, int]]]:
        return self._weights.bucket_digests(tensor, destinations)

    def pause(self) -> None:
        self._client.run(self._gate.hold())
        if self._pause == "finish":
            self._client.run(self._gate.drained())
        if not self._paused:
            self.pause_server()
            self._paused = True

    @abstractmethod
    def pause_server(self) -> None:
        """Stops the server's sampling, and returns once no step of the model uses the weights."""

    def resume(self) -> None:
        self._client.run(self._gate.release())

    # --- memory -------------------------------------------------------------------------------------------------------

    @abstractmethod
    def can_release(self) -> bool:
        """Returns whether the server was started so that it can free device memory."""

    @abstractmethod
    def release_of_server(self, tags: Sequence[MemoryTag]) -> None:
        """Frees this memory of the server."""

    @abstractmethod
    def resume_of_server(self, tags: Sequence[MemoryTag]) -> None:
        """Takes this memory of the server back."""

    def release_memory(self, tags: Sequence[MemoryTag] = ("weights", "kv_cache")) -> None:
        wanted = [tag for tag in tags if tag not in self._released]
        if not self.can_release() or not wanted:
            return
        if count := self._client.run(self._gate.count()):
            where = f"{self.name}: release_memory"
            raise EngineError(Problem(where, given=f"{count} requests that run", needed="an engine that is idle"))
        self.release_of_server(wanted)
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
            self.resume_of_server(wanted)
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


def require_arguments(
    engine: str, info: Mapping[str, Any], wanted: Mapping[str, object], owned: Mapping[str, str]
) -> None:
    """Raises EngineError, naming all arguments of a running server that are not as wanted. `owned`: the recipe's key
    for each argument."""
    wrong = {argument: info.get(argument) for argument, value in wanted.items() if info.get(argument) != value}
    if not wrong:
        return
    given = ", ".join(f"{argument} {value}" for argument, value in wrong.items())
    needed = ", ".join(f"{argument} {wanted[argument]}" for argument in wrong)
    keys = sorted({owner for argument in wrong if (owner := owned[argument]).startswith(("rollout.", "model."))})
    fix = f"change {', '.join(keys)}, or start the server so" if keys else "start the server so"
    raise EngineError(Problem(f"{engine}: the server is not what the recipe says", given, needed, fix))

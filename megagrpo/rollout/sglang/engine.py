"""One SGLang server as an engine: samples by HTTP, weight updates while it is paused. Ours or somebody else's."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, Literal

import numpy as np

from megagrpo.errors import EngineError, MegagrpoError, Problem
from megagrpo.recipe.schema import EngineLayoutConfig
from megagrpo.rollout.engine import UpdateProtocol, check_prompts
from megagrpo.rollout.sglang.client import BrokenConnection, Endpoint, SglangClient, new_request_id
from megagrpo.rollout.sglang.samples import aborted_sample, read_sample
from megagrpo.rollout.sglang.server import Server
from megagrpo.rollout.sglang.traffic import Traffic
from megagrpo.rollout.sglang.weights import ServerWeights
from megagrpo.tokenizer import load_tokenizer, response_texts
from megagrpo.types import FinishReason, Request, Sample
from megagrpo.weights.boxes import Manifest
from megagrpo.weights.executors.meeting import Meeting
from megagrpo.weights.executors.ways import Way
from megagrpo.weights.families import read_architecture
from megagrpo.weights.plan import WeightPlan
from megagrpo.weights.sides import sglang as sglang_side

Pause = Literal["abort", "retract", "in_place"]
MemoryTag = Literal["weights", "kv_cache"]
NOTHING_OPEN = "no weight-update session is open"  # how SGLang refuses /end_weight_update


class SglangEngine:
    """Implements Engine (rollout/engine.py) over a Server of ours, which `close` ends, or somebody else's Endpoint.

    `model_directory` holds the model's config.json as this process sees it; `engine` is this engine's number. At most
    `requests_at_once` requests are on the way. What still runs or waits `timeout_seconds` after `generate` was called
    is aborted with the tokens that it has. `control_timeout_seconds` limits every other request to the server. `pause`
    is what becomes of running requests when an update begins (weights.pause in the recipe).

    The weights of a server that is not ours are unknown until the first update. Raises EngineError if a server is not
    as `layout` and `dtype` say, ModelError if SGLang cannot hold the model so, or if there is no tokenizer.
    """

    def __init__(
        self,
        server: Server | Endpoint,
        *,
        name: str,
        engine: int,
        model_directory: str,
        layout: EngineLayoutConfig,
        dtype: str,
        device: str,
        requests_at_once: int,
        timeout_seconds: float,
        control_timeout_seconds: float,
        pause: Pause = "retract",
        tokenizer_directory: str | None = None,
    ) -> None:
        self._server = server if isinstance(server, Server) else None
        architecture = read_architecture(model_directory)
        self._manifests = [
            sglang_side.manifest(architecture, layout, rank, dtype, device, engine) for rank in range(layout.tensor)
        ]
        self._tokenizer: Any = load_tokenizer(tokenizer_directory or model_directory)
        self._protocol = UpdateProtocol(name)
        self._pause, self._timeout, self._control_timeout = pause, timeout_seconds, control_timeout_seconds
        endpoint = Endpoint(server.url, server.api_key)
        self._client = SglangClient(endpoint, failure=self._failure, timeout_seconds=control_timeout_seconds)
        self._traffic = Traffic(requests_at_once)
        self._paused = self._update_open = False
        self._released: set[MemoryTag] = set()
        try:
            self._info = self._client.get("/server_info")
            self._check_server(layout, dtype)
            if self._server is None:
                self._end_left_over_update()
        except MegagrpoError:
            self._client.close()
            raise
        self._weights = ServerWeights(self._client.post, name, self._manifests, self._info, device)
        if self._server is None:
            self._protocol.lose_weights()

    # --- samples ------------------------------------------------------------------------------------------------------

    def generate(self, requests: Sequence[Request]) -> list[Sample]:
        found = dict(self.generate_stream(requests))
        return [found[i] for i in range(len(requests))]

    def generate_stream(self, requests: Sequence[Request]) -> Iterator[tuple[int, Sample]]:
        """Index and sample of each request as it finishes. Requests that still run when the caller stops are aborted.

        An update may begin meanwhile, in another thread: what is not sent yet then waits for its end, and what runs is
        paused as the recipe says.
        """
        self._protocol.check_serving()
        check_prompts(requests, self._protocol.name)
        self.resume_memory(["kv_cache"])
        return self._stream(requests)

    def _stream(self, requests: Sequence[Request]) -> Iterator[tuple[int, Sample]]:
        finished: queue.SimpleQueue[tuple[int, Sample] | BaseException] = queue.SimpleQueue()
        work = self._client.start(self._generate_all(requests, finished))

        def report(done: Future[None]) -> None:
            finished.put(CancelledError() if done.cancelled() else done.exception() or EOFError())

        work.add_done_callback(report)
        try:
            for _ in requests:
                outcome = finished.get()
                if isinstance(outcome, BaseException):
                    raise outcome
                yield outcome
        finally:
            work.cancel()

    def abort(self) -> None:
        """Ends all requests of this engine: they are answered soon, with the tokens that they have, as aborted."""
        self._client.run(self._abort())

    async def _generate_all(
        self, requests: Sequence[Request], finished: queue.SimpleQueue[tuple[int, Sample] | BaseException]
    ) -> None:
        deadline = asyncio.get_running_loop().time() + self._timeout

        async def one(index: int) -> None:
            finished.put((index, await self._generate_one(requests[index], deadline)))

        tasks = [asyncio.ensure_future(one(index)) for index in range(len(requests))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _generate_one(self, request: Request, deadline: float) -> Sample:
        while True:
            async with self._traffic.turn(deadline) as wanted:
                if not wanted:
                    return aborted_sample(request)
                sent_to = self._protocol.version
                try:
                    answer = await self._send(request, deadline)
                except BrokenConnection:
                    # Its seed is the same, and a server that lives has dropped the first.
                    answer = await self._send(request, deadline)
            sample = read_sample(request, answer, self._text, self._protocol.name)
            if not self._began_in_an_update(sample, sent_to):
                return sample

    def _began_in_an_update(self, sample: Sample, sent_to: int) -> bool:
        """Whether it was sent to one version and is marked as wholly of later ones. It waited in the server while
        weights were written in place, and used a prompt's keys and values of the old ones: sample it anew."""
        return self._pause == "in_place" and sample.finish != "abort" and bool((sample.versions > sent_to).all())

    async def _send(self, request: Request, deadline: float) -> Mapping[str, Any]:
        rid = new_request_id()
        left = max(0.0, deadline - asyncio.get_running_loop().time())
        with self._traffic.running(rid):
            try:
                return await self._client.generate(request, rid, left)
            except asyncio.CancelledError:
                # SGLang notices only later that nobody listens, and would go on sampling until then.
                self._client.start(self._client.abort(rid))
                raise

    async def _abort(self) -> None:
        for rid in self._traffic.give_up():
            await self._client.abort(rid)

    def _text(self, tokens: np.ndarray, finish: FinishReason) -> str:
        return response_texts(self._tokenizer, [(tokens, finish)])[0]

    # --- weights ------------------------------------------------------------------------------------------------------

    def manifests(self) -> list[Manifest]:
        return self._manifests

    def connect(
        self, plan: WeightPlan, destinations: Sequence[int], way: Way, meeting: Meeting, bucket_bytes: int
    ) -> None:
        was_open = self._update_open
        self._open_update()
        self._weights.connect(plan, destinations, way, meeting, bucket_bytes)
        if not was_open:
            self._end_update()

    def begin_update(self, version: int) -> None:
        self._protocol.begin(version)
        self._client.run(self._traffic.hold())
        if not self._paused:
            self._client.post("/pause_generation", {"mode": self._pause})
            self._paused = True
        self.resume_memory(["weights"])
        self._open_update()

    def receive(self, version: int) -> None:
        self._protocol.check_receiving()
        self._weights.receive(version)

    def end_update(self, version: int) -> list[Mapping[str, int]]:
        self._protocol.check_receiving()
        arrived = self._weights.digests()
        self._end_update()
        self._protocol.end(version)
        return arrived

    def bucket_digests(self, tensor: str, destinations: Sequence[int]) -> list[Mapping[str, Mapping[str, int]]]:
        self._open_update()
        found = self._weights.bucket_digests(tensor, destinations)
        self._end_update()
        return found

    def commit_update(self, version: int) -> None:
        self._protocol.check_commit(version)
        self._client.post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})
        if self._pause != "in_place" and "kv_cache" not in self._released:
            self._client.post("/flush_cache", {})
        self._continue()
        self._protocol.commit(version)
        if self._pause == "in_place":
            # Requests that run keep what they computed with the old weights, and the cache cannot be flushed around
            # them: the next ones wait until they have ended and it has been.
            self._client.start(self._flush_when_drained())
        else:
            self._client.run(self._traffic.release())

    def _open_update(self) -> None:
        if not self._update_open:
            self._client.post("/begin_weight_update", {})
            self._update_open = True

    def _end_update(self) -> None:
        self._client.post("/end_weight_update", {})
        self._update_open = False

    def _end_left_over_update(self) -> None:
        """Who spoke to this server before us may have died in an update, and SGLang begins none while one is open.

        If it was left paused it stays so until our first commit: its weights may be a mixture.
        """
        try:
            self._end_update()
        except EngineError as error:
            if NOTHING_OPEN not in str(error):
                raise

    def _continue(self) -> None:
        self._client.post("/continue_generation", {})
        self._paused = False

    async def _flush_when_drained(self) -> None:
        if not await self._traffic.drained():
            return
        try:
            await self._client.post_async("/flush_cache", {}, self._control_timeout)
        except MegagrpoError as error:
            await self._traffic.fail(error)
        else:
            await self._traffic.release()

    # --- memory -------------------------------------------------------------------------------------------------------

    @property
    def can_release_memory(self) -> bool:
        """Whether the server was started with enable_memory_saver. Without it, SGLang only pretends, or ends."""
        return bool(self._info.get("enable_memory_saver"))

    def release_memory(self, tags: Sequence[MemoryTag] = ("weights", "kv_cache")) -> None:
        """Gives device memory to others, where the server can; nothing may run. Without "weights" it has no policy: an
        update must follow before it generates, and takes them back; the cache comes back with the next requests."""
        wanted = [tag for tag in tags if tag not in self._released]
        if not self.can_release_memory or not wanted:
            return
        if count := self._client.run(self._traffic.count()):
            where = f"{self._protocol.name}: release_memory"
            raise EngineError(Problem(where, given=f"{count} requests that run", needed="an engine that is idle"))
        self._client.post("/release_memory_occupation", {"tags": wanted})
        self._released |= set(wanted)
        if "weights" in wanted:
            self._protocol.lose_weights()

    def resume_memory(self, tags: Sequence[MemoryTag] = ("weights", "kv_cache")) -> None:
        """Takes back what was released, where the server can. Weights come back with what an update brings."""
        wanted = [tag for tag in tags if tag in self._released]
        if wanted:
            self._client.post("/resume_memory_occupation", {"tags": wanted})
            self._released -= set(wanted)

    # --- the server ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        self._protocol.close()
        self._weights.close()
        self._client.close()
        if self._server is not None:
            self._server.close()

    def _check_server(self, layout: EngineLayoutConfig, dtype: str) -> None:
        wanted = {"tp_size": layout.tensor, "ep_size": layout.expert, "pp_size": 1, "dp_size": 1, "dtype": dtype}
        wrong = {name: self._info.get(name) for name, value in wanted.items() if self._info.get(name) != value}
        if wrong:
            raise EngineError(
                Problem(
                    f"{self._protocol.name}: the server is not what the recipe says",
                    given=", ".join(f"{name} {value}" for name, value in wrong.items()),
                    needed=", ".join(f"{name} {wanted[name]}" for name in wrong),
                    fix="change rollout.layout or model.dtype, or start the server so",
                )
            )

    def _failure(self, asked: str, given: str) -> Problem:
        """What a request to the server came to, with the end of its log if it is ours."""
        what = f"{asked} failed"
        if self._server is not None:
            return self._server.problem(what, given)
        return Problem(f"{self._protocol.name}: {what}", given=given, needed="the server that rollout.urls names")

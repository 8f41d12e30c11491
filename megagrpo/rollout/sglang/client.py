"""The HTTP client of one SGLang server: many generations at once, control requests one by one. Knows no weights.

The body of /generate, and its answer, whole or in parts as they are sampled, are those of SGLang 0.5.23.
"""

from __future__ import annotations

import asyncio
import base64
import json
import threading
import urllib.request
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import aiohttp
import numpy as np

from megagrpo.errors import EngineError, Problem
from megagrpo.rollout.requests import after_begun
from megagrpo.routes import FIX, Routes, RouteSizes
from megagrpo.types import FinishReason, KeptSets, Request, Sample

CONNECT_ATTEMPTS = 3
CONNECT_PAUSE_SECONDS = 0.5
ABORT_SECONDS = 30.0  # an aborted request is answered at the next token; this is for a server that is stuck
ABORT_AGAIN_SECONDS = 5.0  # an abort that comes before its request does nothing
CLOSE_SECONDS = 5.0
LONGEST_MESSAGE = 500
MODEL_INFO_SECONDS = 60.0
EVENTS = "text/event-stream"
TOKENS_PER_PART = 50
"""Tokens per part of a stream. SGLang's scheduler sends as many at once to its HTTP server if nothing is streamed."""
FINISHES: Mapping[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
Result = TypeVar("Result")


def generate_body(
    request: Request, rid: str, version: int, stops: Collection[int], *, streams: bool, routes: bool = False
) -> dict[str, Any]:
    """Returns the body of /generate for one sample; the answer comes in parts if it `streams`. It shares keys and
    values of its prompt only with requests of the same weight version: others' may be of other weights. With n > 1, all
    samples of a prompt would have the seed of the first, could not be aborted alone, and would be answered together.
    `routes`: the answer is to have those of all tokens that were read, which that of an aborted request never has.

    stops: tokens that end every response. SGLang itself knows those of the model's files, but has no tokenizer."""
    sampling = request.sampling
    return {
        "rid": rid,
        "input_ids": list(request.read),
        "return_logprob": True,
        **({"return_routed_experts": True} if routes else {}),
        **({"return_sampling_mask": True} if sampling.kept_sets else {}),
        "extra_key": str(version),
        "stream": streams,
        "sampling_params": {
            "max_new_tokens": request.tokens_left,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "stop_token_ids": sorted({*sampling.stop_tokens, *stops}),
            "sampling_seed": request.seed,
            "stream_interval": TOKENS_PER_PART,
        },
    }


class Answer:
    """A server's answer to one request. A server with incremental_streaming_output sends each token once.

    `version`: of all tokens, whatever the server calls its weights; None: as the server reports for each token.
    `routes`: the sizes of the routes that were asked for. None: there are none.
    """

    def __init__(self, request: Request, version: int | None = None, routes: ServedRoutes | None = None) -> None:
        self.request, self._version, self._routes = request, version, routes
        self._tokens, self._logprobs, self._sets = array("i"), array("f"), list[np.ndarray]()
        self._versions: np.ndarray | None = np.zeros(0, np.int32)
        """Versions of the first tokens, as far as the server has reported. None: one is missing or is not a number."""
        self._meta: Mapping[str, Any] = {}
        self._agree = True

    def add(self, part: Mapping[str, Any]) -> None:
        meta = self._meta = part["meta_info"]
        # SGLang ends a request that waits with tokens that it has sent before, after those that it has not.
        new = meta["completion_tokens"] - len(self._tokens)
        tokens, entries = part["output_ids"][:new], (meta.get("output_token_logprobs") or [])[:new]
        self._agree &= len(tokens) == new and [entry[1] for entry in entries] == tokens
        logprobs = [entry[0] for entry in entries]
        if self.request.sampling.kept_sets:
            logprobs = (meta.get("output_token_sampling_logprobs") or [])[:new]  # renormalised over the sets
            sets = (meta.get("output_token_sampling_mask") or [])[:new]
            self._agree &= all(sets)
            self._sets += [np.array(one or [], np.int64) for one in sets]
            if (meta.get("finish_reason") or {}).get("type") == "abort":
                tokens = tokens[: len(sets)]  # SGLang sends no sets at the end of a request that waits
        self._tokens.extend(tokens)
        self._logprobs.extend(logprobs)
        spans = meta.get("weight_versions")
        if self._version is not None:
            spans = [{"version": self._version, "start": 0, "end": len(self._tokens)}]
        elif spans is None and self.ended:
            spans = [{"version": meta.get("weight_version"), "start": 0, "end": len(self._tokens)}]
        if spans is not None:
            self._versions = _versions(spans, len(self._tokens))

    @property
    def count(self) -> int:
        """Returns the number of tokens."""
        return len(self._tokens)

    @property
    def ended(self) -> bool:
        return bool(self._meta.get("finish_reason"))

    def so_far(self) -> Sample:
        """Returns the tokens whose versions are known, after those of `request.begun`, without text."""
        versions = np.zeros(0, np.int32) if self._versions is None else self._versions
        return self._after_begun(versions, "abort" if not self.ended else "length")

    def sample(
        self, text_of: Callable[[np.ndarray, FinishReason], str], engine: str, stops: Collection[int] = ()
    ) -> Sample:
        """Returns the whole sample, once the answer has ended. stops: tokens that end every response.

        Raises EngineError if tokens, logprobs and weight versions do not belong together.
        """
        meta = self._meta
        finish = FINISHES.get((meta.get("finish_reason") or {}).get("type", ""))
        versions = self._versions
        where = f"{engine}: sample {self.request.index} of prompt {self.request.prompt_id}"
        if self.request.sampling.kept_sets:
            KeptSets.of(self._sets).require(np.array(self._tokens), where)
        agree = self._agree and len(self._logprobs) == self.count and np.isfinite(np.array(self._logprobs)).all()
        if finish is None or versions is None or len(versions) != self.count or not agree:
            raise EngineError(
                Problem(
                    f"{engine}: an answer for prompt {self.request.prompt_id}",
                    given=f"{self.count} tokens, {len(self._logprobs)} logprobs (or some of other tokens, or some that "
                    f"are not finite), finish_reason {meta.get('finish_reason')}, "
                    f"weight_versions {meta.get('weight_versions')}",
                    needed="a finite logprob for each token, a known end, and a weight version of this run for each",
                )
            )
        reported = finish
        # SGLang reports abort even if the last token ends the response: resumed, it would have tokens after its end.
        if finish == "abort" and self.count and self._tokens[-1] in (*stops, *self.request.sampling.stop_tokens):
            finish = "stop"
        elif finish == "abort" and self.count == self.request.tokens_left:
            finish = "length"
        routes, tokens = None, len(self.request.read) + self.count
        # SGLang has no routes of an aborted request.
        if self._routes is not None and (meta.get("routed_experts") is not None or reported != "abort"):
            routes = self._routes.read(meta.get("routed_experts") or "", where, tokens)
        sample = self._after_begun(versions, finish, routes)
        return replace(sample, text=text_of(sample.tokens, finish))

    def _after_begun(self, versions: np.ndarray, finish: FinishReason, routes: Routes | None = None) -> Sample:
        request, kept = self.request, None
        if request.sampling.kept_sets:
            kept = KeptSets.of(self._sets[: len(versions)])
            versions = versions[: len(kept.ends)]
        known = len(versions)
        tokens, logprobs = np.array(self._tokens[:known], np.int32), np.array(self._logprobs[:known], np.float32)
        sample = Sample(request.prompt_id, request.index, tokens, logprobs, versions, finish, "", None, routes, kept)
        return after_begun(request, sample)


@dataclass(frozen=True)
class ServedRoutes:
    """The sizes of a model's routes, and of SGLang's answers, which have dense layers as well."""

    sizes: RouteSizes
    layers: int
    with_experts: Sequence[int]  # of these, those with experts

    def read(self, answer: str, where: str, tokens: int) -> Routes:
        """Returns the routes of a sequence, from int32 [tokens read, layers, experts per token] in base64. Raises
        EngineError if they cannot be its routes."""
        values = np.frombuffer(base64.b64decode(answer), np.int32)
        if len(values) != (tokens - 1) * self.layers * self.sizes.per_token:
            needed = f"{tokens - 1} tokens read x {self.layers} layers x {self.sizes.per_token}"
            raise EngineError(Problem(where, f"{len(values)} experts in meta_info.routed_experts", needed, FIX))
        experts = values.reshape(tokens - 1, self.layers, self.sizes.per_token)[:, self.with_experts]
        self.sizes.require(experts, where, tokens - 1)
        return Routes.of(experts)


def _versions(spans: Sequence[Mapping[str, Any]], count: int) -> np.ndarray | None:
    """Returns the version of each token, int32 [count], or None if one is missing or is not a number."""
    versions = np.full(count, -1, dtype=np.int32)
    for span in spans:
        if span["end"] > span["start"]:
            if not str(span["version"]).isdecimal():
                return None
            versions[span["start"] : span["end"]] = int(span["version"])
    return None if (versions < 0).any() else versions


@dataclass(frozen=True)
class Endpoint:
    """The URL of a server, such as http://127.0.0.1:30000, and the API key that it asks for."""

    url: str
    api_key: str | None = field(default=None, repr=False)


def served_model(url: str, api_key: str) -> Mapping[str, Any]:
    """Returns the /model_info of a server. Raises EngineError if none answers there."""
    try:
        request = urllib.request.Request(
            f"{url.rstrip('/')}/model_info", headers={"Authorization": f"Bearer {api_key}"}
        )
        with urllib.request.urlopen(request, timeout=MODEL_INFO_SECONDS) as answer:
            info = json.load(answer)
    except (OSError, ValueError) as error:
        fix = "check the URL; --api-key-variable names the environment variable with the server's key"
        raise EngineError(Problem(url, f"/model_info: {error}", "a running SGLang server", fix)) from None
    return info if isinstance(info, dict) else {}


class SglangClient:
    """A connection to one server, with an event loop in a thread of its own. Any thread may call its methods.

    `failure` makes the problem of a server that does not answer, from what was asked and what happened: it may quote
    the server's log. `timeout_seconds` limits control requests.
    """

    def __init__(self, endpoint: Endpoint, *, failure: Callable[[str, str], Problem], timeout_seconds: float) -> None:
        self._url, self._failure, self._timeout = endpoint.url.rstrip("/"), failure, timeout_seconds
        self._headers = {"Authorization": f"Bearer {endpoint.api_key}"} if endpoint.api_key else {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"client of {self._url}", daemon=True)
        self._thread.start()
        self._session = self.run(self._open_session())

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Runs `work` on the loop and waits for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def start(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Runs `work` on the loop without waiting for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def post(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Sends one control request. Raises EngineError if the server refuses it, dies, or does not answer in time.

        Retries only if no connection was made: then the server has not seen the request.
        """
        return self.run(self._answer(f"POST {path}", body))

    def get(self, path: str) -> Mapping[str, Any]:
        """Sends a control request that asks the server about itself. Raises EngineError likewise."""
        return self.run(self._answer(f"GET {path}", None))

    async def generate(
        self, body: Mapping[str, Any], answer: Answer, up: asyncio.Event, held: Callable[[], bool] = lambda: False
    ) -> None:
        """Reads the server's answer to one request (generate_body) into `answer`, as it arrives. Setting `up` aborts
        the request, which keeps its tokens so far. `held` returns whether the server is paused, and so answers later.

        Raises BrokenConnection if the request may be sent again: a server that still runs has dropped it.
        """
        coming = asyncio.ensure_future(self._generate(body, answer))
        try:
            done, waited = await _in_time(coming, up), 0.0
            while not done and waited < ABORT_SECONDS:
                await self.abort(body["rid"])
                done = bool((await asyncio.wait({coming}, timeout=ABORT_AGAIN_SECONDS))[0])
                waited += 0.0 if held() else ABORT_AGAIN_SECONDS
            if not done:
                given = f"no answer {ABORT_SECONDS:g} s after the request was aborted"
                raise EngineError(self._failure("POST /generate", given))
            coming.result()
        finally:
            coming.cancel()

    async def abort(self, rid: str) -> None:
        """Aborts the request of this id: the server soon answers with its tokens so far. All ids have one length,
        because SGLang takes a prefix of an id for the id."""
        await self._answer("POST /abort_request", {"rid": rid})

    def close(self) -> None:
        """Drops every connection. May be called twice."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._close(), self._loop)
        self._thread.join(CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()

    async def _open_session(self) -> aiohttp.ClientSession:
        # A new connection for each request: one that is kept may have been closed by the server, as if it had died.
        connector = aiohttp.TCPConnector(force_close=True, limit=0)
        return aiohttp.ClientSession(
            headers=self._headers, connector=connector, timeout=aiohttp.ClientTimeout(total=None)
        )

    async def _close(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._session.close()
        self._loop.stop()

    async def _generate(self, body: Mapping[str, Any], answer: Answer) -> None:
        call = "POST /generate"

        async def take(response: aiohttp.ClientResponse) -> None:
            if response.content_type != EVENTS:
                answer.add(self._read(call, response.status, await response.text()))
                return
            rest = b""
            async for part in response.content.iter_any():
                *events, rest = (rest + part).split(b"\n\n")
                for event in events:
                    if (text := event.removeprefix(b"data: ").decode()) != "[DONE]":
                        answer.add(self._not_refused(call, self._read(call, response.status, text)))
            if not answer.ended:
                raise aiohttp.ClientPayloadError("the answer has no end")

        await self._exchange(call, body, None, take)

    async def _answer(self, call: str, body: Mapping[str, Any] | None) -> Mapping[str, Any]:
        async def take(response: aiohttp.ClientResponse) -> Mapping[str, Any]:
            return self._read(call, response.status, await response.text())

        return await self._exchange(call, body, self._timeout, take)

    async def _exchange(
        self,
        call: str,
        body: Mapping[str, Any] | None,
        timeout_seconds: float | None,
        take: Callable[[aiohttp.ClientResponse], Awaitable[Result]],
    ) -> Result:
        method, path = call.split()
        for attempt in range(CONNECT_ATTEMPTS):
            try:
                async with asyncio.timeout(timeout_seconds):
                    async with self._session.request(method, self._url + path, json=body) as response:
                        return await take(response)
            except aiohttp.ClientConnectorError as error:
                if attempt + 1 == CONNECT_ATTEMPTS:
                    raise EngineError(self._failure(call, f"no connection: {error}")) from error
                await asyncio.sleep(CONNECT_PAUSE_SECONDS)
            except TimeoutError as error:
                raise EngineError(self._failure(call, f"no answer within {timeout_seconds:g} s")) from error
            except (aiohttp.ClientError, OSError) as error:
                broken = f"the connection broke: {type(error).__name__} {error}".rstrip()
                raise BrokenConnection(self._failure(call, broken)) from error
        raise AssertionError("unreachable")

    def _read(self, call: str, status: int, text: str) -> Mapping[str, Any]:
        try:
            answer = json.loads(text)
        except json.JSONDecodeError:
            answer = {"message": text}
        if not isinstance(answer, dict):
            answer = {"message": answer}
        if status != 200 or answer.get("success") is False:
            message = answer.get("message") or answer.get("error") or text
            if isinstance(message, dict):
                message = message.get("message", message)
            raise EngineError(self._failure(call, f"HTTP {status}: {str(message)[:LONGEST_MESSAGE]}"))
        return answer

    def _not_refused(self, call: str, event: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns a part of an answer. Raises EngineError if it is a refusal, which comes with HTTP 200 as well."""
        reason = event.get("meta_info", {}).get("finish_reason") or {}
        if "meta_info" not in event or (reason.get("status_code") or 0) >= 400:
            message = event.get("error") or reason or event
            given = str(message.get("message", message))[:LONGEST_MESSAGE]
            raise EngineError(self._failure(call, given))
        return event


class BrokenConnection(EngineError):  # noqa: N818
    """A connection that broke after the request was sent: the server may have acted on it."""


class RequestGate:
    """A gate for an engine's requests: at most `at_once` are on the way; none is sent while a weight update holds it.

    Lives on the event loop of the client.
    """

    def __init__(self, at_once: int) -> None:
        self._turns = asyncio.Semaphore(at_once)
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._running = 0

    @asynccontextmanager
    async def turn(self, up: asyncio.Event) -> AsyncIterator[bool]:
        """Waits for this request's turn, in which it is on the way. Yields False if `up` was set first."""
        turn = asyncio.ensure_future(self._turns.acquire())
        if not await _in_time(turn, up):
            turn.cancel()
            yield False
            return
        runs = False
        try:
            opened = asyncio.ensure_future(self._open.wait())
            runs = await _in_time(opened, up)
            opened.cancel()
            self._running += runs
            if runs:
                self._idle.clear()
            yield runs
        finally:
            self._running -= runs
            if not self._running:
                self._idle.set()
            self._turns.release()

    @property
    def held(self) -> bool:
        return not self._open.is_set()

    async def count(self) -> int:
        return self._running

    async def hold(self) -> None:
        self._open.clear()

    async def release(self) -> None:
        self._open.set()

    async def drained(self) -> None:
        """Returns once nothing is on the way."""
        await self._idle.wait()


async def _in_time(waiting: asyncio.Future[Any], up: asyncio.Event) -> bool:
    """Returns whether `waiting` was done before `up` was set. Does not cancel it."""
    if up.is_set():
        return waiting.done()
    end = asyncio.ensure_future(up.wait())
    try:
        await asyncio.wait({waiting, end}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        end.cancel()
    return waiting.done()

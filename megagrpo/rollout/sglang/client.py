"""Talks HTTP to one SGLang server: many generations at once, control requests one by one. Knows no weights."""

from __future__ import annotations

import asyncio
import json
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import aiohttp
import numpy as np

from megagrpo.errors import EngineError, Problem
from megagrpo.rollout.requests import after_begun
from megagrpo.types import FinishReason, Request, Sample

CONNECT_ATTEMPTS = 3
CONNECT_PAUSE_SECONDS = 0.5
ABORT_SECONDS = 30.0  # an aborted request is answered at the next token; this is for a server that is stuck
ABORT_AGAIN_SECONDS = 5.0  # an abort that comes before its request does nothing
CLOSE_SECONDS = 5.0
LONGEST_MESSAGE = 500
FINISHES: Mapping[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
Result = TypeVar("Result")


@dataclass(frozen=True)
class Endpoint:
    """Where a server answers, such as http://127.0.0.1:30000, and the key that it asks for."""

    url: str
    api_key: str | None = field(default=None, repr=False)


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
        """One control request. Raises EngineError if the server refuses it, dies, or does not answer in time.

        It is sent again only if no connection was made: then the server has not seen it.
        """
        return self.run(self.post_async(path, body, self._timeout))

    def get(self, path: str) -> Mapping[str, Any]:
        """A control request that asks the server about itself. Raises EngineError likewise."""
        return self.run(self._answer("GET", path, None, self._timeout))

    async def post_async(self, path: str, body: Mapping[str, Any], timeout_seconds: float) -> Mapping[str, Any]:
        return await self._answer("POST", path, body, timeout_seconds)

    async def generate(self, request: Request, rid: str, version: int, up: asyncio.Event) -> Mapping[str, Any]:
        """The server's answer to one request. Once `up` is set the request is aborted and keeps its tokens so far.

        Raises BrokenConnection if the request may be sent again: a server that still runs has dropped it.
        """
        answer = asyncio.ensure_future(self._answer("POST", "/generate", generate_body(request, rid, version), None))
        try:
            done = await _in_time(answer, up)
            for _ in range(round(ABORT_SECONDS / ABORT_AGAIN_SECONDS)):
                if done:
                    break
                await self.abort(rid)
                done = bool((await asyncio.wait({answer}, timeout=ABORT_AGAIN_SECONDS))[0])
            if not done:
                given = f"no answer {ABORT_SECONDS:g} s after the request was aborted"
                raise EngineError(self._failure("POST /generate", given))
            return answer.result()
        finally:
            answer.cancel()

    async def abort(self, rid: str) -> None:
        """The request of this id is answered soon, with the tokens that it has. All ids have one length, because SGLang
        takes a prefix of an id for the id."""
        await self.post_async("/abort_request", {"rid": rid}, self._timeout)

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

    async def _answer(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_seconds: float | None
    ) -> Mapping[str, Any]:
        asked = f"{method} {path}"
        for attempt in range(CONNECT_ATTEMPTS):
            try:
                async with asyncio.timeout(timeout_seconds):
                    async with self._session.request(method, self._url + path, json=body) as response:
                        return self._read(asked, response.status, await response.text())
            except aiohttp.ClientConnectorError as error:
                if attempt + 1 == CONNECT_ATTEMPTS:
                    raise EngineError(self._failure(asked, f"no connection: {error}")) from error
                await asyncio.sleep(CONNECT_PAUSE_SECONDS)
            except TimeoutError as error:
                raise EngineError(self._failure(asked, f"no answer within {timeout_seconds:g} s")) from error
            except (aiohttp.ClientError, OSError) as error:
                broken = f"the connection broke: {type(error).__name__} {error}".rstrip()
                raise BrokenConnection(self._failure(asked, broken)) from error
        raise AssertionError("unreachable")

    def _read(self, asked: str, status: int, text: str) -> Mapping[str, Any]:
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
            raise EngineError(self._failure(asked, f"HTTP {status}: {str(message)[:LONGEST_MESSAGE]}"))
        return answer


class BrokenConnection(EngineError):  # noqa: N818
    """The connection broke after the request was sent: the server may have acted on it."""


def new_request_id() -> str:
    return uuid.uuid4().hex


def generate_body(request: Request, rid: str, version: int) -> dict[str, Any]:
    """The body of SGLang's /generate for one sample. It shares keys and values of its prompt only with requests of the
    same weight version: others' may be of other weights. With n > 1, all samples of a prompt would have the seed of the
    first, could not be aborted alone, and would be answered together."""
    sampling = request.sampling
    return {
        "rid": rid,
        "input_ids": list(request.read),
        "return_logprob": True,
        "extra_key": str(version),
        "sampling_params": {
            "max_new_tokens": request.tokens_left,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "stop_token_ids": list(sampling.stop_tokens),
            "sampling_seed": request.seed,
        },
    }


def read_sample(
    request: Request, answer: Mapping[str, Any], text_of: Callable[[np.ndarray, FinishReason], str], engine: str
) -> Sample:
    """The sample in an answer of /generate (SGLang 0.5.23).

    Raises EngineError if tokens, logprobs and weight versions do not belong together.
    """
    meta = answer["meta_info"]
    tokens = np.array(answer["output_ids"], dtype=np.int32)
    entries = meta.get("output_token_logprobs") or []
    logprobs = np.array([entry[0] for entry in entries], dtype=np.float32)
    finish = FINISHES.get((meta.get("finish_reason") or {}).get("type", ""))
    versions = _versions(meta, len(tokens))
    agree = [entry[1] for entry in entries] == tokens.tolist() and np.isfinite(logprobs).all()
    if finish is None or versions is None or not agree:
        raise EngineError(
            Problem(
                f"{engine}: an answer for prompt {request.prompt_id}",
                given=f"{len(tokens)} tokens, {len(logprobs)} logprobs of them (or some that are not finite), "
                f"finish_reason {meta.get('finish_reason')}, weight_versions {meta.get('weight_versions')}",
                needed="a finite logprob for each token, a known end, and a weight version of this run for each token",
            )
        )
    sample = after_begun(request, Sample(request.prompt_id, request.index, tokens, logprobs, versions, finish, ""))
    return replace(sample, text=text_of(sample.tokens, finish))


def _versions(meta: Mapping[str, Any], count: int) -> np.ndarray | None:
    """The version of each token, int32 [count], or None if one is missing or is not a number."""
    spans = meta.get("weight_versions")
    if spans is None:
        spans = [{"version": meta.get("weight_version"), "start": 0, "end": count}]
    versions = np.full(count, -1, dtype=np.int32)
    for span in spans:
        if span["end"] > span["start"]:
            if not str(span["version"]).isdecimal():
                return None
            versions[span["start"] : span["end"]] = int(span["version"])
    return None if (versions < 0).any() else versions


class RequestGate:
    """At most `at_once` requests of an engine are on the way. None is sent while held, because a weight update is open.

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
        """Waits for this request's turn. False: `up` was set first."""
        turn = asyncio.ensure_future(self._turns.acquire())
        if not await _in_time(turn, up):
            turn.cancel()
            yield False
            return
        try:
            opened = asyncio.ensure_future(self._open.wait())
            may_run = await _in_time(opened, up)
            opened.cancel()
            yield may_run
        finally:
            self._turns.release()

    @contextmanager
    def running(self) -> Iterator[None]:
        self._running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

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
    """Whether what is waited for came before `up` was set. Does not cancel it."""
    if up.is_set():
        return waiting.done()
    end = asyncio.ensure_future(up.wait())
    try:
        await asyncio.wait({waiting, end}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        end.cancel()
    return waiting.done()

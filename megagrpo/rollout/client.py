"""The HTTP client of one server of any engine: many generations at once, control requests one by one. No weights."""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import aiohttp

from megagrpo.errors import EngineError, Problem
from megagrpo.rollout.answers import Answer

CONNECT_ATTEMPTS = 3
CONNECT_PAUSE_SECONDS = 0.5
ABORT_SECONDS = 30.0  # an aborted request is answered at the next token; this is for a server that is stuck
ABORT_AGAIN_SECONDS = 5.0  # an abort that comes before its request does nothing
CLOSE_SECONDS = 5.0
MODEL_SECONDS = 60.0
LONGEST_MESSAGE = 500
EVENTS = "text/event-stream"
Result = TypeVar("Result")


def ask_about_model(url: str, path: str, api_key: str, engine: str) -> Any:
    """Returns what a server of this engine says about its model at `path`. Raises EngineError if none answers there."""
    headers = {"Authorization": f"Bearer {api_key}"}
    try:
        request = urllib.request.Request(f"{url.rstrip('/')}{path}", headers=headers)
        with urllib.request.urlopen(request, timeout=MODEL_SECONDS) as answer:
            return json.load(answer)
    except (OSError, ValueError) as error:
        fix = "check the URL; --api-key-variable names the environment variable with the server's key"
        raise EngineError(Problem(url, f"{path}: {error}", f"a running {engine} server", fix)) from None


@dataclass(frozen=True)
class Endpoint:
    """The URL of a server, such as http://127.0.0.1:30000, and the API key that it asks for."""

    url: str
    api_key: str | None = field(default=None, repr=False)


class EngineClient(ABC):
    """A connection to one server, with an event loop in a thread of its own. Any thread may call its methods.

    An engine's client says where it generates, how a request is aborted, and which part of an answer is a refusal.

    `failure` makes the problem of a server that does not answer, from what was asked and what happened: it may quote
    the server's log. `timeout_seconds` limits control requests.
    """

    GENERATE: ClassVar[str]
    """The path that generates."""

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
        return self.run(self.request(f"POST {path}", body))

    def get(self, path: str) -> Mapping[str, Any]:
        """Sends a control request that asks the server about itself. Raises EngineError likewise."""
        return self.run(self.request(f"GET {path}", None))

    async def generate(
        self,
        body: Mapping[str, Any],
        request_id: str,
        answer: Answer,
        up: asyncio.Event,
        held: Callable[[], bool] = lambda: False,
    ) -> None:
        """Reads the server's answer to one request into `answer`, as it arrives. Setting `up` aborts the request, which
        keeps its tokens so far. `held` returns whether the server is paused, and so answers later.

        Raises BrokenConnection if the request may be sent again: a server that still runs has dropped it.
        """
        coming = asyncio.ensure_future(self._generate(body, answer))
        try:
            done, waited = await _in_time(coming, up), 0.0
            while not done and waited < ABORT_SECONDS:
                await self.abort(request_id)
                done = bool((await asyncio.wait({coming}, timeout=ABORT_AGAIN_SECONDS))[0])
                waited += 0.0 if held() else ABORT_AGAIN_SECONDS
            if not done:
                given = f"no answer {ABORT_SECONDS:g} s after the request was aborted"
                raise EngineError(self._failure(f"POST {self.GENERATE}", given))
            coming.result()
        finally:
            coming.cancel()

    @abstractmethod
    async def abort(self, request_id: str) -> None:
        """Aborts the request of this id: the server soon answers with its tokens so far."""

    @abstractmethod
    def refusal(self, part: Mapping[str, Any]) -> Any:
        """Returns what a part of an answer says if it is a refusal, which comes with HTTP 200 as well; None if not."""

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
        call = f"POST {self.GENERATE}"

        async def take(response: aiohttp.ClientResponse) -> None:
            if response.content_type != EVENTS:
                answer.add(self._taken(call, response.status, await response.text()))
                return
            rest = b""
            async for part in response.content.iter_any():
                *events, rest = (rest + part).split(b"\n\n")
                for event in events:
                    if (text := event.removeprefix(b"data: ").decode()) != "[DONE]":
                        answer.add(self._taken(call, response.status, text))
            if not answer.ended:
                raise aiohttp.ClientPayloadError("the answer has no end")

        await self._exchange(call, body, None, take)

    async def request(self, call: str, body: Mapping[str, Any] | None) -> Mapping[str, Any]:
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

    def _taken(self, call: str, status: int, text: str) -> Mapping[str, Any]:
        """Returns a part of an answer. Raises EngineError if it is a refusal."""
        part = self._read(call, status, text)
        if (message := self.refusal(part)) is not None:
            message = message.get("message", message) if isinstance(message, dict) else message
            raise EngineError(self._failure(call, str(message)[:LONGEST_MESSAGE]))
        return part


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

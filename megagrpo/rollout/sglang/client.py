"""Talks HTTP to one SGLang server: many generations at once, control requests one by one. Knows no weights."""

from __future__ import annotations

import asyncio
import json
import threading
import uuid
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp

from megagrpo.errors import EngineError, Problem
from megagrpo.types import Request

CONNECT_ATTEMPTS = 3
CONNECT_PAUSE_SECONDS = 0.5
ABORT_SECONDS = 30.0  # an aborted request is answered at the next token; this is for a server that is stuck
ABORT_AGAIN_SECONDS = 5.0  # an abort that comes before its request does nothing
CLOSE_SECONDS = 5.0
LONGEST_MESSAGE = 500
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

        It is sent again only if no connection came about: then the server has not seen it.
        """
        return self.run(self.post_async(path, body, self._timeout))

    def get(self, path: str) -> Mapping[str, Any]:
        """What the server says of itself. Raises EngineError likewise."""
        return self.run(self._answer("GET", path, None, self._timeout))

    async def post_async(self, path: str, body: Mapping[str, Any], timeout_seconds: float) -> Mapping[str, Any]:
        return await self._answer("POST", path, body, timeout_seconds)

    async def generate(self, request: Request, rid: str, timeout_seconds: float) -> Mapping[str, Any]:
        """The server's answer to one request for one sample. Past the time limit it is aborted and what there is comes.

        Raises BrokenConnection if the request may be sent again: a server that lives has dropped it.
        """
        answer = asyncio.ensure_future(self._answer("POST", "/generate", generate_body(request, rid), None))
        try:
            done, _ = await asyncio.wait({answer}, timeout=timeout_seconds)
            for _ in range(round(ABORT_SECONDS / ABORT_AGAIN_SECONDS)):
                if done:
                    break
                await self.abort(rid)
                done, _ = await asyncio.wait({answer}, timeout=ABORT_AGAIN_SECONDS)
            if not done:
                given = f"no answer {ABORT_SECONDS:g} s after it was aborted, which was after {timeout_seconds:g} s"
                raise EngineError(self._failure("POST /generate", given))
            return answer.result()
        finally:
            answer.cancel()

    async def abort(self, rid: str) -> None:
        """The request of this id answers soon, with the tokens that it has. Ids are of one length: SGLang takes a
        prefix of an id for the id."""
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
        # A new connection for each request: on a kept one, that the server has closed reads like a server that died.
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


def generate_body(request: Request, rid: str) -> dict[str, Any]:
    """SGLang's /generate for one sample. Samples of one prompt are asked for one by one: with n > 1, all would have
    the seed of the first, could not be aborted alone, and would be answered together."""
    sampling = request.sampling
    return {
        "rid": rid,
        "input_ids": list(request.tokens),
        "return_logprob": True,
        "sampling_params": {
            "max_new_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "stop_token_ids": list(sampling.stop_tokens),
            "sampling_seed": request.seed,
        },
    }

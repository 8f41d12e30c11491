"""An HTTP server on loopback for agents, which keeps tokens exact. One key per rollout: what was said with it is the
rollout's record. Agents never see tokens, unless they ask for them; the trainer never renders messages."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from aiohttp import web

from megagrpo.agents.answers import MODEL, Answers, Ask
from megagrpo.agents.chat import Chat
from megagrpo.agents.dialects import chat_completions, messages, responses
from megagrpo.agents.dialects.chat_request import ChatAnswer, ChatRequest, Dialect, Kept, Message, Refusal, is_deeper
from megagrpo.agents.turns import Limits, Rollout

DIALECTS: Mapping[str, Dialect] = {
    "/v1/chat/completions": chat_completions, "/v1/messages": messages, "/v1/responses": responses,
}  # fmt: skip
"""Dialects by the path of their requests."""

BODY_BYTES_MAX = 1 << 28
BODY_LEVELS_MAX = 100
"""Most levels of nested lists and objects in a body. Unreadable parts stay text, so that messages can be written."""
RETRY_HEADER = "x-stainless-retry-count"
"""Header in which OpenAI's and Anthropic's clients count retries."""
NO_RETRY = {"x-should-retry": "false"}
"""Header of a refusal that tells these clients not to retry: the same request would be refused again."""


@dataclass(eq=False)
class _Turn:
    """A request that is or was answered, and the number of clients that wait for it. A client that retries joins."""

    task: asyncio.Task[ChatAnswer]
    waiting: int = 0
    delivered: bool = False

    @property
    def failed(self) -> bool:
        return self.task.done() and (self.task.cancelled() or self.task.exception() is not None)


@dataclass(eq=False)
class _Session:
    rollout: Rollout
    turns: dict[bytes, _Turn] = field(default_factory=dict)
    """By the digest of the request; of equal requests, the latest."""
    running: set[asyncio.Task[ChatAnswer]] = field(default_factory=set)
    """Tasks of all requests, equal ones included."""
    kept: Kept = field(default_factory=Kept)


class Gateway:
    """The HTTP server of agents. Its methods are for the thread of the event loop in which it was started.

    keep_alive_seconds: between comments in a stream while the engine generates. grace_seconds: how long a turn runs,
    or its answer is kept, without a waiting client, which may retry. audited: see Answers. Raises RecipeError if there
    is no parser of that name.
    """

    def __init__(
        self,
        chat: Chat,
        ask: Ask,
        *,
        parser: str = "auto",
        keep_alive_seconds: float = 5.0,
        grace_seconds: float = 10.0,
        audited: float = 1 / 32,
    ) -> None:
        self._answers = Answers(chat, ask, parser=parser, audited=audited)
        self._keep_alive, self._grace = keep_alive_seconds, grace_seconds
        self._sessions: dict[str, _Session] = {}
        self._numbers, self._secret = itertools.count(), secrets.token_bytes(32)
        self._runner: web.AppRunner | None = None
        self._port = 0

    @property
    def url(self) -> str:
        """Returns the URL without /v1, such as http://127.0.0.1:40321."""
        return f"http://127.0.0.1:{self._port}"

    async def start(self) -> None:
        app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[self._refusing])
        for path, dialect in DIALECTS.items():
            app.router.add_post(path, partial(self._handle, dialect))
        app.router.add_post("/v1/messages/count_tokens", self._count_tokens)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{model:.+}", self._models)
        # Without handler_cancellation, the turn of an agent that has died would go on in the engine.
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self._port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Cancels all turns that run, and stops the server."""
        await asyncio.gather(*(self.close(key) for key in list(self._sessions)))
        if self._runner is not None:
            await self._runner.cleanup()
        self._answers.close()

    def open(self, prompt_id: str, index: int, limits: Limits, task: Sequence[Message] = ()) -> str:
        """Opens a rollout and returns its API key. `task`: the messages that its agent is given."""
        number = next(self._numbers)
        key = f"{number}-{self._signed(f'{number}')}"
        self._sessions[key] = _Session(Rollout(prompt_id, index, limits, time.monotonic(), task))
        return key

    async def close(self, key: str) -> Rollout:
        """Cancels the rollout's turns and returns it. Later requests get a 409."""
        session = self._sessions.pop(key)
        running = list(session.running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        return session.rollout

    def _signed(self, number: str) -> str:
        return hashlib.blake2b(number.encode(), key=self._secret, digest_size=16).hexdigest()

    @web.middleware
    async def _refusing(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Answers refused requests, and paths and methods that nothing serves, in the JSON of the dialect."""
        try:
            return await handler(request)
        except Refusal as refused:
            refusal = refused
        except web.HTTPException as error:
            code = "not_found" if error.status == 404 else "invalid_request"
            message = f"{request.method} {request.path}: {error.reason}. Answers are at POST {', '.join(DIALECTS)}"
            refusal = Refusal(error.status, code, message)
        if session := self._sessions.get(_key_of(request)):
            session.rollout.counts[f"refused/{refusal.code}"] += 1
        # A path that no dialect has is answered in the client's.
        of_client = messages if "anthropic-version" in request.headers else chat_completions
        of_path = (dialect for path, dialect in DIALECTS.items() if f"{request.path}/".startswith(f"{path}/"))
        return _json(next(of_path, of_client).refused(refusal), refusal.status)

    def _session(self, request: web.Request) -> tuple[str, _Session]:
        key = _key_of(request)
        if session := self._sessions.get(key):
            return key, session
        number, _, signature = key.partition("-")
        if secrets.compare_digest(signature.encode(), self._signed(number).encode()):
            raise Refusal(409, "rollout_closed", "this rollout has ended")
        raise Refusal(401, "invalid_api_key", "no rollout has this key")

    async def _models(self, request: web.Request) -> web.Response:
        """Returns all models, or the one of this name, as OpenAI and Anthropic do. Every name is the policy's."""
        _, session = self._session(request)
        name = request.match_info.get("model", MODEL)
        model = {
            "id": name, "object": "model", "created": 0, "owned_by": "megagrpo", "type": "model", "display_name": name,
            "created_at": "1970-01-01T00:00:00Z", "max_model_len": session.rollout.limits.tokens_max,
        }  # fmt: skip
        if "model" in request.match_info:
            return _json(model)
        return _json({"object": "list", "data": [model], "has_more": False, "first_id": name, "last_id": name})

    async def _count_tokens(self, request: web.Request) -> web.Response:
        _, session = self._session(request)
        chat_request = messages.read(_body(await request.read()), session.kept)
        return _json({"input_tokens": await self._answers.tokens_of(session.rollout, chat_request)})

    async def _handle(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        key, session = self._session(request)
        raw = await request.read()
        chat_request = dialect.read(_body(raw), session.kept)
        turn = self._turn(key, session, request, raw, chat_request)
        turn.waiting += 1
        try:
            if chat_request.stream:
                return await self._stream(request, session, turn, dialect, chat_request)
            await asyncio.wait({turn.task})
            answer = _answer_of(turn)
            session.kept.keep(chat_request, answer)
            response = _json(dialect.written(chat_request, answer))
            turn.delivered = True
            return response
        finally:  # a client that has gone away may ask again: until then, nothing is lost
            turn.waiting -= 1
            asyncio.get_running_loop().call_later(self._grace, self._forget, session, turn)

    def _turn(self, key: str, session: _Session, request: web.Request, raw: bytes, chat_request: ChatRequest) -> _Turn:
        """Returns the turn of an equal request if the client's header says that it retries, or if it has gone away
        before its answer came; else a new turn. Raises Refusal."""
        digest = hashlib.blake2b(request.path.encode() + b"\0" + raw, digest_size=16).digest()
        turn = session.turns.get(digest)
        again = request.headers.get(RETRY_HEADER, "0") != "0"
        if turn and not turn.failed and (again or not (turn.waiting or turn.delivered)):
            session.rollout.counts["retries"] += 1
            return turn
        if self._sessions.get(key) is not session:  # it was closed while the request was read
            raise Refusal(409, "rollout_closed", "this rollout has ended")
        task = asyncio.create_task(self._answers.answer(key, session.rollout, chat_request))
        session.running.add(task)
        task.add_done_callback(session.running.discard)
        turn = session.turns[digest] = _Turn(task)
        return turn

    def _forget(self, session: _Session, turn: _Turn) -> None:
        """Cancels a turn that no client waits for any more, or drops its answer."""
        if turn.waiting:
            return
        if not turn.failed and turn.task.cancel():
            session.rollout.counts["given_up"] += 1
        session.turns = {digest: one for digest, one in session.turns.items() if one is not turn}

    async def _stream(
        self, request: web.Request, session: _Session, turn: _Turn, dialect: Dialect, chat_request: ChatRequest
    ) -> web.StreamResponse:
        """Streams the whole answer as events. Comments keep the connection alive until it is there. A quick refusal
        keeps its own HTTP status."""
        await asyncio.wait({turn.task}, timeout=self._keep_alive)
        answer = _answer_of(turn) if turn.task.done() else None
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        try:
            await response.prepare(request)
            while not turn.task.done():
                await response.write(dialect.WAITING)
                await asyncio.wait({turn.task}, timeout=self._keep_alive)
            try:
                answer = answer or _answer_of(turn)
            except Refusal as refusal:
                await response.write(dialect.refused_event(refusal))
                return response
            session.kept.keep(chat_request, answer)
            await response.write(b"".join(dialect.events(chat_request, answer)))
            turn.delivered = True
        except ConnectionError:  # the client has gone away, and may ask again
            pass
        return response


def _key_of(request: web.Request) -> str:
    return request.headers.get("x-api-key") or request.headers.get("Authorization", "").removeprefix("Bearer ")


def _answer_of(turn: _Turn) -> ChatAnswer:
    if turn.task.cancelled():
        raise Refusal(409, "rollout_closed", "this rollout has ended")
    return turn.task.result()


def _body(raw: bytes) -> dict[str, Any]:
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise Refusal(400, "invalid_request", "the request's body is no JSON object")
    if is_deeper(body, BODY_LEVELS_MAX):
        raise Refusal(400, "invalid_request", f"the request's body has more than {BODY_LEVELS_MAX} levels")
    return body


def _json(body: dict[str, Any], status: int = 200) -> web.Response:
    return web.json_response(body, status=status, headers=NO_RETRY if status >= 400 else None)

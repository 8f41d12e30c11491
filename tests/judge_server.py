"""An OpenAI-compatible endpoint on this machine, whose answers a test makes up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web

from megagrpo.processes.ports import free_port
from megagrpo.reward.executors import Asking
from megagrpo.reward.scorer import EXECUTORS, Executors

START_SECONDS = 60.0
HOST = "127.0.0.1"
USAGE = {"prompt_tokens": 30, "completion_tokens": 10}


def asking(directory: Path | None = None, **named: Any) -> Executors:
    """The executors of a scorer whose functions ask these models."""
    return {**EXECUTORS, "asking": partial(Asking, directory=directory, **named)}


@dataclass
class JudgeServer:
    """A judge's server with the questions that it got, in order. `answer` maps a question's text and its number, from
    0, to the answer's text, or to (status, headers, text)."""

    answer: Callable[[str, int], Any]
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    pause_seconds: float = 0.0
    usage: dict[str, int] | None = field(default_factory=lambda: dict(USAGE))

    @property
    def questions(self) -> list[str]:
        return [body["messages"][-1]["content"] for body in self.bodies]

    async def chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        number = len(self.bodies)
        self.bodies.append(body)
        self.keys.append(request.headers.get("Authorization"))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(self.pause_seconds)
        self.at_once -= 1
        given = self.answer(body["messages"][-1]["content"], number)
        if isinstance(given, tuple):
            status, headers, text = given
            return web.Response(status=status, headers=headers, text=text)
        message = {"role": "assistant", "content": given}
        return web.json_response({"choices": [{"message": message}], "usage": self.usage})


@contextmanager
def judge_server(answer: Callable[[str, int], Any]) -> Iterator[JudgeServer]:
    server = JudgeServer(answer)
    loop, started = asyncio.new_event_loop(), threading.Event()
    port = free_port(HOST)

    async def serve() -> None:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", server.chat)
        runner = web.AppRunner(app, shutdown_timeout=0.01)
        await runner.setup()
        await web.TCPSite(runner, HOST, port).start()
        server.url = f"http://{HOST}:{port}/v1"
        started.set()
        try:
            await loop.create_future()
        finally:
            await runner.cleanup()
            loop.stop()

    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    serving = asyncio.run_coroutine_threadsafe(serve(), loop)
    assert started.wait(START_SECONDS)
    yield server
    serving.cancel()
    thread.join(START_SECONDS)

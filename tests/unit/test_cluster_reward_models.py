"""The actor of a judge's server starts it, again when it has ended or is ill, and not too often. No Ray, no server."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megagrpo.cluster import reward_models
from megagrpo.cluster.reward_models import ServerActor
from megagrpo.errors import EngineError, Problem
from megagrpo.reward.judging.asked import Reply

ENDED = EngineError(Problem("reward model grader: the server has ended"))


class FakeServer:
    """A server whose behaviour the test changes."""

    url, api_key = "http://127.0.0.1:1", "key"

    def __init__(self) -> None:
        self.ended = self.ill = self.closed = False

    def check_running(self) -> None:
        if self.ended:
            raise ENDED

    def wait_until_ready(self, seconds: float) -> None:
        if self.ill:
            raise EngineError(Problem("reward model grader: the server is not ready"))

    def close(self) -> None:
        self.closed = True


class FakeEndpoint:
    late = False

    def __init__(self, url: str, *arguments: Any, **options: Any) -> None:
        self.url = url

    async def post(self, body: object, timeout_seconds: float) -> Reply:
        if self.late:
            raise TimeoutError
        return Reply(200, {"url": self.url})

    async def close(self) -> None:
        pass


@pytest.fixture
def actor(monkeypatch) -> Any:
    monkeypatch.setattr(reward_models, "HttpEndpoint", FakeEndpoint)
    monkeypatch.setattr(reward_models, "prepare_process", lambda *given: None)
    monkeypatch.setattr(reward_models, "server_spec", lambda *given: SimpleNamespace(chat_model="grader"))
    recipe = SimpleNamespace(cluster=SimpleNamespace(start_timeout_seconds=1.0))
    made = ServerActor.__ray_metadata__.modified_class(recipe, (), "reward.models.grader", Path(), "cpu", "float32")
    made.started = []

    def start() -> FakeServer:
        made.started.append(FakeServer())
        return made.started[-1]

    made._start = start
    return made


def asked(actor: Any, times: int = 1) -> list[int]:
    """Statuses of requests at one time."""

    async def ask() -> list[int]:
        return [reply.status for reply in await asyncio.gather(*(actor.post({}, 5.0) for _ in range(times)))]

    return asyncio.run(ask())


def test_requests_wait_for_one_start(actor):
    assert asked(actor, 5) == [200] * 5
    assert len(actor.started) == 1


def test_a_server_that_has_ended_is_started_again(actor):
    asked(actor)
    actor.started[0].ended = True
    assert asked(actor, 3) == [200] * 3
    assert [server.closed for server in actor.started] == [True, False]


@pytest.mark.parametrize("ill", [True, False])
def test_a_server_that_does_not_answer_in_time_is_started_again_if_it_is_ill(actor, monkeypatch, ill):
    asked(actor)
    actor.started[0].ill = ill
    monkeypatch.setattr(FakeEndpoint, "late", True)
    assert asked(actor) == [503]
    monkeypatch.setattr(FakeEndpoint, "late", False)
    assert asked(actor) == [200]
    assert actor.started[0].closed == ill
    assert len(actor.started) == (2 if ill else 1)


def test_a_server_that_cannot_start_is_tried_again_only_after_a_while(actor, monkeypatch):
    tries = []

    def fail() -> FakeServer:
        tries.append(1)
        raise ENDED

    start, actor._start = actor._start, fail
    assert asked(actor, 4) == [503] * 4
    assert len(tries) == 1
    actor._start = start
    assert asked(actor) == [503]
    monkeypatch.setattr(reward_models, "RETRY_SECONDS", 0.0)
    assert asked(actor) == [200]

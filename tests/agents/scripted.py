"""An engine that says what it is told, and whether a rollout's record is what it saw."""

from __future__ import annotations

import asyncio
import inspect
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np

from megagrpo.agents.chat import Chat
from megagrpo.agents.gateway import Gateway
from megagrpo.agents.turns import AskedTurn, Limits, Rollout
from megagrpo.routes import Routes
from megagrpo.types import AgentRun, Branch, KeptSets, Request, Sample, SamplingParams
from tests.agents.families import chat_of


@dataclass
class ScriptedEngine:
    """`say(prompt's text, seed)` is what the policy says. It is cut into tokens at random."""

    chat: Chat
    say: Callable[[str, int], str]
    version: int = 0
    finish: str | None = None
    rows: int = 0
    """Rows of routes that it sends too many, at the end; below 0: too few."""
    seen: list[tuple[Request, str, Sample]] = field(default_factory=list)
    open: asyncio.Event = field(default_factory=asyncio.Event)
    """Turns wait for it."""
    begun: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    """Released by each turn that begins."""
    cancelled: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    """And by each that is ended from outside."""

    def __post_init__(self) -> None:
        self.open.set()

    async def ask(self, request: Request, key: str) -> Sample:
        self.begun.release()
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            self.cancelled.release()
            raise
        tokens = self.pieces(self.say(self.chat.text(request.tokens), request.seed), request.seed)
        ends = next((at for at, token in enumerate(tokens) if token in request.sampling.stop_tokens), None)
        finish = "stop" if ends is not None and ends < request.sampling.max_tokens else "length"
        tokens = tokens[: ends + 1] if finish == "stop" and ends is not None else tokens[: request.sampling.max_tokens]
        logprobs = [-((31 * token + at) % 97) / 100 for at, token in enumerate(tokens)]  # known by token and place
        sample = Sample(
            request.prompt_id, request.index, np.array(tokens, np.int32), np.array(logprobs, np.float32),
            np.full(len(tokens), self.version, np.int32), self.finish or finish, "",  # type: ignore[arg-type]
            routes=self.routes([*request.tokens, *tokens]) if request.sampling.routes else None,
            kept=KeptSets.of([np.array([token, token + len(tokens)]) for token in tokens]),
        )  # fmt: skip
        self.seen.append((request, key, sample))
        self.version += 1
        return sample

    def routes(self, tokens: Sequence[int]) -> Routes:
        """Each row names its token, its place and the answer."""
        rows = [[token, place, self.version] for place, token in enumerate([*tokens, 0])]
        return Routes.of(np.array(rows)[: len(tokens) - 1 + self.rows, None])

    def pieces(self, text: str, seed: int) -> list[int]:
        rng, tokens = random.Random(seed), list[int]()
        for token in self.chat.encode(text):
            piece = self.chat.text([token])
            if len(piece) > 2 and piece.isascii() and piece.isalpha() and rng.random() < 0.3:
                cut = rng.randrange(1, len(piece))
                halves = self.chat.encode(piece[:cut]) + self.chat.encode(piece[cut:])
                if self.chat.text(halves) == piece:
                    tokens += halves
                    continue
            tokens.append(token)
        return tokens


@dataclass
class Served:
    """A gateway with its engine, and a client."""

    gateway: Gateway
    engine: ScriptedEngine
    session: aiohttp.ClientSession

    def open(
        self, turns_max: int = 50, tokens_max: int = 4000, answer_tokens_max: int = 400, seed: int = 1, index: int = 0,
        task: Sequence[dict[str, Any]] = (),
    ) -> str:  # fmt: skip
        sampling = SamplingParams(answer_tokens_max, temperature=0.7)
        return self.gateway.open("prompt", index, Limits(turns_max, tokens_max, sampling, seed), task)

    async def post(
        self, key: str, messages: list[dict[str, Any]], path: str = "/v1/chat/completions",
        headers: dict[str, str] | None = None, **body: Any,
    ) -> tuple[int, Any]:  # fmt: skip
        """Status and body; of a stream, its text."""
        sent = {"model": "policy", "messages": messages, **body}
        headers = {"Authorization": f"Bearer {key}", **(headers or {})}
        async with self.session.post(self.gateway.url + path, json=sent, headers=headers) as response:
            stream = response.content_type == "text/event-stream"
            return response.status, await (response.text() if stream else response.json())

    async def said(self, key: str, messages: list[dict[str, Any]], **body: Any) -> dict[str, Any]:
        """The message of an answer."""
        status, answer = await self.post(key, messages, **body)
        assert status == 200, answer
        message: dict[str, Any] = answer["choices"][0]["message"]
        return message

    async def close(self, key: str) -> tuple[Rollout, Sample]:
        """The record and its sample, which are what the engine saw."""
        record = await self.gateway.close(key)
        return record, checked(record, self.engine)

    async def run(self, key: str) -> AgentRun:
        _, sample = await self.close(key)
        assert sample.agent is not None
        return sample.agent


@asynccontextmanager
async def served(chat: Chat, say: Callable[[str, int], str], **options: Any) -> AsyncIterator[Served]:
    engine = ScriptedEngine(chat, say)
    gateway = Gateway(chat, engine.ask, **options)
    await gateway.start()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        try:
            yield Served(gateway, engine, session)
        finally:
            engine.open.set()
            await gateway.stop()


def with_gateway(
    say: Callable[[str, int], str], family: str = "chatml", **options: Any
) -> Callable[[Callable[..., Coroutine[Any, Any, None]]], Callable[..., None]]:
    """Makes a test of a coroutine function, whose first parameter is the gateway's client."""

    def decorate(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
        async def work(given: dict[str, Any]) -> None:
            async with served(chat_of(family), say, **options) as to:
                await test(to, **given)

        def run(**given: Any) -> None:
            asyncio.run(work(given))

        run.__name__, run.__doc__ = test.__name__, test.__doc__
        signature = inspect.signature(test)
        run.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])  # type: ignore[attr-defined]
        return run

    return decorate


def checked(record: Rollout, engine: ScriptedEngine) -> Sample:
    """The sample of a record, which is what the engine saw."""
    sample = record.sample(Request("prompt", 0, (), 0, SamplingParams(1)), "stop")
    check(record, sample, [(request.tokens, answer) for request, _, answer in engine.seen])
    return sample


def check(record: Rollout, sample: Sample, seen: Sequence[tuple[tuple[int, ...], Sample]]) -> None:
    """Every prompt in the record is one that the engine saw, token for token; masks lie on sampled tokens, and each of
    these is trained once, with the engine's logprob and version. `seen`: all prompts and answers of this rollout."""
    outputs: dict[tuple[int, ...], list[Sample]] = {}
    for prompt, answer in seen:
        outputs.setdefault(prompt, []).append(answer)
    for turn in record.turns:
        prompt = (*(turn.parent.tokens().tolist() if turn.parent else ()), *turn.added.tolist())
        count = len(turn.sampled)
        same = [
            output
            for output in outputs.get(prompt, ())
            if np.array_equal(output.tokens[:count], turn.sampled)
            and np.array_equal(output.logprobs[:count], turn.logprobs)
            and np.array_equal(output.versions[:count], turn.versions)
            and (turn.kept is None or np.array_equal(output.kept.ids[: 2 * count], turn.kept.ids))
        ]
        assert same, f"turn {turn.number}: the engine saw no such prompt and said no such answer"
    run = sample.agent
    assert run is not None
    trained, rows = Counter[int](), list[np.ndarray]()
    for number, (branch, path) in enumerate(zip(run.branches, record.paths(), strict=True)):
        assert branch.tokens.tolist() == path[-1][0].tokens().tolist()
        assert branch.tokens.dtype == np.int32
        at = 0
        for turn, mine in path:
            assert not branch.trained[at : at + len(turn.added)].any()
            at += len(turn.added)
            assert (branch.trained[at : at + len(turn.sampled)] == mine).all()
            at += len(turn.sampled)
            trained[turn.number] += mine
        assert at == len(branch.trained)
        rows.append(branch.tokens[branch.trained])
        check_routes(branch, [turn for turn, _ in path])
        assert sum(turn.tokens for turn in run.turns if turn.branch == number) == branch.trained.sum()
    assert np.concatenate([np.zeros(0, np.int32), *rows]).tolist() == sample.tokens.tolist()
    assert len(sample.tokens) == len(sample.logprobs) == len(sample.versions) == sum(turn.tokens for turn in run.turns)
    unused = run.counts.get("turns_unused", 0)
    assert set(trained.values()) <= {1}
    assert len(trained) == len(run.turns) == len(record.turns) - unused
    by_number = {turn.number: turn for turn in record.turns}
    expected = [by_number[turn.number] for turn in run.turns]
    assert [*sample.logprobs] == [value for turn in expected for value in turn.logprobs]
    assert [*sample.versions] == [value for turn in expected for value in turn.versions]
    assert sample.kept is None or [*sample.kept.ids] == [token for turn in expected for token in turn.kept.ids]
    assert (sample.kept is None) == all(turn.kept is None for turn in expected)


def check_routes(branch: Branch, path: Sequence[AskedTurn]) -> None:
    """Routes of ScriptedEngine: each row is of its token and place, by the first request of the path that read it."""
    if branch.routes is None:
        assert any(turn.experts is None for turn in path)
        return
    requests = [turn.versions[0] for turn in path for _ in (*turn.added, *turn.sampled)]
    expected = [[token, place, requests[place + 1]] for place, token in enumerate(branch.tokens[:-1].tolist())]
    assert branch.routes.experts[:, 0].tolist() == expected

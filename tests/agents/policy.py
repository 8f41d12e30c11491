"""A policy that says what it is told, to many agents at once."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from transformers import PreTrainedTokenizerFast

from megagrpo.agents.chat import Chat
from megagrpo.agents.gateway import Gateway
from megagrpo.agents.turns import Limits, Rollout
from megagrpo.types import Request, Sample
from tests.agents.families import chat_of, tokenizer_of
from tests.agents.scripted import ScriptedEngine, check

STOP = "<|im_end|>"


def tokenizer() -> PreTrainedTokenizerFast:
    return tokenizer_of("thinking")


def chat() -> Chat:
    return chat_of("thinking")


TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>|\Z)", re.DOTALL)
RESULT = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)


def adder(text: str, seed: int, tool: str = "add") -> str:
    """Adds the numbers behind the last "Add:" two by two with a tool, sometimes in odd or broken JSON; it may think."""
    rng = random.Random(seed)
    turns = TURN.findall(text)
    last = max(i for i, (role, said) in enumerate(turns) if role == "user" and "Add:" in said)
    numbers = [int(x) for x in re.findall(r"-?\d+", turns[last][1].rpartition("Add:")[2])]
    results = [result for _, said in turns[last + 1 :] for result in RESULT.findall(said)]
    done = [int(found[-1]) for result in results if (found := re.findall(r"-?\d+", result))]
    think = f"<think>\n{len(done)} of {len(numbers) - 1} sums.\n</think>\n\n" if rng.random() < 0.4 else ""
    if len(done) >= len(numbers) - 1 or len(turns) > 58:
        return f"{think}The sum is {done[-1] if done else numbers[0]}.{STOP}"
    a, b = (done[-1] if done else numbers[0]), numbers[len(done) + 1]
    pairs = [("name", tool), ("arguments", {"b": b, "a": a} if rng.random() < 0.5 else {"a": a, "b": b})]
    body = json.dumps(
        dict(pairs[:: rng.choice((1, -1))]), separators=(",", ":") if rng.random() < 0.5 else (", ", ": ")
    )
    body = body[:-1] if rng.random() < 0.05 else body
    said = rng.choice(("", "Next: ", "I call it.\n"))
    return f"{think}{said}<tool_call>\n{body}\n</tool_call>{STOP}"


@dataclass
class Policy:
    """`ask` for a gateway, as ScriptedEngine's. `before(key)` is waited for before each answer."""

    say: Callable[[str, int], str]
    before: Callable[[str], Awaitable[None]] = lambda key: asyncio.sleep(0)
    running: int = 0
    most_running: int = 0
    given_up: int = 0
    seen: dict[str, list[tuple[tuple[int, ...], Sample]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._engine = ScriptedEngine(chat(), self.say)

    async def ask(self, request: Request, key: str) -> Sample:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await self.before(key)
            sample = await self._engine.ask(request, key)
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        finally:
            self.running -= 1
        self.seen.setdefault(key, []).append((request.tokens, sample))
        return sample


@asynccontextmanager
async def gateway_of(policy: Policy, of_chat: Chat | None = None, **options: Any) -> AsyncIterator[Gateway]:
    gateway = Gateway(of_chat or chat(), policy.ask, parser="hermes", **options)
    await gateway.start()
    try:
        yield gateway
    finally:
        await gateway.stop()


@dataclass
class Played:
    """One rollout. `prompt`: what the policy saw before its last answer."""

    returned: Any
    events: list[dict[str, Any]]
    record: Rollout
    sample: Sample
    prompt: str


async def play(
    gateway: Gateway, policy: Policy, rollout: Callable[[Any, Any], Any], task: Any, limits: Limits, index: int = 0
) -> Played:
    """A rollout by this function of an agent, which trains what the policy saw."""
    key = gateway.open("task", index, limits)
    events: list[dict[str, Any]] = []
    endpoint = SimpleNamespace(
        base_url=f"{gateway.url}/v1", api_key=key, model="policy",
        event=lambda kind, **values: events.append({"kind": kind, **values}),
    )  # fmt: skip
    returned = await rollout(task, endpoint)
    record, seen = await gateway.close(key), policy.seen[key]
    request = Request("task", index, seen[0][0], 0, limits.sampling)
    sample = record.sample(request, "length" if record.limited else "stop")
    check(record, sample, seen)
    return Played(returned, events, record, sample, chat().text(seen[-1][0]))

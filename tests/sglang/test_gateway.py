"""Agents' turns on a real SGLang server, whose weights change between and within them: the log-probabilities of what is
trained are those of a plain forward pass of each branch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megagrpo.agents.gateway import Gateway
from megagrpo.agents.turns import Limits
from megagrpo.errors import MegagrpoError
from megagrpo.recipe.schema import EngineLayoutConfig
from megagrpo.rollout.engine import Engine
from megagrpo.types import Request, Sample, SamplingParams
from tests.agents.policy import STOP, chat, tokenizer
from tests.agents.scripted import check
from tests.engines.policy import Policy, model_of
from tests.engines.servers import Served, serve
from tests.rollout_engines import start_engine
from tests.tiny_models import make_model

pytestmark = pytest.mark.long

TOLERANCE = 2e-5
CONTEXT = 3000
ENDS = 0.02  # probability that a token ends an answer
LIMITS = Limits(turns_max=20, tokens_max=CONTEXT, sampling=SamplingParams(max_tokens=300), seed=3)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def model_that_ends(directory: Path, seed: int, ends: float = ENDS) -> Path:
    """A random model with the chat's tokenizer, whose answers end now and then."""
    stop = tokenizer().convert_tokens_to_ids(STOP)
    shape = {"vocab_size": len(tokenizer()), "eos_token_id": stop, "max_position_embeddings": 4096}
    make_model("qwen2", directory, seed=seed, **shape)
    tokenizer().save_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        ids = torch.randint(0, len(tokenizer()), (4, 100), generator=torch.Generator().manual_seed(seed))
        hidden = model.model(ids).last_hidden_state.flatten(0, 1)
        mean, total = hidden.mean(0), torch.logsumexp(model.lm_head(hidden), -1).mean()
        model.lm_head.weight[stop] = mean / mean.dot(mean) * (total + np.log(ends))
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve(model_that_ends(tmp_path_factory.mktemp("chat") / "0", 0), "qwen2", EngineLayoutConfig()) as served:
        yield served


class Asked:
    """`ask` for a gateway, over an engine; all prompts and answers by key."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._tickets = engine, 0
        self.seen: dict[str, list[tuple[tuple[int, ...], Sample]]] = {}

    async def ask(self, request: Request, key: str) -> Sample:
        loop, ticket = asyncio.get_running_loop(), self._tickets
        self._tickets += 1
        answered: asyncio.Future[Sample | MegagrpoError] = loop.create_future()

        def done(_: int, answer: Sample | MegagrpoError) -> None:
            loop.call_soon_threadsafe(lambda: answered.done() or answered.set_result(answer))

        self._engine.begin({ticket: request}, done)
        try:
            answer = await answered
        except asyncio.CancelledError:
            self._engine.give_back([ticket])
            raise
        if isinstance(answer, MegagrpoError):
            raise answer
        self.seen.setdefault(key, []).append((request.tokens, answer))
        return answer


@asynccontextmanager
async def gateway_of(asked: Asked) -> AsyncIterator[tuple[Gateway, aiohttp.ClientSession]]:
    gateway = Gateway(chat(), asked.ask, parser="hermes", grace_seconds=0.2)
    await gateway.start()
    try:
        async with aiohttp.ClientSession(gateway.url) as session:
            yield gateway, session
    finally:
        await gateway.stop()


class Agent:
    """Asks in one of the three dialects, and goes on with what it was answered."""

    def __init__(self, session: aiohttp.ClientSession, key: str, number: int) -> None:
        self._session, self._headers, self._number = session, {"Authorization": f"Bearer {key}"}, number
        self._turn, self._said, self._id = 0, list[Any](), ""

    async def turn(self, tokens_max: int) -> None:
        self._turn += 1
        said = f"Question {self._number}. And {self._turn} more? " * (1 + self._number % 3)
        self._said.append({"role": "user", "content": said})
        asked: dict[str, Any] = {"model": "policy", "messages": self._said, "max_tokens": tokens_max}
        match self._number % 3:
            case 0:
                answer = await self._post(
                    "/v1/chat/completions", asked | ({"tools": [TOOL]} if self._number % 2 else {})
                )
                self._said.append(answer["choices"][0]["message"])
            case 1:
                answer = await self._post("/v1/messages", asked | {"system": "You are brief."})
                self._said.append({"role": "assistant", "content": answer["content"]})
            case 2:
                before = {"previous_response_id": self._id} if self._id else {}
                given = {"model": "policy", "input": said, "max_output_tokens": tokens_max}
                self._id = (await self._post("/v1/responses", given | before))["id"]

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        async with self._session.post(path, json=body, headers=self._headers) as response:
            assert response.status == 200, await response.text()
            return await response.json()


@torch.no_grad()
def logprobs_of(directory: Path, tokens: np.ndarray) -> np.ndarray:
    """[t], of each token after those before it, in one float32 pass. The first is 0."""
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    found = model_of(directory)(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    return np.concatenate([[0.0], found.numpy()])


async def ended(gateway: Gateway, asked: Asked, key: str) -> Sample:
    record = await gateway.close(key)
    sample = record.sample(Request("task", 0, (), 0, LIMITS.sampling), "stop")
    check(record, sample, asked.seen.get(key, ()))
    return sample


def worst_of(sample: Sample, weights: dict[int, Path]) -> float:
    """The largest difference of a trained token's log-probability from that of a forward pass of its branch with the
    weights that sampled it."""
    assert sample.agent is not None
    worst, at = 0.0, 0
    for branch in sample.agent.branches:
        count = int(branch.trained.sum())
        logprobs, versions = sample.logprobs[at : at + count], sample.versions[at : at + count]
        at += count
        for version in set(versions.tolist()):
            expected = logprobs_of(weights[version], branch.tokens)[branch.trained]
            worst = max(worst, float(np.abs(expected - logprobs)[versions == version].max()))
    return worst


def test_trained_logprobs_are_those_of_a_forward_pass_with_weights_that_change_between_and_within_turns(
    served: Served,
) -> None:
    root = served.directory.parent
    weights = {0: served.directory, **{version: model_that_ends(root / str(version), version) for version in (1, 2)}}

    async def run(engine: Engine, trainer: Policy) -> list[Sample]:
        asked = Asked(engine)
        async with gateway_of(asked) as (gateway, session):
            keys = [gateway.open("task", number, LIMITS) for number in range(15)]
            agents = [Agent(session, key, number) for number, key in enumerate(keys)]

            async def all_turn(tokens_max: int) -> None:
                await asyncio.gather(*(agent.turn(tokens_max + number) for number, agent in enumerate(agents)))

            await all_turn(12)
            await all_turn(12)
            await asyncio.to_thread(trainer.sync, 1, weights[1])  # between turns
            await all_turn(12)
            turns = asyncio.create_task(all_turn(250))
            await asyncio.to_thread(served.wait_for_batches, 6)
            await asyncio.to_thread(trainer.sync, 2, weights[2])  # within turns
            await turns
            await all_turn(12)
            return [await ended(gateway, asked, key) for key in keys]

    with served.trained() as (engine, trainer):
        samples = asyncio.run(run(engine, trainer))
    assert max(worst_of(sample, weights) for sample in samples) < TOLERANCE
    within = [
        set(part.tolist())
        for sample in samples
        if sample.agent is not None
        for part in np.split(sample.versions, np.cumsum([turn.tokens for turn in sample.agent.turns])[:-1])
    ]
    assert {0, 1, 2} <= set().union(*within)
    assert {1, 2} in within
    assert all(sample.agent is not None and len(sample.agent.turns) == 5 for sample in samples)
    stops = sum(event["finish"] == "stop" for sample in samples if sample.agent for event in sample.agent.events)
    assert 0 < stops < 5 * len(samples), "answers that end, and answers that are cut off"


def test_trained_logprobs_of_an_embedded_engine_are_those_of_a_forward_pass(tmp_path: Path) -> None:
    directory = model_that_ends(tmp_path / "model", 0)

    async def run(engine: Engine) -> list[Sample]:
        asked = Asked(engine)
        async with gateway_of(asked) as (gateway, session):
            keys = [gateway.open("task", number, LIMITS) for number in range(6)]
            agents = [Agent(session, key, number) for number, key in enumerate(keys)]
            for tokens_max in (12, 40, 12):
                await asyncio.gather(*(agent.turn(tokens_max + number) for number, agent in enumerate(agents)))
            return [await ended(gateway, asked, key) for key in keys]

    engine = start_engine(directory)
    try:
        samples = asyncio.run(run(engine))
    finally:
        engine.close()
    assert max(worst_of(sample, {0: directory}) for sample in samples) < TOLERANCE


def test_a_turn_whose_agent_has_gone_away_ends_in_the_server(served: Served) -> None:
    endless = model_that_ends(served.directory.parent / "endless", 3, ends=1e-9)
    limits = replace(LIMITS, sampling=SamplingParams(max_tokens=2800))

    async def run(engine: Engine) -> None:
        asked = Asked(engine)
        async with gateway_of(asked) as (gateway, session):
            for goes_away in (True, False):
                key = gateway.open("task", 0, limits)
                turn = asyncio.create_task(Agent(session, key, 0).turn(2800))
                await asyncio.to_thread(served.wait_for_requests, 1)
                if goes_away:
                    turn.cancel()
                else:
                    await ended(gateway, asked, key)
                await asyncio.to_thread(served.wait_for_requests, 0)
                with pytest.raises((asyncio.CancelledError, AssertionError)):
                    await turn

    with served.trained() as (engine, trainer):
        trainer.sync(1, endless)
        asyncio.run(run(engine))

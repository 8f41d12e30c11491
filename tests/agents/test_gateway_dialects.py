"""A rollout by each dialect through one gateway over HTTP: the same tokens, whatever the dialect."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from megagrpo.agents.chat import Chat
from megagrpo.agents.gateway import Gateway
from megagrpo.agents.turns import Limits
from megagrpo.types import Request, Sample, SamplingParams
from tests.agents.policy import STOP, Policy, gateway_of, tokenizer
from tests.agents.scripted import check

LIMITS = Limits(turns_max=8, tokens_max=600, sampling=SamplingParams(max_tokens=80), seed=1)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CALL = f'<think>\nhm\n</think>\n\nI add.<tool_call>\n{{"name":"add","arguments":{{"a": 1}}}}\n</tool_call>{STOP}'


def says(text: str, seed: int) -> str:
    """Calls the tool first, then ends."""
    return f"It is 2.{STOP}" if "<tool_response>\n2" in text else CALL


class Session:
    def __init__(self, http: aiohttp.ClientSession, key: str) -> None:
        self._http, self._headers = http, {"x-api-key": key}

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        async with self._http.post(path, json={"model": "policy", **body}, headers=self._headers) as response:
            if response.content_type == "text/event-stream":
                parts = (await response.text()).split("\n\n")
                return response.status, [json.loads(part.partition("data: ")[2]) for part in parts if "data: {" in part]
            return response.status, await response.json()


@asynccontextmanager
async def opened(policy: Policy, of_chat: Chat | None = None) -> AsyncIterator[tuple[Gateway, str, Session]]:
    async with gateway_of(policy, of_chat) as gateway, aiohttp.ClientSession(gateway.url) as http:
        key = gateway.open("p", 0, LIMITS)
        yield gateway, key, Session(http, key)


async def by_chat(session: Session) -> None:
    function = {"name": "add", "description": "", "parameters": SCHEMA}
    given: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    tools = [{"type": "function", "function": function}]
    _, answer = await session.post("/v1/chat/completions", {"messages": given, "tools": tools})
    message = answer["choices"][0]["message"]
    given += [message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "2"}]
    _, answer = await session.post("/v1/chat/completions", {"messages": given, "tools": tools})
    assert answer["choices"][0]["message"]["content"] == "It is 2."


async def by_messages(session: Session) -> None:
    given: list[Any] = [{"role": "user", "content": "1+1?"}]
    asked = {"system": "Be brief.", "tools": [{"name": "add", "input_schema": SCHEMA}], "messages": given}
    _, answer = await session.post("/v1/messages", asked | {"max_tokens": 80})
    use = answer["content"][-1]
    assert [block["type"] for block in answer["content"]] == ["thinking", "text", "tool_use"]
    assert (answer["stop_reason"], use["input"]) == ("tool_use", {"a": 1})
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": "2"}
    given += [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [result]}]
    _, counted = await session.post("/v1/messages/count_tokens", asked)
    status, events = await session.post("/v1/messages", asked | {"max_tokens": 80, "stream": True})
    usage = events[0]["message"]["usage"]
    assert counted["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert usage["cache_read_input_tokens"] > 0
    assert "".join(e["delta"].get("text", "") for e in events if e["type"] == "content_block_delta") == "It is 2."
    assert status == 200


async def by_thread(session: Session) -> None:
    tools = [{"name": "add", "input_schema": SCHEMA}]
    begun = {"system": "Be brief.", "tools": tools, "messages": [{"role": "user", "content": "1+1?"}]}
    _, answer = await session.post("/v1/messages", begun | {"max_tokens": 80, "thread": {"type": "create"}})
    result = {"type": "tool_result", "tool_use_id": answer["content"][-1]["id"], "content": "2"}
    thread = {"type": "continue", "previous_message_id": answer["id"]}
    given = [{"role": "user", "content": [result]}]
    _, answer = await session.post("/v1/messages", {"messages": given, "max_tokens": 80, "thread": thread})
    assert answer["content"] == [{"type": "text", "text": "It is 2."}]


async def by_responses(session: Session) -> None:
    tools = [{"type": "function", "name": "add", "parameters": SCHEMA}]
    asked = {"instructions": "Be brief.", "tools": tools}
    _, first = await session.post("/v1/responses", asked | {"input": "1+1?"})
    assert [item["type"] for item in first["output"]] == ["reasoning", "message", "function_call"]
    result = {"type": "function_call_output", "call_id": first["output"][-1]["call_id"], "output": "2"}
    asked |= {"previous_response_id": first["id"], "stream": True}
    _, events = await session.post("/v1/responses", asked | {"input": [result]})
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "It is 2."


def rollout(by: Callable[[Session], Awaitable[None]]) -> Sample:
    async def run() -> Sample:
        policy = Policy(says)
        async with opened(policy) as (gateway, key, session):
            await by(session)
            record = await gateway.close(key)
            sample = record.sample(Request("p", 0, (), 0, LIMITS.sampling), "stop")
            check(record, sample, policy.seen[key])
            return sample

    return asyncio.run(run())


def test_a_rollout_is_the_same_in_every_dialect() -> None:
    samples = [rollout(by) for by in (by_chat, by_messages, by_thread, by_responses)]
    for sample in samples:
        assert sample.agent is not None
        (branch,) = sample.agent.branches
        assert tokenizer().decode(branch.tokens).count("<think>") == 1
    texts = {tokenizer().decode(sample.agent.branches[0].tokens) for sample in samples if sample.agent}
    assert len(texts) == 1


@pytest.mark.parametrize(
    ("path", "body", "error"),
    [
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}]}, {"type": "conflict_error"}),
        ("/v1/responses", {"input": "x"}, {"code": "rollout_closed"}),
    ],
)
def test_a_rollout_that_has_ended_says_so_in_the_dialect(
    path: str, body: dict[str, Any], error: dict[str, str]
) -> None:
    async def run() -> None:
        async with opened(Policy(says)) as (gateway, key, session):
            await gateway.close(key)
            status, said = await session.post(path, body)
            assert status == 409
            assert said["error"] | error == said["error"]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("method", "path", "status", "said"),
    [
        ("GET", "/v1/models/any/name", 200, {"id": "any/name", "object": "model", "type": "model"}),
        ("POST", "/v1/completions", 404, {"error": {"code": "not_found"}}),
        ("POST", "/v1/embeddings", 404, {"error": {"code": "not_found"}}),
        ("GET", "/", 404, {"error": {"code": "not_found"}}),
        ("GET", "/v1/chat/completions", 405, {"error": {"code": "invalid_request"}}),
        ("GET", "/v1/responses/resp_1", 404, {"error": {"code": "not_found"}}),
        ("POST", "/v1/messages/batches", 404, {"type": "error", "error": {"type": "not_found_error"}}),
        ("GET", "/v1/messages", 405, {"type": "error", "error": {"type": "invalid_request_error"}}),
    ],
)
def test_every_path_answers_json_of_its_dialect(method: str, path: str, status: int, said: dict[str, Any]) -> None:
    async def run() -> None:
        async with opened(Policy(says)) as (gateway, key, _), aiohttp.ClientSession(gateway.url) as http:
            async with http.request(method, path, json={}, headers={"x-api-key": key}) as response:
                body = await response.json()
            assert response.status == status
            within = body.get("error", {}) if status >= 400 else body
            assert within | said.get("error", said) == within
            assert body.get("type") == said.get("type")
            counts = (await gateway.close(key)).agent_run().counts
            assert sum(count for name, count in counts.items() if name.startswith("refused/")) == (status >= 400)

    asyncio.run(run())


def test_a_context_that_is_full_is_refused_in_the_dialect() -> None:
    async def run() -> None:
        async with opened(Policy(says)) as (_, _, session):
            long = "word " * 900
            status, said = await session.post("/v1/messages", {"messages": [{"role": "user", "content": long}]})
            assert status == 400
            assert said["error"]["message"].startswith("prompt is too long: ")
            assert said["error"]["message"].endswith(" tokens > 600 maximum")
            status, said = await session.post("/v1/responses", {"input": long})
            assert (status, said["error"]["code"]) == (400, "context_length_exceeded")

    asyncio.run(run())


def test_system_messages_within_a_conversation_reach_a_policy_whose_template_has_none() -> None:
    made = tokenizer().__class__(tokenizer_object=tokenizer().backend_tokenizer, eos_token=STOP)
    asks = "(m.role == 'system' and not loop.first)"
    assert asks in tokenizer().chat_template
    made.chat_template = tokenizer().chat_template.replace(asks, "false")
    strict = Chat(made, [made.convert_tokens_to_ids(STOP)])

    async def run() -> None:
        policy = Policy(says)
        async with opened(policy, strict) as (_, key, session):
            given = [{"role": "user", "content": "1+1?"}, {"role": "system", "content": "It is late."}]
            status, _ = await session.post("/v1/messages", {"system": "Be brief.", "messages": given})
            assert status == 200
            assert "It is late." in tokenizer().decode(policy.seen[key][0][0])

    asyncio.run(run())


def test_tokens_are_counted_without_a_trace() -> None:
    async def run() -> None:
        async with opened(Policy(says)) as (gateway, key, session):
            tool = {"name": "add", "input_schema": SCHEMA}
            asked = {"messages": [{"role": "user", "content": "x"}], "tools": [tool]}
            before = copy.deepcopy(vars(gateway._sessions[key].rollout))
            assert (await session.post("/v1/messages/count_tokens", asked))[0] == 200
            assert vars(gateway._sessions[key].rollout) == before
            record = await gateway.close(key)
            assert not record.turns
            assert not any(record.agent_run().counts.values())

    asyncio.run(run())

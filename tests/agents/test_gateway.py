"""The gateway's contract over HTTP, with an engine that says what it is told."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Coroutine
from typing import Any

import aiohttp
import pytest

from megagrpo.agents.chat import TOOL
from megagrpo.types import Sample
from tests.agents.families import chat_of
from tests.agents.scripted import Served, served, with_gateway

CALL = '<tool_call>\n{"name":"f","arguments":{"k":"v"}}\n</tool_call><|im_end|>'
SPACED = '<tool_call>{"name":"f","arguments":{"b":1.0,"a":[2]}}</tool_call><|im_end|>'
THOUGHT = "Thought: one two\nObservation: made up 🙂 things<|im_end|>"
RETRY = {"x-stainless-retry-count": "1"}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def result(message: dict[str, Any], content: str = "4") -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": message["tool_calls"][0]["id"]}


def numbered(prompt: str, seed: int) -> str:
    """An answer that differs for each prompt and seed."""
    return f"{prompt.count('<|im_start|>')} {seed % 1000} is the answer<|im_end|>"


def calls_then_answers(prompt: str, seed: int) -> str:
    return f"It is 4 ({seed % 1000}).<|im_end|>" if "<tool_response>" in prompt else CALL


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


@with_gateway(calls_then_answers, audited=1.0)
async def test_a_tool_loop_is_one_branch_however_its_calls_were_written(to: Served) -> None:
    key = to.open()
    talk = [user("two and two?")]
    status, answer = await to.post(key, talk, tools=[TOOL])
    assert status == 200
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] is None
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"k": "v"}
    talk += [message, result(message)]
    _, second = await to.post(key, talk, tools=[TOOL])
    usage, first = second["usage"], answer["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == first["total_tokens"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    _, sample = await to.close(key)
    run = sample.agent
    assert run is not None
    (branch,) = run.branches
    assert len(branch.tokens) == usage["total_tokens"]
    assert branch.trained.sum() == first["completion_tokens"] + usage["completion_tokens"]
    assert [message["role"] for message in run.messages] == ["user", "assistant", "tool", "assistant"]
    assert sample.text == run.messages[-1]["content"]
    counts = run.counts
    assert counts["calls"] == 1
    assert counts["audited"] == 1
    assert "audit_differs" not in counts
    assert [event["number"] for event in run.events] == [0, 1]
    assert run.events[1]["given"][0]["role"] == "tool"


@with_gateway(lambda prompt, seed: SPACED)
async def test_a_message_that_comes_back_with_other_ids_spaces_and_key_order_is_the_same(to: Served) -> None:
    key = to.open()
    message = await to.said(key, [user("go")], tools=[TOOL])
    call = {"id": "another", "type": "function", "function": {"name": "f", "arguments": '{"a": [2], "b": 1.0}'}}
    back = {"role": "assistant", "content": " ", "refusal": None, "audio": None, "tool_calls": [call]}
    await to.said(key, [user("go"), back, {**result(message), "tool_call_id": "another"}], tools=[TOOL])
    assert len((await to.run(key)).branches) == 1


def test_reasoning_begins_a_branch_where_the_template_leaves_it_out_unless_it_is_appended() -> None:
    async def work(history: str, branches: int) -> None:
        chat = chat_of("thinking", history=history)
        async with served(chat, lambda prompt, seed: "<think>\nhm\n</think>\n\nyes<|im_end|>") as to:
            key = to.open()
            first = await to.said(key, [user("a?")])
            assert (first["content"], first["reasoning_content"]) == ("yes", "hm")
            await to.said(key, [user("a?"), {"role": "assistant", "content": "yes"}, user("b?")])
            run = await to.run(key)
            assert len(run.branches) == branches
            assert [message["role"] for message in run.messages] == ["user", "assistant"] * 2
            assert run.counts.get("branch/reasoning", 0) == branches - 1

    run(work("template", 2))
    run(work("append", 1))


@with_gateway(lambda prompt, seed: THOUGHT)
async def test_stop_strings_are_cut_at_the_token_that_completes_them(to: Served) -> None:
    key = to.open()
    _, answer = await to.post(key, [user("x")], stop=["Observation:", " made"], return_token_ids=True)
    (choice,) = answer["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Thought: one two\n", "stop")
    chat, ids = to.engine.chat, choice["token_ids"]
    assert "Observation:" in chat.text(ids)
    assert "Observation:" not in chat.text(ids[:-1])
    assert ids == to.engine.seen[0][2].tokens[: len(ids)].tolist()
    assert answer["prompt_token_ids"] == list(to.engine.seen[0][0].tokens)
    _, none = await to.post(key, [user("y")], stop="Thought:")
    assert none["choices"][0]["message"]["content"] == ""
    await to.said(key, [user("x"), choice["message"], user("go on")])
    assert len((await to.run(key)).branches) == 2


@with_gateway(numbered)
async def test_logprobs_are_the_engines(to: Served) -> None:
    _, answer = await to.post(to.open(), [user("x")], logprobs=True)
    given = answer["choices"][0]["logprobs"]["content"]
    sample = to.engine.seen[0][2]
    assert [one["logprob"] for one in given] == sample.logprobs.tolist()
    assert "".join(one["token"] for one in given) == to.engine.chat.text(sample.tokens)


@with_gateway(calls_then_answers, keep_alive_seconds=0.01)
async def test_a_stream_is_the_whole_answer_as_events_with_comments_before_it(to: Served) -> None:
    key = to.open()
    body = {"model": "policy", "messages": [user("x")], "tools": [TOOL], "stream": True,
            "stream_options": {"include_usage": True}}  # fmt: skip
    to.engine.open.clear()
    url, headers = to.gateway.url + "/v1/chat/completions", {"Authorization": f"Bearer {key}"}
    async with to.session.post(url, json=body, headers=headers) as response:
        assert response.status == 200
        assert (await response.content.readline()).startswith(b":")
        to.engine.open.set()
        text = (await response.read()).decode()
    events = re.findall(r"^data: (.*)$", text, re.MULTILINE)
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    (call,) = chunks[0]["choices"][0]["delta"]["tool_calls"]
    assert (call["index"], call["function"]["name"]) == (0, "f")
    assert chunks[1]["choices"][0]["finish_reason"] == "tool_calls"
    assert chunks[2]["usage"]["completion_tokens"] == len(to.engine.seen[0][2].tokens)
    status, refusal = await to.post(key, [user("x" * 9000)], stream=True)
    assert (status, refusal["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required", "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}, "tools": [TOOL]}, "tool_choice"),
        ({"messages": [user([{"type": "image_url", "image_url": {"url": "data:,"}}])]}, "messages[0].content"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "bard", "content": ""}]}, "messages[0]"),
        ({"messages": [user("\ud800")]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": 1}]}]}, "messages[0].tool_calls"),
        ({"n": 0}, "n"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"stop": [""]}, "stop"),
        ({"tools": [{"name": "f"}]}, "tools[0]"),
        ({"guided_regex": "a+"}, "guided_regex"),
        ({"made_up": 1}, "made_up"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
        ({"ignore_eos": True}, "ignore_eos"),
        ({"logprobs": True, "top_logprobs": 2}, "top_logprobs"),
        ({"messages": [{"role": "assistant", "content": "", "function_call": {"name": "f"}}]},
         "messages[0].function_call"),
    ],
)  # fmt: skip
@with_gateway(numbered)
async def test_what_cannot_be_served_is_refused_and_the_field_named(
    to: Served, body: dict[str, Any], field: str
) -> None:
    key = to.open()
    status, refusal = await to.post(key, **{"messages": [user("x")], **body})
    assert (status, refusal["error"]["param"]) == (400, field)
    assert not to.engine.seen
    assert (await to.run(key)).counts[f"refused/{refusal['error']['code']}"] == 1


@pytest.mark.parametrize("depth", [40, 300, 600])
@pytest.mark.parametrize("escaped", [False, True])
def test_arguments_may_be_nested_so_deep_only(depth: int, escaped: bool) -> None:
    async def work() -> None:
        arguments = '{"k":' + "[" * depth + "]" * depth + "}"
        said = (
            f'<tool_call>\n{{"name":"f","arguments":{json.dumps(arguments) if escaped else arguments}}}\n</tool_call>'
        )
        async with served(chat_of("chatml"), lambda prompt, seed: f"{said}<|im_end|>") as to:
            key = to.open(tokens_max=20_000, answer_tokens_max=8000)
            message = await to.said(key, [user("x")], tools=[TOOL])
            assert ("tool_calls" in message) == (depth < 64)
            assert message["content"] == (None if depth < 64 else said)
            call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
            back = {"role": "assistant", "content": None, "tool_calls": [call]}
            await to.said(key, [user("x"), back, result(back)], tools=[TOOL])
            called = {"type": "tool_use", "id": "a", "name": "f", "input": json.loads(arguments)}
            talk = [user("x"), {"role": "assistant", "content": [called]}, user("y")]
            status, _ = await to.post(key, talk, path="/v1/messages", max_tokens=5)
            assert status == (200 if depth < 64 else 400)
            record, _ = await to.close(key)
            assert len(record.turns) == (3 if depth < 64 else 2)

    run(work())


@with_gateway(numbered)
async def test_what_is_no_json_object_is_refused(to: Served) -> None:
    url, headers = to.gateway.url + "/v1/chat/completions", {"Authorization": f"Bearer {to.open()}"}
    for raw in (b"", b"{", b"[]", b"[" * 100_000, b"\xff"):
        async with to.session.post(url, data=raw, headers=headers) as response:
            assert response.status == 400


@with_gateway(numbered)
async def test_the_recipe_says_how_tokens_are_drawn(to: Served) -> None:
    key = to.open(answer_tokens_max=50, tokens_max=200)
    await to.said(key, [user("x")], temperature=0.0, top_p=0.1, seed=3, max_tokens=1000)
    (request, _, _) = to.engine.seen[0]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.7, 1.0, 50)
    assert set(sampling.stop_tokens) == set(to.engine.chat.stop_tokens)
    await to.said(key, [user("y")], max_tokens=2)
    assert to.engine.seen[1][0].sampling.max_tokens == 2
    counts = (await to.run(key)).counts
    assert counts["ignored/temperature"] == counts["ignored/top_p"] == counts["ignored/seed"] == 1


def test_seeds_depend_on_the_conversation_and_how_often_it_was_asked() -> None:
    async def seeds(order: list[str], seed: int = 1) -> dict[str, list[int]]:
        async with served(chat_of("chatml"), numbered) as to:
            key, made = to.open(seed=seed), dict[str, list[int]]()
            for text in order:
                await to.said(key, [user(text)])
                made.setdefault(text, []).append(to.engine.seen[-1][0].seed)
            return made

    one = asyncio.run(seeds(["a", "b", "a"]))
    assert one == asyncio.run(seeds(["b", "a", "a"]))
    assert len({*one["a"], *one["b"]}) == 3
    assert one["a"] != asyncio.run(seeds(["a", "b", "a"], seed=2))["a"]


@with_gateway(numbered)
async def test_limits_end_a_rollout_which_is_then_truncated(to: Served) -> None:
    turns = to.open(turns_max=2)
    await to.post(turns, [user("x")], n=2)
    status, refusal = await to.post(turns, [user("y")])
    assert (status, refusal["error"]["code"]) == (400, "turn_limit_exceeded")
    room = to.open(tokens_max=60)
    await to.said(room, [user("x")])
    status, refusal = await to.post(room, [user("word " * 100)])
    assert (status, refusal["error"]["code"]) == (400, "context_length_exceeded")
    compacted = to.open(tokens_max=60, turns_max=1)  # a refused request is no turn
    await to.post(compacted, [user("word " * 100)])
    await to.said(compacted, [user("short")])
    cut, wished = to.open(answer_tokens_max=3), to.open()
    _, answer = await to.post(cut, [user("x")])
    assert answer["choices"][0]["finish_reason"] == "length"
    await to.said(cut, [user("x"), answer["choices"][0]["message"], user("go on")])
    await to.said(wished, [user("x")], max_tokens=3)
    limited = [(await to.close(key))[0].limited for key in (turns, room, compacted, cut, wished)]
    assert limited == [True, True, False, True, False]


@pytest.mark.parametrize("said", ['<tool_call>{"name": "f", "arg</tool_call>', '<tool_call>{"name": "g"}</tool_call>'])
def test_a_call_that_cannot_be_read_is_given_back_as_content(said: str) -> None:
    async def work() -> None:
        async with served(chat_of("chatml"), lambda prompt, seed: f"So: {said}<|im_end|>") as to:
            key = to.open()
            message = await to.said(key, [user("x")], tools=[TOOL])
            assert message["content"] == f"So: {said}"
            assert "tool_calls" not in message
            asked = [user("x"), message, user("That cannot be read.")]
            _, answer = await to.post(key, asked, tools=[TOOL])
            assert answer["choices"][0]["unreadable"]
            _, answer = await to.post(to.open(), asked)  # without tools, it is no call
            assert "unreadable" not in answer["choices"][0]
            record = await to.run(key)
            assert (record.counts["unreadable_calls"], len(record.branches)) == (2, 1)

    run(work())


async def waiting(to: Served, key: str, headers: dict[str, str] | None = None) -> asyncio.Task[tuple[int, Any]]:
    """A request whose turn runs in the engine."""
    while not to.engine.begun.locked():  # earlier turns
        await to.engine.begun.acquire()
    task = asyncio.create_task(to.post(key, [user("slow")], headers=headers))
    await to.engine.begun.acquire()
    return task


@with_gateway(numbered)
async def test_a_client_that_asks_again_joins_the_turn_that_runs(to: Served) -> None:
    key = to.open()
    to.engine.open.clear()
    first = await waiting(to, key)
    first.cancel()  # the client has gone away, and its next request says nothing of it
    await asyncio.wait({first})
    again = asyncio.create_task(to.post(key, [user("slow")]))
    said_so = asyncio.create_task(to.post(key, [user("slow")], headers=RETRY))
    while to.gateway._sessions[key].rollout.counts["retries"] < 2:
        await asyncio.sleep(0.001)
    to.engine.open.set()
    answers = [(await task)[1] for task in (again, said_so)]
    late = (await to.post(key, [user("slow")], headers=RETRY))[1]
    assert answers[0]["id"] == answers[1]["id"] == late["id"]
    other = (await to.post(key, [user("slow")]))[1]
    assert other["id"] != late["id"]  # it was answered: this one wants another answer
    assert (await to.run(key)).counts["retries"] == 3
    assert len(to.engine.seen) == 2


@with_gateway(numbered, grace_seconds=0.01)
async def test_the_turn_of_an_agent_that_died_is_ended_in_the_engine(to: Served) -> None:
    key = to.open()
    to.engine.open.clear()
    task = await waiting(to, key)
    task.cancel()
    await asyncio.wait_for(to.engine.cancelled.acquire(), 30)
    assert (await to.run(key)).counts["given_up"] == 1


@with_gateway(numbered)
async def test_closing_a_rollout_ends_its_turns_and_refuses_what_comes_later(to: Served) -> None:
    key = to.open()
    await to.said(key, [user("x")])
    to.engine.open.clear()
    task = await waiting(to, key)
    record, _ = await to.close(key)
    await asyncio.wait_for(to.engine.cancelled.acquire(), 30)
    assert len(record.turns) == 1
    assert (await task)[0] == 409
    status, refusal = await to.post(key, [user("x")])
    assert (status, refusal["error"]["code"]) == (409, "rollout_closed")
    assert (await to.post("1-no-key", [user("x")]))[0] == 401
    url = to.gateway.url + "/v1/models"
    async with to.session.get(url, headers={"x-api-key": to.open(tokens_max=77)}) as response:
        assert (await response.json())["data"][0]["max_model_len"] == 77
    async with to.session.post(to.gateway.url + "/v1/chat/completions", json={}) as response:
        assert response.status == 401
        assert response.headers["x-should-retry"] == "false"


@with_gateway(numbered)
async def test_closing_a_rollout_ends_each_of_several_equal_requests(to: Served) -> None:
    key = to.open()
    to.engine.open.clear()
    tasks = [await waiting(to, key), await waiting(to, key)]
    record, _ = await to.close(key)
    for _ in tasks:
        await asyncio.wait_for(to.engine.cancelled.acquire(), 30)
    assert [status for status, _ in await asyncio.gather(*tasks)] == [409, 409]
    assert not record.turns


@with_gateway(numbered)
async def test_a_turn_that_the_engine_gives_up_aborts_the_rollout(to: Served) -> None:
    key = to.open()
    await to.said(key, [user("x")])
    to.engine.finish = "abort"
    status, refusal = await to.post(key, [user("y")])
    assert (status, refusal["error"]["code"]) == (408, "turn_aborted")
    assert (await to.post(key, [user("z")]))[0] == 409
    assert len(to.engine.seen) == 2
    to.engine.seen.pop()
    record, _ = await to.close(key)
    assert record.aborted
    assert len(record.turns) == 1


def test_rollouts_at_once_are_not_mixed_up_and_long_prompts_do_not_change_them() -> None:
    async def agent(to: Served, number: int) -> Sample:
        key = to.open(tokens_max=100_000)
        talk = [user(f"agent {number}" + " word" * (6000 if number % 8 == 0 else 1))]
        for turn in range(3):
            talk += [await to.said(key, talk), user(f"{number} goes on {turn}")]
        _, sample = await to.close(key)
        assert all(
            one == key
            for request, one, _ in to.engine.seen
            if f"agent {number} " in to.engine.chat.text(request.tokens[:60])
        )
        return sample

    async def work() -> None:
        async with served(chat_of("chatml"), numbered) as to:
            samples = await asyncio.gather(*(agent(to, number) for number in range(32)))
            assert all(sample.agent is not None and len(sample.agent.branches) == 1 for sample in samples)

    run(work())


@with_gateway(numbered)
async def test_turn_rewards_are_by_order_or_by_the_id_of_an_answer(to: Served) -> None:
    key = to.open()
    talk, ids = [user("x")], []
    for _ in range(2):
        _, answer = await to.post(key, talk)
        ids.append(answer["id"])
        talk += [answer["choices"][0]["message"], user("go on")]
    record, _ = await to.close(key)
    assert [turn.reward for turn in record.agent_run([0.5, None]).turns] == [0.5, None]  # type: ignore[list-item]
    assert [turn.reward for turn in record.agent_run({ids[1]: 2}).turns] == [None, 2.0]
    request = to.engine.seen[0][0]
    for wrong in ([1, 2, 3], {"chatcmpl-0": 1.0}, [float("nan")], "ab", 3, [True]):
        sample = record.sample(request, "stop", wrong)  # type: ignore[arg-type]
        assert sample.finish == "abort"
        assert sample.agent is not None
        assert sample.agent.error


@with_gateway(lambda prompt, seed: "yes</s>", "zephyr")
async def test_a_template_that_refuses_the_messages_says_so(to: Served) -> None:
    status, refusal = await to.post(to.open(), [user("x"), {"role": "tool", "content": "4", "tool_call_id": "a"}])
    assert (status, refusal["error"]["code"]) == (400, "template_refused")
    status, refusal = await to.post(to.open(), [user("x")], tools=[TOOL])
    assert (status, refusal["error"]["param"]) == (400, "tools")


@with_gateway(numbered, keep_alive_seconds=0.01, grace_seconds=0.01)
async def test_a_client_gone_in_the_middle_of_a_stream_leaves_the_gateway_whole(to: Served) -> None:
    key = to.open()
    to.engine.open.clear()
    body = {"messages": [user("x")], "stream": True}
    headers = {"Authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession() as session:
        response = await session.post(to.gateway.url + "/v1/chat/completions", json=body, headers=headers)
        await response.content.readline()
        response.close()
    await asyncio.wait_for(to.engine.cancelled.acquire(), 30)
    to.engine.open.set()
    await to.said(key, [user("y")])
    await to.close(key)

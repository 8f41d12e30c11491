"""Anthropic's Messages, as the gateway reads and writes them."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megagrpo.agents.dialects import messages
from megagrpo.agents.dialects.chat_request import ChatAnswer, ChatRequest, Choice, Kept, Message, Refusal, call
from megagrpo.agents.turns import digest_of
from tests.dialect_answers import ANSWERS, any_body, said

TOOL = {"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {}}}
ASKED = {"model": "policy", "max_tokens": 50, "messages": [{"role": "user", "content": "hi"}]}


def event_data(events: list[bytes]) -> list[dict[str, Any]]:
    return [json.loads(event.partition(b"data: ")[2]) for event in events]


def test_a_conversation_with_tools_is_read_as_templates_read_it() -> None:
    body = ASKED | {
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1;"},
            {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
        ],
        "tools": [TOOL, {"type": "web_search_20250305", "name": "web_search"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "text", "text": "I add."},
                {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}},
                {"type": "tool_use", "id": "t2", "name": "add", "input": {}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "1"}]},
                {"type": "tool_result", "tool_use_id": "t2", "is_error": True},
                {"type": "text", "text": "go on"},
            ]},
            {"role": "system", "content": "It is late."},
        ],
        "temperature": 0.3, "thinking": {"type": "adaptive"}, "output_config": {"effort": "high"},
        "stop_sequences": ["END"], "stream": True,
    }  # fmt: skip
    request = messages.read(body, Kept())
    assert request.messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "I add.", "reasoning_content": "hm",
         "tool_calls": [call("t1", "add", {"a": 1}), call("t2", "add", {})]},
        {"role": "tool", "content": "1", "tool_call_id": "t1"},
        {"role": "tool", "content": "error", "tool_call_id": "t2"},
        {"role": "user", "content": "go on"},
        {"role": "system", "content": "It is late."},
    )  # fmt: skip
    function = {"name": "add", "description": "Adds.", "parameters": TOOL["input_schema"]}
    assert request.tools == ({"type": "function", "function": function},)
    assert set(request.ignored) == {"temperature", "thinking", "effort", "tools/web_search_20250305"}
    assert (request.stop, request.tokens_max, request.stream) == (("END",), 50, True)


def test_an_answer_is_known_again_from_a_client_that_writes_whole_numbers_without_a_point() -> None:
    def answer(number: float) -> Message:
        return {"role": "assistant", "content": "", "tool_calls": [call("c", "add", {"a": [{"b": number}]})]}

    assert digest_of(b"", answer(2.0)) == digest_of(b"", answer(2))
    assert digest_of(b"", answer(2.5)) != digest_of(b"", answer(2))


def test_a_thread_is_gone_on_with_by_the_id_of_its_answer() -> None:
    kept = Kept()
    first = messages.read(ASKED | {"system": "Add.", "tools": [TOOL], "thread": {"type": "create"}}, kept)
    kept.keep(first, ANSWERS["calls"])
    before = messages.written(first, ANSWERS["calls"])
    results = [{"type": "tool_result", "tool_use_id": c, "content": "1"} for c in ("call_1", "call_2")]
    new = {"role": "user", "content": results}
    thread = {"type": "continue", "previous_message_id": before["id"]}
    by_id = messages.read(ASKED | {"messages": [new], "thread": thread}, kept)
    history = [*ASKED["messages"], {"role": "assistant", "content": before["content"]}, new]
    whole = messages.read(ASKED | {"system": "Add.", "tools": [TOOL], "messages": history}, kept)
    assert (by_id.messages, by_id.tools) == (whole.messages, whole.tools)
    kept.keep(by_id, replace(ANSWERS["text"], id="f" * 16))
    kept.keep(whole, replace(ANSWERS["text"], id="e" * 16))
    assert len(kept.of("msg_" + "f" * 16, "").messages) == len(by_id.messages) + 1
    with pytest.raises(Refusal) as refused:  # it was of no thread
        kept.of("msg_" + "e" * 16, "")
    assert messages.refused(refused.value)["error"]["details"] == {"error_code": "thread_not_found"}


def test_an_answer_that_a_client_sends_back_in_parts_is_one_message() -> None:
    whole = ANSWERS["all"].choices[0].message
    parts = messages.blocks_of(whole, "0" * 16)
    split = [{"role": "user", "content": "hi"}, *({"role": "assistant", "content": [part]} for part in parts)]
    after = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "ok"}]}
    assert messages.read(ASKED | {"messages": [*split, after]}, Kept()).messages[1] == whole


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_comes_back_as_it_was_said(name: str) -> None:
    answer = ANSWERS[name]
    written = messages.written(messages.read(ASKED, Kept()), answer)
    back = [*ASKED["messages"], {"role": "assistant", "content": written["content"]}, {"role": "user", "content": "x"}]
    assert messages.read(ASKED | {"messages": back}, Kept()).messages[1] == answer.choices[0].message


@pytest.mark.parametrize("name", ANSWERS)
def test_the_events_of_a_stream_make_the_answer(name: str) -> None:
    request = messages.read(ASKED, Kept())
    written = messages.written(request, ANSWERS[name])
    blocks: list[dict[str, Any]] = []
    end: dict[str, Any] = {}
    for data in event_data(list(messages.events(request, ANSWERS[name]))):
        match data:
            case {"type": "content_block_start", "content_block": block}:
                blocks.append(block | ({"input": ""} if block["type"] == "tool_use" else {}))
            case {"type": "content_block_delta", "index": index, "delta": {"type": _, **parts}}:
                for field, text in parts.items():
                    blocks[index]["input" if field == "partial_json" else field] += text
            case {"type": "message_delta", "delta": stop, "usage": usage}:
                end = {**stop, "usage": usage}
    made = [block | ({"input": json.loads(block["input"])} if block["type"] == "tool_use" else {}) for block in blocks]
    assert made == written["content"]
    assert end == {field: written[field] for field in end}


def test_why_an_answer_ends_is_said() -> None:
    def stop(**changes: Any) -> dict[str, Any]:
        answer = said({"role": "assistant", "content": "x"})
        changed = replace(answer, choices=(replace(answer.choices[0], **changes),))
        return {name: messages.written(ChatRequest(()), changed)[name] for name in ("stop_reason", "stop_sequence")}

    assert stop() == {"stop_reason": "end_turn", "stop_sequence": None}
    assert stop(stop_string="END") == {"stop_reason": "stop_sequence", "stop_sequence": "END"}
    assert stop(finish="length") == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert stop(finish="tool_calls") == {"stop_reason": "tool_use", "stop_sequence": None}


def test_usage_counts_cached_tokens_apart() -> None:
    choice = Choice({"role": "assistant", "content": "x"}, "stop", (1, 2), (0.0, 0.0))
    answer = ChatAnswer("0" * 16, 1, "policy", tuple(range(10)), 7, (choice,))
    usage = messages.written(ChatRequest(()), answer)["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (3, 7, 2)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"tool_choice": {"type": "any"}}, "unsupported_parameter"),
        ({"tool_choice": {"type": "tool", "name": "add"}}, "unsupported_parameter"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "unsupported_parameter"),
        ({"mcp_servers": [{"url": "u"}]}, "unsupported_parameter"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "unsupported_parameter"),
        ({"messages": [*ASKED["messages"], {"role": "assistant", "content": "It is"}]}, "unsupported_parameter"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "unsupported_content"),
        ({"messages": []}, "invalid_request"),
        ({"compaction": {"type": "summarize"}}, "unsupported_parameter"),
        ({"output_config": {"made_up": 1}}, "unsupported_parameter"),
        ({"thread": {"type": "fork"}}, "invalid_request"),
        ({"thread": {"type": "continue", "previous_message_id": "msg_other"}}, "previous_response_not_found"),
        ({"thread": {"type": "continue", "previous_message_id": "msg_other"}, "system": "x"}, "unsupported_parameter"),
        ({"max_tokens": "many"}, "invalid_request"),
    ],
)
def test_what_would_change_the_distribution_or_cannot_be_read_is_refused(change: dict[str, Any], code: str) -> None:
    with pytest.raises(Refusal) as refused:
        messages.read(ASKED | change, Kept())
    assert (refused.value.status, refused.value.code) == (400, code)
    body = messages.refused(refused.value)
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"


def test_a_context_that_is_full_is_said_as_claude_code_reads_it() -> None:
    body = messages.refused(Refusal(400, "context_length_exceeded", "500 are too many: 400"))
    assert body["error"]["message"] == "prompt is too long: 500 tokens > 400 maximum"


@given(any_body(ASKED, "system tools tool_choice output_config stop_sequences thinking"))
def test_any_body_is_read_or_refused(body: dict[str, Any]) -> None:
    try:
        messages.read(body, Kept())
    except Refusal as refusal:
        json.dumps(messages.refused(refusal))


@given(st.text())
def test_events_keep_any_text(text: str) -> None:
    answer = said({"role": "assistant", "content": text})
    found = event_data(list(messages.events(messages.read(ASKED, Kept()), answer)))
    assert "".join(data["delta"]["text"] for data in found if data["type"] == "content_block_delta") == text

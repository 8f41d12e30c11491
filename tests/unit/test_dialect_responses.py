"""OpenAI's Responses, as the gateway reads and writes them."""

import json
from typing import Any

import pytest
from hypothesis import given

from megagrpo.agents.answers import reminded
from megagrpo.agents.dialects import responses
from megagrpo.agents.dialects.chat_request import ChatAnswer, Kept, Message, Refusal, call
from tests.dialect_answers import ANSWERS, any_body, said

ASKED: dict[str, Any] = {"model": "policy", "input": "hi"}
ADD = {"type": "function", "name": "add", "description": "Adds.", "parameters": {"type": "object"}, "strict": True}
PATCH = {
    "type": "custom", "name": "apply_patch", "description": "Patches.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: x"},
}  # fmt: skip


def read(**change: Any) -> responses.ResponsesRequest:
    return responses.read(ASKED | change, Kept())


def asked_then(answer: ChatAnswer, *after: Any, **change: Any) -> tuple[Message, ...]:
    """The messages of a request that sends an answer back."""
    items = responses.written(read(**change), answer)["output"]
    return read(input=[{"role": "user", "content": "hi"}, *items, *after], **change).messages


def test_a_conversation_with_tools_is_read_as_templates_read_it() -> None:
    request = read(
        instructions="Be brief.",
        input=[
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Stay here."}]},
            {"role": "user", "content": "a"},
            {"role": "user", "content": [{"type": "input_text", "text": "b"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
             "content": [{"type": "output_text", "text": "I add.", "annotations": []}]},
            {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a":1}'},
            {"type": "function_call", "call_id": "c2", "name": "close", "namespace": "agents", "arguments": ""},
            {"type": "function_call_output", "call_id": "c1", "output": "1"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "ok"}]},
        ],
        tools=[ADD, {"type": "namespace", "name": "agents", "description": "d", "tools": [ADD | {"name": "close"}]},
               PATCH, {"type": "web_search", "external_web_access": True}],
        temperature=0.5, reasoning={"effort": "high"}, parallel_tool_calls=False, max_output_tokens=7, store=False,
    )  # fmt: skip
    assert request.messages == (
        {"role": "system", "content": "Be brief.\n\nStay here."},
        {"role": "user", "content": "a\n\nb"},
        {"role": "assistant", "content": "I add.", "reasoning_content": "hm",
         "tool_calls": [call("c1", "add", {"a": 1}), call("c2", "agents__close", {})]},
        {"role": "tool", "content": "1", "tool_call_id": "c1"},
        {"role": "tool", "content": "ok", "tool_call_id": "c2"},
    )  # fmt: skip
    assert [tool["function"]["name"] for tool in request.tools] == ["add", "agents__close", "apply_patch"]
    assert "start: x" in request.tools[2]["function"]["description"]
    assert set(request.ignored) == {"temperature", "reasoning", "parallel_tool_calls", "tools/web_search"}
    assert request.tokens_max == 7


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_comes_back_as_it_was_said(name: str) -> None:
    assert asked_then(ANSWERS[name], {"role": "user", "content": "x"})[1] == ANSWERS[name].choices[0].message


def test_reasoning_comes_back_from_clients_that_send_sealed_reasoning_only() -> None:
    request = read(include=["reasoning.encrypted_content"])
    items = responses.written(request, ANSWERS["all"])["output"]
    del items[0]["content"]
    back = read(input=[{"role": "user", "content": "hi"}, *items, {"role": "user", "content": "x"}])
    assert back.messages[1] == ANSWERS["all"].choices[0].message


def test_tools_of_a_namespace_and_tools_that_take_text_are_called_as_they_are_named() -> None:
    space = {"type": "namespace", "name": "agents", "description": "d", "tools": [ADD]}
    calls = [call("c1", "agents__add", {"a": 1}), call("c2", "apply_patch", {"input": "*** Begin"})]
    answer = said({"role": "assistant", "content": "", "tool_calls": calls}, "tool_calls")
    first, second = responses.written(read(tools=[space, PATCH]), answer)["output"]
    assert (first["type"], first["namespace"], first["name"]) == ("function_call", "agents", "add")
    assert json.loads(first["arguments"]) == {"a": 1}
    assert (second["type"], second["name"], second["input"]) == ("custom_tool_call", "apply_patch", "*** Begin")
    outputs = [
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "done"},
    ]
    assert asked_then(answer, *outputs, tools=[space, PATCH])[1]["tool_calls"] == calls


def test_a_response_is_gone_on_with_by_its_id() -> None:
    kept = Kept()
    first = responses.read(ASKED | {"instructions": "Be brief."}, kept)
    kept.keep(first, ANSWERS["all"])
    before = responses.written(first, ANSWERS["all"])
    given = [{"type": "function_call_output", "call_id": c, "output": "1"} for c in ("call_1", "call_2")]
    body = {"model": "policy", "previous_response_id": before["id"], "input": given}
    by_id = responses.read(body | {"instructions": "Be long."}, kept)
    assert by_id.messages[:3] == (
        {"role": "system", "content": "Be long."},
        {"role": "user", "content": "hi"},
        ANSWERS["all"].choices[0].message,
    )
    assert responses.read(body, kept).messages == by_id.messages[1:]
    whole = [{"role": "user", "content": "hi"}, *before["output"], *given]
    assert responses.read(ASKED | {"input": whole}, kept).messages == by_id.messages[1:]
    referred = [{"type": "item_reference", "id": item["id"]} for item in before["output"]]
    referring = [{"role": "user", "content": "hi"}, *referred, *given]
    assert responses.read(ASKED | {"input": referring}, kept).messages == by_id.messages[1:]
    with pytest.raises(Refusal) as refused:
        responses.read(body | {"previous_response_id": "resp_other"}, kept)
    assert refused.value.code == "previous_response_not_found"


def test_histories_that_are_sent_whole_are_held_once() -> None:
    kept, items = Kept(), [{"role": "user", "content": "0"}]
    for turn in range(4):
        request = responses.read(ASKED | {"input": json.loads(json.dumps(items))}, kept)
        answer = ChatAnswer(f"{turn:016x}", 1, "policy", (1,), 0, ANSWERS["all"].choices)
        kept.keep(request, answer)
        outputs = [{"type": "function_call_output", "call_id": c, "output": str(turn)} for c in ("call_1", "call_2")]
        items += [*responses.written(request, answer)["output"], *outputs]
    conversations = list(kept.conversations.values())
    assert [len(each.messages) for each in conversations] == [2, 5, 8, 11]
    assert len({id(message) for each in conversations for message in each.messages}) <= 11 + 3


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_and_streams_are_of_openais_types(name: str) -> None:
    types = pytest.importorskip("openai.types.responses", reason="needs the openai package")
    from pydantic import TypeAdapter

    request = read(tools=[ADD], include=["reasoning.encrypted_content"])
    types.Response.model_validate(responses.written(request, ANSWERS[name]))
    event = TypeAdapter(types.ResponseStreamEvent)
    found = [json.loads(e.partition(b"data: ")[2]) for e in responses.events(request, ANSWERS[name])]
    assert [type(event.validate_python(data)).__name__ for data in found][-1] == (
        "ResponseIncompleteEvent" if name == "cut off" else "ResponseCompletedEvent"
    )
    assert [data["sequence_number"] for data in found] == list(range(len(found)))
    done = [data["item"] for data in found if data["type"] == "response.output_item.done"]
    assert done == found[-1]["response"]["output"] == responses.written(request, ANSWERS[name])["output"]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"tool_choice": "required"}, "unsupported_parameter"),
        ({"tool_choice": {"type": "function", "name": "add"}}, "unsupported_parameter"),
        ({"text": {"format": {"type": "json_schema"}}}, "unsupported_parameter"),
        ({"background": True}, "unsupported_parameter"),
        ({"moderation": {"model": "m"}}, "unsupported_parameter"),
        ({"stop": ["x"]}, "unsupported_parameter"),
        ({"text": {"made_up": 1}}, "unsupported_parameter"),
        ({"conversation": "c"}, "unsupported_parameter"),
        ({"tools": [{"type": "local_shell"}]}, "unsupported_parameter"),
        ({"input": [{"type": "computer_call_output", "call_id": "c", "output": {}}]}, "unsupported_parameter"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}]}, "unsupported_content"),
        ({"input": []}, "invalid_request"),
        ({"input": [{"type": "item_reference", "id": "msg_x"}]}, "previous_response_not_found"),
        ({"max_output_tokens": 0}, "invalid_request"),
    ],
)  # fmt: skip
def test_what_would_change_the_distribution_or_cannot_be_read_is_refused(change: dict[str, Any], code: str) -> None:
    with pytest.raises(Refusal) as refused:
        read(**change)
    assert (refused.value.status, refused.value.code) == (400, code)


@given(any_body(ASKED, "instructions tools tool_choice text include previous_response_id reasoning"))
def test_any_body_is_read_or_refused(body: dict[str, Any]) -> None:
    try:
        responses.read(body, Kept())
    except Refusal as refusal:
        json.dumps(responses.refused(refusal))


def test_a_system_message_within_a_conversation_can_be_said_by_the_user() -> None:
    given = [
        {"role": "system", "content": "s"}, {"role": "user", "content": "u"}, {"role": "system", "content": "late"},
        {"role": "assistant", "content": "a"}, {"role": "tool", "content": "1", "tool_call_id": "c"},
    ]  # fmt: skip
    assert [message["role"] for message in reminded(given)] == ["system", "user", "assistant", "tool"]
    assert reminded(given)[1]["content"] == "u\n\n<system-reminder>\nlate\n</system-reminder>"

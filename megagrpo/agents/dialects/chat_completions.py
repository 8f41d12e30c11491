"""OpenAI's chat completions: POST /v1/chat/completions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from megagrpo.agents.dialects.chat_request import (
    ChatAnswer,
    ChatRequest,
    Kept,
    Message,
    Refusal,
    arguments_of,
    call,
    changes_distribution,
    field_of,
    ignored_fields,
    logprobs_of,
    not_served,
    text_of,
    with_text_arguments,
    wrong,
)

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
NOT_SERVED = {
    "functions": "give tools", "function_call": "give tool_choice", "audio": "only text is served",
    "prediction": "nothing is predicted", "modalities": "only text is served",
    "top_logprobs": "only sampled tokens have logprobs",
}  # fmt: skip
RECIPE = ("reasoning_effort", "verbosity", "web_search_options")
"""Fields that the recipe decides, beside those of every dialect."""

SERVED = {
    "messages", "tools", "tool_choice", "parallel_tool_calls", "response_format", "n", "max_tokens",
    "max_completion_tokens", "stop", "stream", "logprobs", "return_token_ids",
}  # fmt: skip
GRAMMARS = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "regex", "ebnf", "json_schema")
ANSWERS_MAX = 128
WAITING = b": still generating\n\n"


def read(body: Mapping[str, Any], kept: Kept) -> ChatRequest:
    for field in ("response_format", *GRAMMARS):
        if body.get(field) not in (None, {"type": "text"}):
            raise changes_distribution(field)
    for field, instead in NOT_SERVED.items():
        if body.get(field) not in (None, 0, ["text"]):
            raise not_served(field, instead)
    ignored = ignored_fields(body, {*SERVED, *NOT_SERVED, *GRAMMARS}, RECIPE)
    choice = body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise changes_distribution("tool_choice")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise wrong("messages", "a list of messages")
    stop = body.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
        raise wrong("stop", "a text, or a list of texts")
    given = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    options = body.get("stream_options")
    ignored += ["parallel_tool_calls"] if body.get("parallel_tool_calls") is False else []
    return ChatRequest(
        messages=tuple(message_of(message, f"messages[{number}]") for number, message in enumerate(messages)),
        tools=() if choice == "none" else tools_of(field_of(body, "tools", list)),
        answers=count_of(body, "n", ANSWERS_MAX) or 1,
        tokens_max=count_of(body, given),
        stop=tuple(stop),
        stream=bool(body.get("stream")),
        stream_usage=isinstance(options, Mapping) and bool(options.get("include_usage")),
        logprobs=bool(body.get("logprobs")),
        token_ids=bool(body.get("return_token_ids")),
        ignored=tuple(ignored),
        model=str(body.get("model") or ""),
    )


def count_of(body: Mapping[str, Any], field: str, most: int | None = None) -> int | None:
    value = body.get(field)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1 or (most is not None and value > most):
        raise wrong(field, "a positive integer" + (f" up to {most}" if most else ""))
    return value


def message_of(message: Any, field: str) -> Message:
    if not isinstance(message, Mapping) or str(message.get("role")) not in ROLES:
        raise wrong(field, f"a message with role {', '.join(ROLES)}")
    made: dict[str, Any] = {
        "role": ROLES[message["role"]],
        "content": text_of(message.get("content"), f"{field}.content"),
    }
    for name in ("name", "tool_call_id", "reasoning_content"):
        if isinstance(message.get(name), str):
            made[name] = message[name]
    if message.get("function_call") is not None:
        raise not_served(f"{field}.function_call", "give tool_calls")
    calls = message.get("tool_calls")
    if calls and made["role"] == "assistant":
        try:
            made["tool_calls"] = [
                call(str(one["id"]), str(one["function"]["name"]), arguments_of(one["function"].get("arguments")))
                for one in calls
            ]
        except (KeyError, TypeError, AttributeError):
            raise wrong(f"{field}.tool_calls", "a list of calls with id and function") from None
    return made


def tools_of(tools: list[Any]) -> tuple[Mapping[str, Any], ...]:
    """Returns tools as given: a template may write any field of a tool. Raises Refusal."""
    for number, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise wrong(f"tools[{number}]", 'a tool {"type": "function", "function": {"name": ...}}')
    return tuple(tools)


def written(request: ChatRequest, answer: ChatAnswer) -> dict[str, Any]:
    choices = []
    for index, choice in enumerate(answer.choices):
        made: dict[str, Any] = {
            "index": index, "message": {"refusal": None, **with_text_arguments(choice.message)},
            "finish_reason": choice.finish,
            "logprobs": {"content": logprobs_of(choice), "refusal": None} if request.logprobs else None,
        }  # fmt: skip
        if "tool_calls" in choice.message:
            made["message"]["content"] = choice.message["content"] or None
        made |= {"unreadable": True} if choice.unreadable else {}  # ours: the tool loop tells the policy
        choices.append(made | ({"token_ids": list(choice.tokens)} if request.token_ids else {}))
    whole = {
        "id": f"chatcmpl-{answer.id}", "object": "chat.completion", "created": answer.created, "model": answer.model,
        "choices": choices, "usage": {
            "prompt_tokens": len(answer.prompt), "completion_tokens": answer.sampled_tokens,
            "total_tokens": len(answer.prompt) + answer.sampled_tokens,
            "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
        },
    }  # fmt: skip
    return whole | ({"prompt_token_ids": list(answer.prompt)} if request.token_ids else {})


def events(request: ChatRequest, answer: ChatAnswer) -> Iterator[bytes]:
    whole = written(request, answer)
    shared = {name: whole[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    shared |= {name: whole[name] for name in ("prompt_token_ids",) if name in whole}
    for choice in whole["choices"]:
        delta = {name: value for name, value in choice["message"].items() if value is not None}
        if calls := delta.get("tool_calls"):
            delta["tool_calls"] = [{"index": index, **one} for index, one in enumerate(calls)]
        more = {name: choice[name] for name in ("logprobs", "token_ids") if name in choice}
        yield event({**shared, "choices": [{"index": choice["index"], "delta": delta, "finish_reason": None, **more}]})
        end = {"index": choice["index"], "delta": {}, "finish_reason": choice["finish_reason"]}
        yield event({**shared, "choices": [end]})
    if request.stream_usage:
        yield event({**shared, "choices": [], "usage": whole["usage"]})
    yield b"data: [DONE]\n\n"


def event(data: Mapping[str, Any]) -> bytes:
    return f"data: {json.dumps(data)}\n\n".encode()


def refused(refusal: Refusal) -> dict[str, Any]:
    kind = "invalid_request_error" if refusal.status < 500 else "server_error"
    return {"error": {"message": refusal.message, "type": kind, "param": refusal.field, "code": refusal.code}}


def refused_event(refusal: Refusal) -> bytes:
    return event(refused(refusal))

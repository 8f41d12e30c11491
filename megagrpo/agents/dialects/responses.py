"""OpenAI's Responses: POST /v1/responses, as its SDKs, the Agents SDK and Codex ask it."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megagrpo.agents.dialects.chat_completions import WAITING, count_of, refused
from megagrpo.agents.dialects.chat_request import (
    ChatAnswer,
    ChatRequest,
    Conversation,
    Kept,
    Message,
    Refusal,
    arguments_of,
    call,
    changes_distribution,
    event,
    field_of,
    ignored_fields,
    joined,
    logprobs_of,
    not_served,
    text_of,
    wrong,
)

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
NOT_SERVED = {
    "background": "an answer is waited for", "conversation": "give input, or previous_response_id",
    "prompt": "give instructions and input", "top_logprobs": "only sampled tokens have logprobs",
}  # fmt: skip
RECIPE = ("reasoning", "verbosity", "context_management", "max_tool_calls", "truncation")
"""Fields that the recipe decides, beside those of every dialect."""

SERVED = {
    "input", "instructions", "previous_response_id", "include", "text", "tools", "tool_choice", "parallel_tool_calls",
    "max_output_tokens", "stream",
}  # fmt: skip
HOSTED = ("web_search", "file_search", "code_interpreter", "image_generation", "mcp", "tool_search")
"""Prefixes of the types of tools that run in OpenAI's servers. The policy does not see them."""

INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
"""Parameters of a tool that takes text."""

SEALED = "megagrpo:"
"""Prefix of the text in place of encrypted reasoning: clients such as Codex send that back, and no plain text."""


__all__ = ["WAITING", "events", "read", "refused", "refused_event", "written"]


@dataclass(frozen=True, slots=True)
class Tool:
    """The agent's tool behind the name that the policy uses."""

    name: str
    namespace: str = ""
    takes_text: bool = False


@dataclass(frozen=True, slots=True)
class ResponsesRequest(ChatRequest):
    """A request of Responses. `kept` leaves out instructions and tools: these are of one request only."""

    instructions: str = ""
    previous: str = ""  # id of the response that it continues
    names: Mapping[str, Tool] = field(default_factory=dict)  # tools by the policy's name
    seals: bool = False  # reasoning is wanted in a form that can be sent back


def read(body: Mapping[str, Any], kept: Kept) -> ResponsesRequest:
    text = field_of(body, "text", dict)
    if field_of(text, "format", dict).get("type", "text") != "text":
        raise changes_distribution("text.format")
    for name, instead in NOT_SERVED.items():
        if body.get(name):
            raise not_served(name, instead)
    ignored = ignored_fields(body, {*SERVED, *NOT_SERVED}, RECIPE)
    ignored += ignored_fields(text, ("format",), ("verbosity",), "text.")
    choice = body.get("tool_choice") or "auto"
    if choice not in ("auto", "none"):
        raise changes_distribution("tool_choice")
    tools, names, hosted = tools_of(field_of(body, "tools", list))
    previous = str(body.get("previous_response_id") or "")
    before = kept.of(previous, "previous_response_id").messages if previous else ()
    conversation = joined([*before, *conversation_of(body, kept)])
    instructions = text_of(body.get("instructions"), "instructions")
    messages = joined([*([{"role": "system", "content": instructions}] if instructions else []), *conversation])
    if not conversation:
        raise wrong("input", "a text, or a list of items")
    if messages[-1]["role"] == "assistant":
        raise not_served("input", "an answer that has begun is not gone on with")
    include = field_of(body, "include", list)
    ignored += hosted + (["parallel_tool_calls"] if body.get("parallel_tool_calls") is False else [])
    return ResponsesRequest(
        messages=messages,
        tools=() if choice == "none" else tools,
        tokens_max=count_of(body, "max_output_tokens"),
        stream=bool(body.get("stream")),
        logprobs="message.output_text.logprobs" in include,
        ignored=tuple(ignored),
        model=str(body.get("model") or ""),
        kept=Conversation(conversation),
        instructions=instructions,
        previous=previous,
        names=names,
        seals="reasoning.encrypted_content" in include,
    )


def conversation_of(body: Mapping[str, Any], kept: Kept) -> Iterator[Message]:
    if isinstance(body.get("input"), str):
        yield {"role": "user", "content": body["input"]}
        return
    for number, item in enumerate(field_of(body, "input", list)):
        if not isinstance(item, Mapping):
            raise wrong(f"input[{number}]", "an item")
        yield from item_of(item, f"input[{number}]", kept)


def item_of(item: Mapping[str, Any], field: str, kept: Kept) -> Iterator[Message]:
    """Yields an item as a message; an answer's item, as the part of a message that `joined` puts together again."""
    match item:
        case {"role": str(role)} if role in ROLES and item.get("type", "message") == "message":
            yield {"role": ROLES[role], "content": text_of(item.get("content"), f"{field}.content")}
        case {"type": "function_call", "call_id": identity, "name": name}:
            called_as = name_of(str(item.get("namespace") or ""), str(name))
            yield called(call(str(identity), called_as, arguments_of(item.get("arguments"))))
        case {"type": "custom_tool_call", "call_id": identity, "name": name}:
            yield called(call(str(identity), str(name), {"input": item.get("input")}))
        case {"type": "function_call_output" | "custom_tool_call_output", "call_id": identity}:
            text = text_of(item.get("output"), f"{field}.output")
            yield {"role": "tool", "content": text, "tool_call_id": str(identity)}
        case {"type": "reasoning"}:
            if thought := thought_of(item, field):
                yield {"role": "assistant", "content": "", "reasoning_content": thought}
        case {"id": str(identity), **rest} if rest.get("type") in (None, "item_reference"):
            yield part_of(identity, kept.of(identity.partition(".")[0], field).messages[-1])
        case _:
            raise not_served(field, f"items of type {item.get('type')} cannot be shown to the policy")


def called(one: Mapping[str, Any]) -> Message:
    return {"role": "assistant", "content": "", "tool_calls": [one]}


def thought_of(item: Mapping[str, Any], field: str) -> str:
    if parts := item.get("content"):
        return text_of(parts, f"{field}.content")
    sealed = item.get("encrypted_content")
    if isinstance(sealed, str) and sealed.startswith(SEALED):
        try:
            return base64.b64decode(sealed.removeprefix(SEALED), validate=True).decode()
        except ValueError:
            raise wrong(f"{field}.encrypted_content", "what this gateway wrote") from None
    return ""


def tools_of(tools: Sequence[Any]) -> tuple[tuple[Mapping[str, Any], ...], dict[str, Tool], list[str]]:
    """Returns the tools that an agent runs itself, each `Tool` by the policy's name, and the names of hosted ones."""
    made, names, hosted = [], {}, []
    for number, tool in enumerate(tools):
        for space, one in within(tool, f"tools[{number}]"):
            kind = str(one.get("type"))
            if kind.startswith(HOSTED):
                hosted.append(f"tools/{kind}")
                continue
            if kind not in ("function", "custom"):
                raise not_served(f"tools[{number}]", f"{kind}: a function with parameters is needed")
            if not isinstance(one.get("name"), str):
                raise wrong(f"tools[{number}]", "a tool with a name")
            name = name_of(space, one["name"])
            names[name] = Tool(one["name"], space, kind == "custom")
            parameters = INPUT if kind == "custom" else one.get("parameters") or {"type": "object", "properties": {}}
            description, form = str(one.get("description") or ""), one.get("format")
            if isinstance(form, Mapping) and form.get("type") == "grammar":  # the policy is shown it, not held to it
                description += f"\n\nGrammar of the input ({form.get('syntax')}):\n{form.get('definition')}"
            function = {"name": name, "description": description, "parameters": parameters}
            made.append({"type": "function", "function": function})
    return tuple(made), names, hosted


def within(tool: Any, field: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields a tool, or the tools of a namespace, each with the namespace's name."""
    if not isinstance(tool, Mapping):
        raise wrong(field, "a tool")
    if tool.get("type") != "namespace":
        yield "", tool
        return
    for one in field_of(tool, "tools", list):
        if not isinstance(one, Mapping):
            raise wrong(field, "a namespace of tools")
        yield str(tool.get("name") or ""), one


def name_of(namespace: str, name: str) -> str:
    return f"{namespace.rstrip('_')}__{name}" if namespace else name


# --- answers ----------------------------------------------------------------------------------------------------------


def written(request: ResponsesRequest, answer: ChatAnswer) -> dict[str, Any]:
    (choice,) = answer.choices
    cut = choice.finish == "length"
    items = items_of(request, answer)
    if cut and items:
        items[-1]["status"] = "incomplete"
    return {
        "id": f"resp_{answer.id}", "object": "response", "created_at": answer.created, "model": answer.model,
        "status": "incomplete" if cut else "completed", "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "instructions": request.instructions or None, "previous_response_id": request.previous or None,
        "output": items, "parallel_tool_calls": True, "tool_choice": "auto", "tools": [],
        "max_output_tokens": request.tokens_max, "metadata": {}, "store": True, "usage": {
            "input_tokens": len(answer.prompt), "output_tokens": answer.sampled_tokens,
            "total_tokens": len(answer.prompt) + answer.sampled_tokens,
            "input_tokens_details": {"cached_tokens": answer.cached_tokens, "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
    }  # fmt: skip


def items_of(request: ResponsesRequest, answer: ChatAnswer) -> list[dict[str, Any]]:
    (choice,) = answer.choices
    message = choice.message
    items: list[dict[str, Any]] = []
    if thought := message.get("reasoning_content"):
        content = {"content": [{"type": "reasoning_text", "text": thought}], "summary": []}
        sealed = {"encrypted_content": SEALED + base64.b64encode(thought.encode()).decode()} if request.seals else {}
        items.append({"type": "reasoning", "id": f"rs_{answer.id}", "status": "completed", **content, **sealed})
    calls = message.get("tool_calls", ())
    if message["content"] or not calls:
        part = {"type": "output_text", "text": message["content"], "annotations": [], "logprobs": logprobs_of(choice)}
        identity = f"msg_{answer.id}"
        items.append({"type": "message", "id": identity, "role": "assistant", "status": "completed", "content": [part]})
    return items + [call_written(request, one, f"{answer.id}.{number}") for number, one in enumerate(calls)]


def call_written(request: ResponsesRequest, one: Mapping[str, Any], identity: str) -> dict[str, Any]:
    function = one["function"]
    name, arguments = function["name"], function["arguments"]
    tool = request.names.get(name, Tool(name))
    made = {"call_id": one["id"], "name": tool.name, "status": "completed"}
    made |= {"namespace": tool.namespace} if tool.namespace else {}
    text = json.dumps(arguments, ensure_ascii=False)
    if tool.takes_text:
        match arguments:
            case {"input": str(given)}:  # any other arguments go to the tool, which may report the fault
                text = given
        return {"type": "custom_tool_call", "id": f"ctc_{identity}", **made, "input": text}
    return {"type": "function_call", "id": f"fc_{identity}", **made, "arguments": text}


def part_of(identity: str, message: Message) -> Message:
    """Returns the part of an answer that an item's id names: reasoning, text, or one of its calls. Raises Refusal."""
    kind, _, rest = identity.partition("_")
    if kind == "rs":
        return {"role": "assistant", "content": "", "reasoning_content": message.get("reasoning_content", "")}
    if kind == "msg":
        return {"role": "assistant", "content": message["content"]}
    number = rest.rpartition(".")[2]
    calls = message.get("tool_calls", ())
    if not number.isdecimal() or int(number) >= len(calls):
        raise wrong("input", f"an item of this rollout, not {identity}")
    return called(calls[int(number)])


def events(request: ResponsesRequest, answer: ChatAnswer) -> Iterator[bytes]:
    for number, data in enumerate(data_of_events(written(request, answer))):
        yield event({**data, "sequence_number": number})


def data_of_events(whole: dict[str, Any]) -> Iterator[dict[str, Any]]:
    begun = {**whole, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for index, item in enumerate(whole["output"]):
        at = {"output_index": index, "item_id": item["id"]}
        yield {"type": "response.output_item.added", "output_index": index, "item": empty(item)}
        match item["type"]:
            case "function_call":
                name = "response.function_call_arguments"
                yield {"type": f"{name}.delta", **at, "delta": item["arguments"]}
                yield {"type": f"{name}.done", **at, "name": item["name"], "arguments": item["arguments"]}
            case "custom_tool_call":
                yield {"type": "response.custom_tool_call_input.delta", **at, "delta": item["input"]}
                yield {"type": "response.custom_tool_call_input.done", **at, "input": item["input"]}
            case kind:
                yield from content_events(item["content"], at, "reasoning" if kind == "reasoning" else "output")
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": f"response.{whole['status']}", "response": whole}


def content_events(content: Sequence[Mapping[str, Any]], at: Mapping[str, Any], kind: str) -> Iterator[dict[str, Any]]:
    for number, part in enumerate(content):
        place = {**at, "content_index": number}
        yield {"type": "response.content_part.added", **place, "part": {**part, "text": ""}}
        probabilities = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
        yield {"type": f"response.{kind}_text.delta", **place, "delta": part["text"], **probabilities}
        yield {"type": f"response.{kind}_text.done", **place, "text": part["text"], **probabilities}
        yield {"type": "response.content_part.done", **place, "part": part}


def empty(item: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an item as it begins: in progress and empty."""
    begun = {name: type(value)() for name, value in item.items() if name in ("content", "arguments", "input")}
    return {**item, "status": "in_progress", **begun}


def refused_event(refusal: Refusal) -> bytes:
    failed = {
        "id": "resp_failed", "object": "response", "created_at": 0, "model": "", "status": "failed", "output": [],
        "error": refused(refusal)["error"], "parallel_tool_calls": True, "tool_choice": "auto", "tools": [],
    }  # fmt: skip
    return event({"type": "response.failed", "sequence_number": 0, "response": failed})

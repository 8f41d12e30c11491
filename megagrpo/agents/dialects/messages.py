"""Anthropic's Messages: POST /v1/messages and /v1/messages/count_tokens, as its SDKs and Claude Code ask them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megagrpo.agents.dialects.chat_completions import count_of
from megagrpo.agents.dialects.chat_request import (
    ChatAnswer,
    ChatRequest,
    Conversation,
    Kept,
    Message,
    Refusal,
    call,
    changes_distribution,
    event,
    field_of,
    ignored_fields,
    joined,
    not_served,
    text_of,
    wrong,
)

RECIPE = ("thinking", "context_management", "speed", "container")
"""Fields that the recipe decides, beside those of every dialect."""

SERVED = {
    "messages", "system", "thread", "tools", "tool_choice", "mcp_servers", "output_config", "output_format",
    "max_tokens", "stop_sequences", "stream",
}  # fmt: skip

HOSTED = ("web_search_", "web_fetch_", "code_execution_", "tool_search_tool_", "advisor_", "mcp_toolset")
"""Prefixes of the types of tools that run in Anthropic's servers. The policy does not see them."""

BILLING = "x-anthropic-billing-header:"
"""Claude Code's first line of the system prompt: it is for Anthropic's servers and changes with each question."""

ERRORS = {
    400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 408: "timeout_error",
    409: "conflict_error", 413: "request_too_large",
}  # fmt: skip
WAITING = event({"type": "ping"})
STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def read(body: Mapping[str, Any], kept: Kept) -> ChatRequest:
    output = field_of(body, "output_config", dict)
    if output.get("format") is not None or body.get("output_format") is not None:
        raise changes_distribution("output_config.format")
    if body.get("mcp_servers"):
        raise not_served("mcp_servers", "the agent asks its servers itself")
    ignored = ignored_fields(body, SERVED, RECIPE)
    ignored += ignored_fields(output, ("format",), ("effort",), "output_config.")
    choice = field_of(body, "tool_choice", dict)
    if choice.get("type", "auto") not in ("auto", "none"):
        raise changes_distribution("tool_choice")
    before = thread_of(body, kept)
    system = body.get("system")
    if isinstance(system, list):
        system = [part for part in system if not text_of([part], "system").startswith(BILLING)]
    given: list[Message] = [{"role": "system", "content": text}] if (text := text_of(system, "system")) else []
    given += conversation_of(field_of(body, "messages", list))
    messages = joined([*(before.messages if before else ()), *given])
    if not messages:
        raise wrong("messages", "a list of messages")
    if messages[-1]["role"] == "assistant":
        raise not_served("messages", "an answer that has begun is not gone on with")
    stop = field_of(body, "stop_sequences", list)
    if not all(isinstance(text, str) and text for text in stop):
        raise wrong("stop_sequences", "a list of texts")
    tools, hosted = tools_of(field_of(body, "tools", list))
    tools = before.tools if before and before.tools else tools
    ignored += hosted + (["parallel_tool_calls"] if choice.get("disable_parallel_tool_use") else [])
    return ChatRequest(
        messages=messages,
        tools=() if choice.get("type") == "none" else tools,
        tokens_max=count_of(body, "max_tokens"),
        stop=tuple(stop),
        stream=bool(body.get("stream")),
        ignored=tuple(ignored),
        model=str(body.get("model") or ""),
        kept=None if before is None else Conversation(messages, tools),
    )


def thread_of(body: Mapping[str, Any], kept: Kept) -> Conversation | None:
    """Returns the conversation that a request of a thread continues; None for a request of no thread. A thread has its
    system prompt and its tools from the request that began it. Raises Refusal."""
    match body.get("thread"):
        case None:
            return None
        case {"type": "create"}:
            return Conversation()
        case {"type": "continue", "previous_message_id": str(previous)}:
            for field in ("system", "tools"):
                if body.get(field) is not None:
                    raise not_served(field, "a thread has it from the request that began it")
            return kept.of(previous, "thread.previous_message_id")
    raise wrong("thread", 'null, {"type": "create"}, or {"type": "continue", "previous_message_id": ...}')


def conversation_of(given: Sequence[Any]) -> Iterator[Message]:
    for number, message in enumerate(given):
        field = f"messages[{number}]"
        role = message.get("role") if isinstance(message, Mapping) else None
        if role not in ("user", "assistant", "system"):
            raise wrong(field, "a message with role user or assistant")
        content = message.get("content")
        if role == "assistant":
            yield assistant_of(content, f"{field}.content")
        elif role == "system" or not isinstance(content, list):
            yield {"role": role, "content": text_of(content, f"{field}.content")}
        else:
            yield from user_of(content, f"{field}.content")


def user_of(blocks: Sequence[Any], field: str) -> Iterator[Message]:
    """Yields each tool result as a message, and the other text as user messages, in the blocks' order."""
    pending: list[Any] = []
    for number, block in enumerate(blocks):
        if not isinstance(block, Mapping) or block.get("type") != "tool_result":
            pending.append(block)
            continue
        if pending:
            yield {"role": "user", "content": text_of(pending, field)}
            pending = []
        text = text_of(block.get("content"), f"{field}[{number}].content")
        text = text or ("error" if block.get("is_error") else "")
        yield {"role": "tool", "content": text, "tool_call_id": str(block.get("tool_use_id"))}
    if pending:
        yield {"role": "user", "content": text_of(pending, field)}


def assistant_of(content: Any, field: str) -> Message:
    blocks = content if isinstance(content, list) else [{"type": "text", "text": text_of(content, field)}]
    texts, thoughts, calls = [], [], []
    for number, block in enumerate(blocks):
        match block:
            case {"type": "thinking", "thinking": str(thought)}:
                thoughts.append(thought)
            case {"type": "redacted_thinking"}:  # nothing of ours
                pass
            case {"type": "tool_use", "id": identity, "name": name, "input": arguments}:
                calls.append(call(str(identity), str(name), arguments))
            case _:
                texts.append(text_of([block], f"{field}[{number}]"))
    made: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    made |= {"reasoning_content": "".join(thoughts)} if thoughts else {}
    return made | ({"tool_calls": calls} if calls else {})


def tools_of(tools: Sequence[Any]) -> tuple[tuple[Mapping[str, Any], ...], list[str]]:
    """Returns the tools that an agent runs itself, and the names of hosted ones, which the policy does not see."""
    made, hosted = [], []
    for number, tool in enumerate(tools):
        kind = tool.get("type") or "custom" if isinstance(tool, Mapping) else ""
        if str(kind).startswith(HOSTED):
            hosted.append(f"tools/{kind}")
            continue
        if kind != "custom":
            raise not_served(f"tools[{number}]", f"{kind}: a tool with an input_schema is needed")
        if not isinstance(tool.get("name"), str) or not isinstance(tool.get("input_schema"), Mapping):
            raise wrong(f"tools[{number}]", "a tool with name and input_schema")
        function = {"name": tool["name"], "description": str(tool.get("description") or "")}
        made.append({"type": "function", "function": {**function, "parameters": tool["input_schema"]}})
    return tuple(made), hosted


# --- answers ----------------------------------------------------------------------------------------------------------


def written(request: ChatRequest, answer: ChatAnswer) -> dict[str, Any]:
    (choice,) = answer.choices
    stop = {"stop_reason": STOPS[choice.finish], "stop_sequence": None}
    if choice.stop_string and choice.finish == "stop":
        stop = {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_string}
    return {
        "id": f"msg_{answer.id}", "type": "message", "role": "assistant", "model": answer.model,
        "content": blocks_of(choice.message, answer.id), **stop, "usage": {
            "input_tokens": len(answer.prompt) - answer.cached_tokens, "cache_read_input_tokens": answer.cached_tokens,
            "cache_creation_input_tokens": 0, "output_tokens": answer.sampled_tokens,
        },
    }  # fmt: skip


def blocks_of(message: Message, identity: str) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if thought := message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": thought, "signature": identity})
    calls = message.get("tool_calls", ())
    if message["content"] or not (blocks or calls):
        blocks.append({"type": "text", "text": message["content"]})
    for one in calls:
        function = one["function"]
        blocks.append({"type": "tool_use", "id": one["id"], "name": function["name"], "input": function["arguments"]})
    return blocks


def events(request: ChatRequest, answer: ChatAnswer) -> Iterator[bytes]:
    whole = written(request, answer)
    begun = {**whole, "content": [], "stop_reason": None, "stop_sequence": None}
    yield event({"type": "message_start", "message": {**begun, "usage": {**whole["usage"], "output_tokens": 0}}})
    for index, block in enumerate(whole["content"]):
        empty, deltas = parts_of(block)
        yield event({"type": "content_block_start", "index": index, "content_block": empty})
        for delta in deltas:
            yield event({"type": "content_block_delta", "index": index, "delta": delta})
        yield event({"type": "content_block_stop", "index": index})
    stop = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
    yield event({"type": "message_delta", "delta": stop, "usage": whole["usage"]})
    yield event({"type": "message_stop"})


def parts_of(block: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns a block as it begins, and the deltas that complete it."""
    match block:
        case {"type": "thinking", "thinking": thought, "signature": signature}:
            deltas = [
                {"type": "thinking_delta", "thinking": thought},
                {"type": "signature_delta", "signature": signature},
            ]
            return {**block, "thinking": "", "signature": ""}, deltas
        case {"type": "tool_use", "input": given}:
            return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": json.dumps(given)}]
        case _:
            return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]


def refused(refusal: Refusal) -> dict[str, Any]:
    kind = ERRORS.get(refusal.status, "invalid_request_error" if refusal.status < 500 else "api_error")
    message = refusal.message
    if refusal.code == "context_length_exceeded":  # Claude Code shortens its history when it reads this
        numbers = re.findall(r"\d+", message)
        message = "prompt is too long: " + (f"{numbers[0]} tokens > {numbers[1]} maximum" if numbers[1:] else message)
    error: dict[str, Any] = {"type": kind, "message": message}
    if refusal.code == "previous_response_not_found":  # Anthropic's client then begins another thread
        error["details"] = {"error_code": "thread_not_found"}
    return {"type": "error", "error": error}


def refused_event(refusal: Refusal) -> bytes:
    return event(refused(refusal))

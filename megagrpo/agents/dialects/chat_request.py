"""Requests of agents and answers of the gateway, in no dialect. The dialects' modules read and write these."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeGuard, TypeVar

Message = Mapping[str, Any]
"""A message as chat templates read it: role (system, user, assistant or tool), content (text); of an assistant,
tool_calls [{"id", "type": "function", "function": {"name", "arguments": an object}}] and reasoning_content if it has
them; of a tool, tool_call_id. No nulls."""

Kind = TypeVar("Kind", dict[str, Any], list[Any])

DISTRIBUTION = {
    "temperature", "top_p", "top_k", "min_p", "typical_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "seed",
}  # fmt: skip
"""Fields that would change the distribution of tokens. The recipe sets it; an agent's are ignored and counted."""

HARMLESS = {
    "model", "metadata", "client_metadata", "user", "user_profile_id", "workspace_id", "safety_identifier",
    "access_programs", "service_tier", "priority", "inference_geo", "billing_policy", "fallbacks",
    "fallback_credit_token", "diagnostics", "store", "cache_control", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "stream_options", "background_options", "request_id", "rid",
}  # fmt: skip
"""Fields that change no answer: who asks, who pays, what is cached and stored, on which machine."""

ARGUMENTS_LEVELS_MAX = 64
"""Most levels of nested lists and objects in a call's arguments: deeper ones cannot be read."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages so far, and the tools that its agent runs: a request that continues it may leave both out."""

    messages: tuple[Message, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One request for answers to a conversation."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()  # as OpenAI's chat completions; none if the agent wants no call
    answers: int = 1
    tokens_max: int | None = None  # of an answer; the recipe's limits hold too
    stop: tuple[str, ...] = ()
    stream: bool = False
    stream_usage: bool = False
    logprobs: bool = False
    token_ids: bool = False
    ignored: tuple[str, ...] = ()  # fields that were given, and that the recipe decides
    model: str = ""
    kept: Conversation | None = None  # the conversation that a later request may continue by the answer's id alone


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer of the policy. Its tokens, logprobs and texts have one entry per sampled token."""

    message: Message
    finish: Literal["stop", "length", "tool_calls"]
    tokens: Sequence[int]
    logprobs: Sequence[float]
    texts: Sequence[str] = ()  # of each token alone; empty unless the request wants logprobs
    stop_string: str = ""  # the stop string of the request that ended the answer
    unreadable: bool = False  # it has a tool call that cannot be read, or whose tool is unknown


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """All answers to a request. `id` is 16 hexadecimal digits: a dialect may write a prefix before it, nothing behind
    it, because an agent's turn rewards may name turns by it."""

    id: str
    created: int  # seconds since 1970
    model: str
    prompt: Sequence[int]  # token ids
    cached_tokens: int  # prompt tokens that earlier turns had
    choices: tuple[Choice, ...]

    @property
    def sampled_tokens(self) -> int:
        return sum(len(choice.tokens) for choice in self.choices)


@dataclass(slots=True)
class Kept:
    """A rollout's conversations by the id of the answer that ends each, for dialects that continue by this id."""

    conversations: dict[str, Conversation] = field(default_factory=dict)
    latest: tuple[Message, ...] = ()

    def keep(self, request: ChatRequest, answer: ChatAnswer) -> None:
        if request.kept is not None:
            # Clients send the whole history each time: it is held once.
            messages = request.kept.messages
            same = [old if old == new else new for old, new in zip(self.latest, messages, strict=False)]
            self.latest = (*same, *messages[len(same) :], answer.choices[0].message)
            self.conversations[answer.id] = Conversation(self.latest, request.kept.tools)

    def of(self, answer: str, wanted: str) -> Conversation:
        """Returns the conversation that ends with an answer, named by its id with any prefix. `wanted` is the field
        of the request with this id. Raises Refusal if the rollout has no such answer."""
        conversation = self.conversations.get(answer.rpartition("_")[2])
        if conversation is None:
            raise Refusal(400, "previous_response_not_found", f"{wanted}: this rollout has no such response", wanted)
        return conversation


class Refusal(Exception):  # noqa: N818  an answer over HTTP, not a failure of the run
    """The refusal of a request, sent to the agent as an HTTP status and the dialect's error body. `code` is OpenAI's
    where it has one; `field` names the field of the request that is wrong."""

    def __init__(self, status: int, code: str, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.field = status, code, message, field


class Dialect(Protocol):
    """The functions of a dialect's module. Events are the bytes of server-sent events, each with its empty line.
    WAITING is sent now and then while an answer is generated."""

    WAITING: bytes

    def read(self, body: Mapping[str, Any], kept: Kept) -> ChatRequest:
        """Reads a body. Raises Refusal if it is not of the dialect, or would change the distribution."""

    def written(self, request: Any, answer: ChatAnswer) -> dict[str, Any]:
        """Writes the body of an answer. `request` is what `read` returned."""

    def events(self, request: Any, answer: ChatAnswer) -> Iterator[bytes]:
        """Yields the events of a complete answer."""

    def refused(self, refusal: Refusal) -> dict[str, Any]:
        """Returns the body of an error."""

    def refused_event(self, refusal: Refusal) -> bytes:
        """Returns the event of an error in a stream that has begun."""


def wrong(field: str, needed: str) -> Refusal:
    """Returns the refusal of a field that is not of the dialect."""
    return Refusal(400, "invalid_request", f"{field}: {needed} is needed", field)


def not_served(field: str, why: str) -> Refusal:
    return Refusal(400, "unsupported_parameter", f"{field}: {why}", field)


def ignored_fields(
    body: Mapping[str, Any], served: Collection[str], recipe: Iterable[str] = (), within: str = ""
) -> list[str]:
    """Returns the fields of DISTRIBUTION and `recipe` that a body has, for `ChatRequest.ignored`. Raises Refusal for a
    field that is none of these, nor `served`, nor harmless. Null counts as absent."""
    decided = [*sorted(DISTRIBUTION), *recipe]
    given = [name for name, value in body.items() if value is not None]
    for name in given:
        if name not in served and name not in decided and name not in HARMLESS:
            raise not_served(f"{within}{name}", "this gateway does not support it; leave it out")
    return [name for name in decided if name in given]


def changes_distribution(field: str) -> Refusal:
    return not_served(field, "would sample from another distribution than the one that is trained")


def text_of(content: Any, field: str) -> str:
    """Returns text content: of a string, null, or a list of parts that have text. Raises Refusal for anything else."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise wrong(field, "text, or a list of parts with text")
    texts = []
    for number, part in enumerate(content):
        text, kind = (part.get("text"), part.get("type")) if isinstance(part, Mapping) else (part, None)
        if not isinstance(text, str):
            message = f"{field}[{number}]: {kind} is not text, which alone is read"
            raise Refusal(400, "unsupported_content", message, field)
        texts.append(text)
    return "".join(texts)


def field_of(body: Mapping[str, Any], field: str, kind: type[Kind]) -> Kind:
    """Returns a field that is an object or a list; an empty one if it is absent. Raises Refusal for another value."""
    value = body.get(field) or kind()
    if not isinstance(value, kind):
        raise wrong(field, "a list" if kind is list else "an object")
    return value


def is_deeper(value: Any, levels: int) -> bool:
    """Returns whether JSON nests lists and objects deeper than `levels`. Python's recursion ends at some hundreds."""
    level = [value]
    for _ in range(levels + 1):
        within = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        if not within:
            return False
        level = [one for values in within for one in values if isinstance(one, dict | list)]
    return True


def is_arguments(value: Any) -> TypeGuard[Mapping[str, Any]]:
    """Returns whether a value can be the arguments of a call: an object of at most ARGUMENTS_LEVELS_MAX levels."""
    return isinstance(value, dict) and not is_deeper(value, ARGUMENTS_LEVELS_MAX)


def arguments_of(written: Any) -> Any:
    """Returns a call's arguments as an object: clients send JSON text. Text that cannot be read stays as it is."""
    if not isinstance(written, str):
        return written or {}
    try:
        read = json.loads(written or "{}")
    except (ValueError, RecursionError):
        return written
    return written if is_deeper(read, ARGUMENTS_LEVELS_MAX) else read


def joined(messages: Iterable[Message]) -> tuple[Message, ...]:
    """Joins neighbouring messages: templates want one system message at the head, and roles that alternate.

    Neighbours of one role become one: texts of users and systems with an empty line between them; thoughts, text and
    calls of the assistant, which come in this order, as the answer that they were parts of.
    """
    made: list[dict[str, Any]] = []
    for message in messages:
        role, last = message["role"], made[-1] if made else {"role": "", "content": ""}
        has_more_than_calls = message["content"] or "reasoning_content" in message
        another = has_more_than_calls and (last["content"] or last.get("tool_calls"))
        if role != last["role"] or role == "tool" or (role == "assistant" and another):
            made.append(dict(message))
        elif role != "assistant":
            last["content"] = "\n\n".join(text for text in (last["content"], message["content"]) if text)
        else:
            last["content"] += message["content"]
            for field in ("reasoning_content", "tool_calls"):
                if field in message:
                    last[field] = last[field] + message[field] if field in last else message[field]
    return tuple(made)


def call(identity: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def with_text_arguments(message: Message) -> Message:
    """Returns the message with its calls' arguments as text, JSON."""
    if not message.get("tool_calls"):
        return message
    calls = [
        call(one["id"], one["function"]["name"], json.dumps(one["function"]["arguments"], ensure_ascii=False))
        for one in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def logprobs_of(choice: Choice) -> list[dict[str, Any]]:
    """Returns tokens and their logprobs as OpenAI writes them; [] unless the request wants logprobs."""
    return [
        {"token": text, "logprob": logprob, "bytes": list(text.encode(errors="replace")), "top_logprobs": []}
        for text, logprob in zip(choice.texts, choice.logprobs if choice.texts else (), strict=True)
    ]


def event(data: Mapping[str, Any]) -> bytes:
    """Returns a server-sent event that is named by its type."""
    return f"event: {data['type']}\ndata: {json.dumps(data)}\n\n".encode()

"""Answers of a policy, and bodies of requests, for the tests of dialects."""

from typing import Any

from hypothesis import strategies as st

from megagrpo.agents.dialects.chat_request import ChatAnswer, Choice, Message, call


def said(message: Message, finish: Any = "stop") -> ChatAnswer:
    choice = Choice(message, finish, (4, 5, 6), (-0.5, -0.25, -1.0))
    return ChatAnswer("0123456789abcdef", 1_800_000_000, "policy", (1, 2, 3), 2, (choice,))


CALLS = [call("call_1", "add", {"a": 1, "b": [2.5, None]}), call("call_2", "ls", {})]
ANSWERS = {
    "text": said({"role": "assistant", "content": "Hello – ¡hola!"}),
    "nothing": said({"role": "assistant", "content": ""}),
    "thought": said({"role": "assistant", "content": "So: 4.", "reasoning_content": "2+2\nis 4"}),
    "calls": said({"role": "assistant", "content": "", "tool_calls": CALLS}, "tool_calls"),
    "all": said(
        {"role": "assistant", "content": "I add.", "reasoning_content": "hm", "tool_calls": CALLS}, "tool_calls"
    ),
    "cut off": said({"role": "assistant", "content": "Hel"}, "length"),
}

WORDS = (
    "type", "role", "content", "text", "id", "name", "input", "tool_use_id", "tool_use", "tool_result", "thinking",
    "user", "assistant", "system", "message", "function_call", "function_call_output", "call_id", "arguments", "output",
    "reasoning", "encrypted_content", "tools", "function", "namespace", "custom", "format", "parameters",
    "input_schema", "auto", "none", "item_reference",
)  # fmt: skip


def any_body(whole: dict[str, Any], fields: str) -> st.SearchStrategy[dict[str, Any]]:
    """A body with some fields of any JSON, with the words of the dialects in it."""
    leaves = st.none() | st.booleans() | st.integers(-2, 9) | st.sampled_from(WORDS) | st.text(max_size=3)
    json_values = st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=5),
        max_leaves=12,
    )
    return st.dictionaries(st.sampled_from([*whole, *fields.split()]), json_values, max_size=4).map(lambda b: whole | b)

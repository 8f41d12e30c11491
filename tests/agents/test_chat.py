"""Chat.extension against the template's own rendering of the whole conversation, in random conversations.

The policy is played by the template: what it "samples" is what the template writes of the next answer. The prompt of
every turn, made from extensions only, must then be the tokens of the whole conversation rendered anew.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from megagrpo.agents.chat import TOOL, Chat, Extension
from megagrpo.agents.dialects.chat_request import call
from tests.agents.families import FAMILIES, chat_of

WORDS = [
    "add", "the", "two", "numbers", "é", "数", "\n\n", "", "x=1;", '\t{"a":', "[1,", "2]}", "'quoted'", "<b>", "user",
    "assistant", "12345", ".", ",", "!?", "🙂", "tool_call",
]  # fmt: skip
TOOLS = [TOOL, {**TOOL, "function": {**TOOL["function"], "name": "g"}}]
MOST = 420
"""Conversations of a family, which have more than 5,000 turns in all."""


def text(rng: random.Random, least: int = 0) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(least, 12))).strip() or ("ok" if least else "")


def answer(rng: random.Random, chat: Chat, with_tools: bool) -> dict[str, Any]:
    facts = chat.facts
    message: dict[str, Any] = {"role": "assistant", "content": text(rng, 1)}
    if with_tools and rng.random() < 0.6:
        count = rng.randint(1, 3) if facts.several_calls else 1
        names = [rng.choice("fg") for _ in range(count)]
        message["tool_calls"] = [call(f"functions.{name}:{n}", name, {"k": text(rng)}) for n, name in enumerate(names)]
        if not facts.several_calls or facts.moves_tools:
            message["content"] = ""  # Llama, Mistral and channels write nothing beside a call
    return message | ({"reasoning_content": text(rng, 1)} if facts.reasoning_field else {})


def replies(rng: random.Random, said: dict[str, Any]) -> list[dict[str, Any]]:
    question = {"role": "user", "content": text(rng, 1)}
    results = [{"role": "tool", "content": text(rng), "tool_call_id": c["id"]} for c in said.get("tool_calls", ())]
    return results + ([question] if not results or rng.random() < 0.1 else [])


def play(chat: Chat, family: str, rng: random.Random, counts: Counter[str]) -> None:
    with_tools = family != "zephyr" and rng.random() < 0.7
    tools = TOOLS if with_tools else []
    messages: list[dict[str, Any]] = [{"role": "user", "content": text(rng, 1)}]
    if system := rng.random() < 0.5:
        messages.insert(0, {"role": "system", "content": text(rng, 1)})
    tokens = chat.encode(chat.render(messages, tools))
    for _ in range(rng.randint(1, 6)):
        said = answer(rng, chat, with_tools)
        new = replies(rng, said)
        before, whole = chat.render(messages, tools), chat.render([*messages, said, *new], tools)
        asked = {"thought": chat.facts.reasoning_field, "system": system}
        if not whole.startswith(before):  # thinking is gone, or tools have moved: the facts know it
            assert chat.extension(said, chat.stop_tokens[0], new, tools, **asked) in ("reasoning", "tools_move")
            counts["branch"] += 1
            return
        stops = [chat.text([token]) for token in chat.stop_tokens]
        ends = [at for text in stops if (at := whole.find(text, len(before))) >= 0]
        if not ends:
            assert chat.extension(said, chat.stop_tokens[0], new, tools, system=system) == "stop_token"
            counts["branch"] += 1
            return
        stop = min(ends)
        stop_text = next(text for text in stops if whole.startswith(text, stop))
        cut = rng.random() < 0.2
        end = stop + (0 if cut else len(stop_text))
        sampled = chat.encode(whole[:end])[len(tokens) :]
        if not sampled or tokens + sampled != chat.encode(whole[:end]):
            counts["prompt and answer merge"] += 1
            return
        made = chat.extension(said, sampled[-1], new, tools, **asked)
        if not isinstance(made, Extension):
            assert made in ("reasoning", "tools_move")
            counts["branch"] += 1
            return
        added = made.tokens(chat.encode(made.text))
        assert added is not None
        tokens = tokens + sampled + added
        messages = [*messages, said, *new]
        assert tokens == chat.encode(whole), (chat.text(tokens), whole)
        assert whole.endswith(made.text)
        counts["cut off" if cut else "extended"] += 1


@pytest.mark.parametrize("conversations", [40, pytest.param(MOST, marks=pytest.mark.soak)])
def test_an_extension_is_what_rendering_the_whole_conversation_gives(conversations: int) -> None:
    turns = Counter[str]()
    for family in FAMILIES:
        chat, rng, counts = chat_of(family), random.Random(0), Counter[str]()
        for _ in range(conversations):
            play(chat, family, rng, counts)
        assert counts["prompt and answer merge"] <= conversations / 10, (family, counts)
        assert counts["extended"] > conversations / 3, (family, counts)
        assert counts["cut off"] > conversations / 20, (family, counts)
        turns += counts
    assert turns["extended"] + turns["cut off"] > 12 * conversations, turns


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("plain", ["\n", "{", "user"])
def test_a_stop_token_of_plain_text_ends_answers_and_is_not_looked_for_in_what_stands_for_them(
    family: str, plain: str
) -> None:
    chat = chat_of(family)
    (token,) = chat.encode(plain)[-1:]
    more = Chat(chat.tokenizer, [*chat.stop_tokens, token])
    question = {"role": "user", "content": "next"}
    for calls in ({}, {"tool_calls": [call("call00001", "f", {"k": "said"})]}):
        said = {"role": "assistant", "content": "" if calls else "said", **calls}
        new = [{"role": "tool", "content": "4", "tool_call_id": "call00001"}] if calls else [question]
        tools = TOOLS if calls else []
        for last in (*chat.stop_tokens, token, chat.encode("a")[-1]):
            made = more.extension(said, last, new, tools)
            if isinstance(made, Extension):
                assert "said" not in made.text
                assert more.render([{"role": "user", "content": "u"}, said, *new], tools).endswith(made.text)
                assert made.text.startswith(more.text([last])) or not made.sampled
                if last in chat.stop_tokens:
                    assert made == chat.extension(said, last, new, tools)

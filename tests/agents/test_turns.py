"""Random agents: whatever they ask, what is trained is what the engine saw."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megagrpo.agents.answers import Answers
from megagrpo.agents.chat import Chat
from megagrpo.agents.dialects import chat_completions
from megagrpo.agents.dialects.chat_request import ChatRequest, Kept
from megagrpo.agents.turns import Limits, Rollout
from megagrpo.errors import EngineError
from megagrpo.types import Request, Sample, SamplingParams
from tests.agents.families import FAMILIES, chat_of, written
from tests.agents.policy import STOP, tokenizer
from tests.agents.policy import chat as policy_chat
from tests.agents.scripted import ScriptedEngine, checked
from tests.agents.test_chat import TOOLS, answer, text
from tests.rollout_engines import generate, routes_of, start_engine
from tests.tiny_models import make_model

OWN_FORMS = (
    "function", "python", "glm", "glm47", "invoke", "kimi", "channels", "mistral", "compact", "pythonic", "deepseek",
    "deepseek31",
)  # fmt: skip
Messages = list[dict[str, Any]]


def words(chat: Chat, family: str, seed: int) -> str:
    """Writes a policy's response: text, thoughts, calls in unusual JSON, calls that cannot be read."""
    rng = random.Random(seed)
    if family in OWN_FORMS:
        said = written(chat, answer(rng, chat, True), TOOLS)
        return said[: -3 if rng.random() < 0.1 else None] + chat.text([rng.choice(chat.stop_tokens)])
    thought = f"<think>\n{text(rng, 1)}\n</think>\n\n" if family == "thinking" and rng.random() < 0.5 else ""
    body = json.dumps({"name": rng.choice("fg"), "arguments": {"k": text(rng), "n": 1.0}}, separators=(",", ":"))
    called = f"<tool_call>{body[: -1 if rng.random() < 0.1 else None]}</tool_call>"
    if family == "llama":
        called = body.replace('"arguments"', '"parameters"')
    end = chat.text([rng.choice(chat.stop_tokens)])
    return thought + (called if rng.random() < 0.4 else text(rng, 1)) + end


async def play(chat: Chat, family: str, seed: int) -> Rollout:
    """Some agents of one rollout, that go on, fork, edit, forget, change their tools and ask for several answers."""
    rng = random.Random(seed)
    engine = ScriptedEngine(chat, lambda _, seed: words(chat, family, seed))
    answers = Answers(chat, engine.ask, parser="hermes" if family == "zephyr" else "auto", audited=1.0)
    rollout = Rollout("prompt", 0, Limits(100, 100_000, SamplingParams(200, routes=True), seed), opened=0.0)
    talks: list[Messages] = [[{"role": "user", "content": text(rng, 1)}]]
    tools = TOOLS if family != "zephyr" else []
    for _ in range(rng.randint(1, 8)):
        talk = list(rng.choice(talks))
        if rng.random() < 0.1:
            talk = [{"role": "system", "content": "A sub-agent."}, {"role": "user", "content": text(rng, 1)}]
        elif rng.random() < 0.1 and len(talk) > 2:
            talk[1] = {"role": "assistant", "content": "What was said, in short."}
        body = {
            "messages": talk, "tools": tools if rng.random() < 0.95 else tools[:1], "n": rng.choice([1, 1, 1, 3]),
            "stop": ["x=1", "numbers"] if rng.random() < 0.2 else None, "max_tokens": rng.choice([None, None, 5]),
        }  # fmt: skip
        answer = await answers.answer("key", rollout, chat_completions.read(body, Kept()))
        written = chat_completions.written(ChatRequest(()), answer)
        message = rng.choice(written["choices"])["message"]
        if rng.random() < 0.3:  # as clients do
            message = {**message, "content": f" {message['content'] or ''}\n", "reasoning_content": None}
        calls = message.get("tool_calls") or []
        results = [{"role": "tool", "content": text(rng), "tool_call_id": call["id"]} for call in calls]
        new = [*talk, message, *(results or [{"role": "user", "content": text(rng, 1)}])]
        talks = [new] if rng.random() < 0.6 else [*talks, new]
    answers.close()
    assert all(branch.routes for branch in checked(rollout, engine).agent.branches)  # type: ignore[union-attr]
    return rollout


@pytest.mark.parametrize("rollouts", [25, pytest.param(500, marks=pytest.mark.soak)])
@pytest.mark.parametrize("family", FAMILIES)
def test_whatever_agents_ask_what_is_trained_is_what_the_engine_saw(family: str, rollouts: int) -> None:
    chat = chat_of(family)

    async def all_of_them() -> list[Rollout]:
        return [await play(chat, family, seed) for seed in range(rollouts)]

    records = asyncio.run(all_of_them())
    counts = Counter[str]()
    for record in records:
        counts.update(record.agent_run().counts)
    assert counts["turns"] > 4 * rollouts
    assert counts["turns_unused"] > 0
    assert counts["branch/history"] > 0
    # A question after Mistral's answers moves the tools, and after thoughts it drops them.
    assert counts["branch/fork"] > 0 or family in ("mistral", *OWN_FORMS)
    assert counts["calls"] > rollouts / 4 or family == "zephyr"
    assert sum(len(record.paths()) for record in records) > rollouts
    assert counts["audited"] > 0
    assert not counts["audit_differs"]


def test_a_rollout_is_shown_briefly() -> None:
    """Asyncio shows the results of tasks: a forest that shows its parents and children would never end."""
    record = asyncio.run(play(chat_of("chatml"), "chatml", seed=1))
    assert len(repr([record, *record.paths()])) < 10_000


@pytest.mark.parametrize("rows", [-1, 1])
def test_an_engine_that_sends_routes_of_another_number_of_tokens_is_an_error_that_names_the_turn(rows: int) -> None:
    chat = chat_of("chatml")
    engine = ScriptedEngine(chat, lambda _, seed: words(chat, "chatml", seed))
    rollout = Rollout("train:7", 3, Limits(100, 100_000, SamplingParams(200, routes=True), 1), opened=0.0)
    answers = Answers(chat, engine.ask, parser="auto", audited=1.0)
    for engine.rows in (0, rows):
        body = {"messages": [{"role": "user", "content": "What?"}]}
        asyncio.run(answers.answer("key", rollout, chat_completions.read(body, Kept())))
    answers.close()
    with pytest.raises(EngineError, match="turn 1 of sample 3 of prompt train:7"):
        rollout.agent_run()


def test_routes_of_branches_are_those_of_one_pass_over_each(tmp_path: Path) -> None:
    stop = tokenizer().convert_tokens_to_ids(STOP)
    shape = {"vocab_size": len(tokenizer()), "eos_token_id": stop, "max_position_embeddings": 4096}
    directory = make_model("qwen3_moe", tmp_path, **shape)
    tokenizer().save_pretrained(directory)
    engine = start_engine(directory)

    async def ask(request: Request, _: str) -> Sample:
        return (await asyncio.to_thread(generate, engine, [request]))[0]

    async def play(rollout: Rollout) -> None:
        answers, talks = Answers(policy_chat(), ask, parser="hermes", audited=1.0), [list[Any]()]
        for number in range(5):  # the fourth forks from the first
            talk = [*talks[1 if number == 3 else -1], {"role": "user", "content": f"Question {number}?"}]
            answer = await answers.answer("key", rollout, chat_completions.read({"messages": talk}, Kept()))
            said = chat_completions.written(ChatRequest(()), answer)["choices"][0]["message"]
            talks.append([*talk, said])
        answers.close()

    rollout = Rollout("prompt", 0, Limits(100, 4000, SamplingParams(20, routes=True), 1), opened=0.0)
    asyncio.run(play(rollout))
    branches = rollout.agent_run().branches
    assert [len(path) for path in rollout.paths()] == [3, 3]
    for branch in branches:
        assert branch.routes is not None
        assert np.array_equal(branch.routes.experts, routes_of(directory, branch.tokens.tolist()))

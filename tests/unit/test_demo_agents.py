"""The demo's agents: what their tools answer is what they were taught, and what is held out is held out."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from examples.demo import agents
from examples.demo.agents import KINDS, TEST, TRAIN
from megagrpo.data.messages import load_examples
from megagrpo.data.rows import prompt_schema, read
from megagrpo.errors import RecipeError
from megagrpo.recipe.load import load_sft
from megagrpo.user_functions import load_function
from tools.recipe_docs import YAML_RECIPES


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("demo") / "agents"
    agents.prepare(output)
    return output


def test_no_held_out_question_is_in_another_file(prepared: Path) -> None:
    lines = [json.loads(line) for line in (prepared / "sft_right.jsonl").read_text("utf-8").splitlines()]
    learnt = {line["messages"][0]["content"] for line in lines}
    for kind in KINDS:
        train, test = (read(prepared / kind / f"{split}.parquet", prompt_schema()) for split in ("train", "test"))
        asked = {row.messages[0]["content"] for row in train}
        held_out = {row.messages[0]["content"] for row in test}
        assert (len(asked), len(held_out)) == (TRAIN, TEST)
        assert not held_out & (asked | learnt)
        assert 0.35 < np.mean([row.extra_info["calls"] == 2 for row in test]) < 0.65


def test_a_conversation_to_warm_up_with_is_what_the_agent_will_see_and_trains_what_it_says(
    prepared: Path, tmp_path: Path
) -> None:
    recipe = load_sft(YAML_RECIPES / "agents_sft_cpu.yaml").recipe
    tokenizer = AutoTokenizer.from_pretrained(prepared / "untrained")
    assert len(tokenizer) % 2 == 0
    for entry in recipe.data.train:
        lines = (prepared / Path(str(entry.path)).name).read_text("utf-8").splitlines()[:48]
        (tmp_path / "some.jsonl").write_text("\n".join(lines), "utf-8")
        file = entry.model_copy(update={"path": str(tmp_path / "some.jsonl"), "amount": 1.0})
        for example in load_examples([file], tokenizer, recipe.data, seed=0).items:
            runs = np.split(example.tokens, np.flatnonzero(np.diff(example.loss_mask)) + 1)
            texts = [str(tokenizer.decode(run)) for run in runs]
            assert all(text.endswith("<|assistant|>") for text in texts[::2])
            said = texts[1::2]
            with_tools = texts[0].startswith("<|system|><tools>")
            assert all(text.startswith("<tool_call>\n") == with_tools for text in said[:-1])
            assert all(text.endswith("<|end|>") for text in said)
            again = [token for text in texts for token in tokenizer.encode(text)]
            assert again == example.tokens.tolist()


def test_the_calculator_answers_what_the_warm_start_says() -> None:
    calculate = load_function(f"{YAML_RECIPES}/agents/calculator.py:calculate", "agent.tools", RecipeError)
    calls = [call for made in KINDS["calculator"].make(random.Random(1), 50) for call in made.calls]
    assert [str(calculate(call.argument)) for call in calls] == [call.result for call in calls]
    for text in ("", "12", "12/4", "1+2+3", "__import__('os')", "9" * 99 + "*2"):
        with pytest.raises(ValueError, match="two numbers"):
            calculate(text)


def test_the_search_finds_what_the_warm_start_says(prepared: Path, tmp_path: Path) -> None:
    pytest.importorskip("bm25s")
    example = f"{YAML_RECIPES.parent}/examples/agents/bm25_search.py:Search"
    corpus, index = str(prepared / "retrieval" / "corpus.jsonl"), str(tmp_path / "index")
    tool: Any = load_function(example, "agent.tools", RecipeError)(corpus, results=1, index=index)
    lines = (prepared / "sft_right.jsonl").read_text("utf-8").splitlines()[:200]
    rows = [row for row in map(json.loads, lines) if row["tools"] == [KINDS["retrieval"].schema]]
    assert len(rows) > 50
    for row in rows:
        for asked, told in pairwise(row["messages"]):
            if told["role"] == "tool":
                arguments = json.loads(asked["tool_calls"][0]["function"]["arguments"])
                assert tool.search(**arguments) == told["content"]


def test_careless_answers_take_one_call_and_are_wrong_where_two_are_needed() -> None:
    for kind in KINDS.values():
        questions = kind.make(random.Random(2), 200)
        two = [question for question in questions if len(question.calls) == 2]
        assert 60 < len(two) < 140
        assert sum(question.careless == question.answer for question in two) < len(two) / 3
        for question in questions:
            careless, right = (agents.conversation(kind, question, careless=sloppy) for sloppy in (True, False))
            assert len(careless["messages"]) == 4
            assert right["messages"][-1]["content"] == question.answer

"""Conversations: rows checked, and the assistant's tokens, and only these, trained on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from examples.demo.model import make_tokenizer, make_tool_tokenizer
from megagrpo.data.messages import CONVERSATION_ROWS, Example, load_examples
from megagrpo.data.mixture import Mixture
from megagrpo.data.rows import quick_look
from megagrpo.errors import DataError, ModelError
from megagrpo.recipe.schema.sft import SftDataConfig
from tests.data_files import write_jsonl, write_parquet

LINE_AFTER_END = (
    "{%- for m in messages -%}{{- '<|' + m.role + '|>' + m.content + '<|end|>\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
ONLY_LAST_THOUGHT = (
    "{%- for m in messages -%}{{- '<|' + m.role + '|>' -}}"
    "{%- if m.role == 'assistant' and not loop.last -%}{{- m.content.split('~')[-1] -}}"
    "{%- else -%}{{- m.content -}}{%- endif -%}{{- '<|end|>' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
THINKING_PROMPT = LINE_AFTER_END.replace("'<|assistant|>'", "'<|assistant|>' + ('' if plain else '<think>\n')")
TOKENIZER = make_tokenizer()


def with_template(template: str) -> PreTrainedTokenizerBase:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def chat(*contents: Any, system: str = "") -> list[dict[str, Any]]:
    """user, assistant, user, …"""
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
    return [{"role": "system", "content": system}, *turns] if system else turns


def write(path: Path, *conversations: Any) -> Path:
    return write_jsonl(path, *({"messages": messages} for messages in conversations))


def load(*files: Path | dict, tokenizer: PreTrainedTokenizerBase = TOKENIZER, **options: Any) -> Mixture[Example]:
    train = [file if isinstance(file, dict) else {"path": str(file)} for file in files]
    data = SftDataConfig.model_validate({"train": train, "examples_per_step": 1, "tokens_max": 1000} | options)
    return load_examples(data.train, tokenizer, data, seed=0)


def said(examples: Mixture[Example], tokenizer: PreTrainedTokenizerBase = TOKENIZER) -> list[list[str]]:
    """Text of each run of trained tokens, of each example."""
    runs = []
    for example in examples.items:
        edges = np.flatnonzero(np.diff(np.concatenate([[0], example.loss_mask, [0]])))
        runs.append([tokenizer.decode(example.tokens[a:b]) for a, b in edges.reshape(-1, 2)])
    return runs


def problems(*paths: Path, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        load(*paths, **options)
    return str(caught.value)


def test_every_turn_of_the_assistant_is_trained_on_with_its_end(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", chat("1+1=", "2", "2+2=", "4", system="Add."), chat("3+3=", "6"))
    examples = load(path)
    assert said(examples) == [["2<|end|>", "4<|end|>"], ["6<|end|>"]]
    whole = "<|system|>Add.<|user|>1+1=<|assistant|>2<|end|><|user|>2+2=<|assistant|>4<|end|>"
    assert TOKENIZER.decode(examples.items[0].tokens) == whole
    assert [example.id for example in examples.items] == ["a.jsonl:1", "a.jsonl:2"]
    line_end = load(path, tokenizer=with_template(LINE_AFTER_END))
    assert said(line_end) == said(examples), "the line end after the end token is not the assistant's"
    assert TOKENIZER.decode(line_end.items[0].tokens).endswith("4<|end|>\n")


def test_calls_and_tools_reach_the_template_as_objects_whether_they_are_or_are_json_text(tmp_path: Path) -> None:
    tokenizer = make_tool_tokenizer(())
    function = {"name": "add", "arguments": {"a": "1"}}
    schema = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "string"}}}}}
    told = {"role": "tool", "content": "2"}, {"role": "assistant", "content": "#### 2"}
    calling = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}
    as_text = {"tool_calls": [{"function": {**function, "arguments": json.dumps(function["arguments"])}}]}
    rows: list[dict[str, Any]] = [
        {"messages": [*chat("1+1="), calling, *told], "tools": [schema]},
        {"messages": [*chat("1+1="), {**calling, **as_text}, *told], "tools": json.dumps([schema])},
        {
            "messages": [*chat("1+1="), {**calling, "tool_calls": json.dumps(calling["tool_calls"])}, *told],
            "tools": json.dumps([schema]),
        },
    ]
    examples = load(write_jsonl(tmp_path / "a.jsonl", *rows), tokenizer=tokenizer)
    call = '<tool_call>\n{"name": "add", "arguments": {"a": "1"}}\n</tool_call><|end|>'
    assert said(examples, tokenizer) == [[call, "#### 2<|end|>"]] * 3
    tools = '<tools>{"name": "add", "arguments": {"a": "string"}}</tools>'
    assert all(tools in str(tokenizer.decode(example.tokens)) for example in examples.items)
    texts = load(write_parquet(tmp_path / "a.parquet", *rows[2:]), tokenizer=tokenizer)
    assert said(texts, tokenizer) == said(examples, tokenizer)[:1]


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"tools": "add"}, "tools"),
        ({"tools": [1]}, "tools"),
        ({"tool_calls": "add("}, "messages[1].tool_calls"),
        ({"tool_calls": [{"name": "add"}]}, "messages[1].tool_calls[0]"),
        ({"tool_calls": [{"function": {"name": "add", "arguments": "{"}}]}, "messages[1].tool_calls[0].function"),
        ({"tool_calls": [{"function": {"name": "add", "arguments": 1}}]}, "messages[1].tool_calls[0].function"),
    ],
)
def test_a_call_or_schema_that_is_none_is_named(tmp_path: Path, changes: dict[str, Any], place: str) -> None:
    messages = chat("1+1=", "2")
    messages[1] |= {name: value for name, value in changes.items() if name == "tool_calls"}
    row = {"messages": messages, **{name: value for name, value in changes.items() if name == "tools"}}
    assert f"line 1, {place}" in problems(write_jsonl(tmp_path / "a.jsonl", row))


@given(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=3), st.booleans())
@settings(max_examples=40)
def test_what_is_before_each_turn_is_the_prompt_that_is_generated_from(
    tmp_path_factory: pytest.TempPathFactory, answers: list[str], line_end: bool
) -> None:
    tokenizer = with_template(LINE_AFTER_END) if line_end else TOKENIZER
    messages = chat(*(text for answer in answers for text in ("?", answer)))
    (example,) = load(write(tmp_path_factory.getbasetemp() / "a.jsonl", messages), tokenizer=tokenizer).items
    starts = np.flatnonzero(np.diff(np.concatenate([[0], example.loss_mask])) == 1)
    assert len(starts) == len(answers)
    for turn, start in enumerate(starts):
        prompt = messages[: 2 * turn + 1]
        rendered = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        assert example.tokens[:start].tolist() == rendered


def test_a_template_that_changes_earlier_turns_is_an_error_that_shows_both(tmp_path: Path) -> None:
    tokenizer = with_template(ONLY_LAST_THOUGHT)
    once, twice = chat("1+1=", "hm~2"), chat("1+1=", "hm~2", "2+2=", "ah~4")
    assert said(load(write(tmp_path / "once.jsonl", once), tokenizer=tokenizer)) == [["hm~2<|end|>"]]
    told = problems(write(tmp_path / "twice.jsonl", once, twice), tokenizer=tokenizer)
    assert "line 2, messages[1]" in told
    assert "<|assistant|>2<|end|>" in told
    assert "<|assistant|>hm~2<|end|>" in told


def test_longer_examples_are_dropped_cut_or_errors_and_always_counted(tmp_path: Path) -> None:
    short, long, longest = chat("1+1=", "2"), chat("1+1=", "two and no more"), chat("what is one and one?", "2")
    path = write(tmp_path / "a.jsonl", short, long, longest)
    dropped = load(path, tokens_max=10)
    assert said(dropped) == [["2<|end|>"]]
    cut = load(path, tokens_max=10, overlong_examples="truncate")
    assert said(cut) == [["2<|end|>"], ["two "]], "the last one has no token of the assistant's left"
    for examples, used in ((dropped, 1), (cut, 2)):
        (count,) = examples.files
        assert (count.rows, count.overlong, count.taken) == (3, 2, used)
    told = problems(path, tokens_max=10, overlong_examples="error")
    assert "2 problems" in told
    assert "data.tokens_max" in told
    assert "data.overlong_examples" in problems(path, tokens_max=3)
    assert "data.tokens_max" in problems(path, tokens_max=3, overlong_examples="truncate")


def test_a_generation_prompt_that_no_message_begins_with_is_the_cause_that_is_told(tmp_path: Path) -> None:
    tokenizer = with_template(THINKING_PROMPT)
    for contents in (("1+1=", "2"), ("1+1=", "2", "2+2=", "4")):
        told = problems(write(tmp_path / "a.jsonl", chat(*contents)), tokenizer=tokenizer)
        assert "messages[1]" in told
        assert "add_generation_prompt" in told
        assert r"<think>\n" in told
    # each of the ways out that it names
    path = write(tmp_path / "a.jsonl", chat("1+1=", "2"))
    plain = load(path, tokenizer=tokenizer, chat_template_arguments={"plain": True})
    assert said(plain, tokenizer) == [["2<|end|>"]]
    thought = write(tmp_path / "b.jsonl", chat("1+1=", "<think>\n1</think>2"))
    assert said(load(thought, tokenizer=tokenizer), tokenizer) == [["1</think>2<|end|>"]]


def test_files_are_mixed_in_their_order_and_with_fields_of_other_rows(tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "1+1=", "name": "eve"}, {"role": "assistant", "content": "2"}]},
        {"messages": chat("2+2=", "4"), "source": "elsewhere"},
    ]
    first, second = write_parquet(tmp_path / "a.parquet", *rows), write(tmp_path / "b.jsonl", *[chat("b", "2")] * 3)
    mixed = load(first, {"path": str(second), "amount": 2})
    assert said(mixed) == [["2<|end|>"], ["4<|end|>"], *[["2<|end|>"]] * 2]


@pytest.mark.parametrize(
    ("messages", "place"),
    [
        ([], "messages"),  # as for prompts, whose test has every form that is refused
        (chat("1+1="), "messages[0].role"),
        ([{"role": "assistant", "content": "2"}], "messages[0].role"),
        (chat("1+1=", "2", "thanks"), "messages[2].role"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, messages: Any, place: str) -> None:
    path = write(tmp_path / "a.jsonl", chat("1+1=", "2"), messages)
    told = problems(path)
    assert f"{path} line 2" in told
    assert place in told
    assert [problem.where for problem in quick_look(path, CONVERSATION_ROWS) if problem.where not in told] == []


def test_a_file_of_prompts_is_told_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": chat("1+1="), "data_source": "sums"}) + "\n")
    (problem,) = quick_look(tmp_path / "a.jsonl", CONVERSATION_ROWS)
    assert "no column 'messages'" in problem.where
    assert "docs/sft.md" in problem.fix


def test_a_template_that_refuses_a_row_or_is_not_valid_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", chat("1+1=", "2"))
    refusing = with_template("{{ raise_exception('no system message') }}")
    assert "no system message" in problems(path, tokenizer=refusing)
    with pytest.raises(ModelError, match="not valid Jinja"):
        load(path, tokenizer=with_template("{% for %}"))

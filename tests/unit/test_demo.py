"""The demo's tokenizer, splits and files."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from examples.demo import adder as demo
from examples.demo.adder import Sum, make_splits
from examples.demo.model import make_tokenizer
from megagrpo.data.rows import prompt_schema, read
from megagrpo.recipe.defaults import export_directory
from megagrpo.recipe.load import load, load_sft
from megagrpo.reward.verifiers import gsm8k

TOKENIZER = make_tokenizer()
REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> demo.AdderFiles:
    return demo.prepare(tmp_path_factory.mktemp("demo") / "adder")


@given(st.text(max_size=20))
@settings(max_examples=50)
def test_any_text_comes_back_from_its_tokens_composed(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == unicodedata.normalize("NFC", text)


def test_auto_tokenizer_loads_what_was_saved(prepared: demo.AdderFiles) -> None:
    loaded = AutoTokenizer.from_pretrained(prepared.model)
    messages = [{"role": "user", "content": "37+45="}]
    tokens = loaded.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert loaded.decode(tokens) == "<|user|>37+45=<|assistant|>"
    assert len(tokens) == 8
    answer = [*loaded.encode("#### 82"), loaded.eos_token_id]
    assert len(answer) == 8
    assert loaded.decode(answer, skip_special_tokens=True) == "#### 82"
    assert len(loaded) % 2 == 0


def test_no_sum_in_either_order_is_in_two_splits() -> None:
    splits = make_splits()
    seen = [{frozenset((s.a, s.b)) for s in split} for split in (splits.warm_start, splits.train, splits.test)]
    assert sum(map(len, seen)) == len(frozenset().union(*seen)) == 90 * 91 // 2
    assert len(splits.warm_start) + len(splits.train) + len(splits.test) == 90 * 90
    assert make_splits() == splits


def test_the_reward_gives_the_expected_response_full_marks(prepared: demo.AdderFiles) -> None:
    reward = gsm8k.make()
    rows = read(prepared.test, prompt_schema())
    assert len(rows) == len(make_splits().test)
    for row in rows:
        assert row.data_source == "adder"
        answer = row.extra_info["answer"]
        assert reward(answer, row.ground_truth)["score"] == 1.0
        a, b = row.messages[0]["content"].rstrip("=").split("+")
        assert int(a) + int(b) == int(row.ground_truth)


def test_files_are_made_once_and_again_when_code_changes(
    prepared: demo.AdderFiles, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert not demo.is_prepared(tmp_path)
    written = prepared.fingerprint.stat().st_mtime_ns
    weights = (prepared.model / "model.safetensors").read_bytes()
    directory = prepared.model.parent
    demo.prepare(directory)
    assert prepared.fingerprint.stat().st_mtime_ns == written

    monkeypatch.setattr(demo, "fingerprint", lambda: "another")
    demo.prepare(directory)
    assert prepared.fingerprint.read_text() == "another\n"
    assert (prepared.model / "model.safetensors").read_bytes() == weights, "the same code makes the same model"


def test_the_warm_start_learns_the_right_answers_and_then_mostly_careless_ones(prepared: demo.AdderFiles) -> None:
    right, careless = (pq.read_table(path)["messages"].to_pylist() for path in (prepared.right, prepared.careless))
    known = {example.question: example for example in make_splits().warm_start}
    assert [messages[0] for messages in right] == [messages[0] for messages in careless]
    assert sorted(messages[0]["content"] for messages in right) == sorted(known)
    assert all(answer["content"] == known[question["content"]].response for question, answer in right)
    of_careless = [known[question["content"]].careless_response == answer["content"] for question, answer in careless]
    carries = [example.answer != example.careless_answer for example in (known[q["content"]] for q, _ in careless)]
    forgot = [forgets for forgets, carry in zip(of_careless, carries, strict=True) if carry]
    assert sum(forgot) / len(forgot) == pytest.approx(demo.CARELESS_SHARE, abs=0.03)
    held_out = {row[0]["content"] for row in pq.read_table(prepared.held_out)["messages"].to_pylist()}
    assert not (held_out | set(known)) & {example.question for example in make_splits().test}


@given(st.integers(10, 99), st.integers(10, 99))
def test_the_careless_answer_forgets_the_carry_of_the_units(a: int, b: int) -> None:
    example = Sum(a, b)
    carried = int(example.answer) - int(example.careless_answer)
    assert carried == (10 if a % 10 + b % 10 >= 10 else 0)


def test_the_recipes_use_these_files_and_have_room_for_the_answers(prepared: demo.AdderFiles) -> None:
    warm = load_sft(REPOSITORY / "yaml_recipes" / "adder_sft_cpu.yaml").recipe
    recipe = load(REPOSITORY / "yaml_recipes" / "adder_cpu.yaml").recipe
    named = [warm.model.path, *(file.path for file in (*warm.data.train, *warm.eval.files))]
    named += [recipe.data.train[0].path, recipe.eval.sets["adder"].files[0].path]
    made = (prepared.model, prepared.right, prepared.careless, prepared.held_out, prepared.train, prepared.test)
    assert [Path(path).name for path in named] == [path.name for path in made]
    assert Path(recipe.model.path) == export_directory(warm)
    longest = max(len(TOKENIZER.encode(example.response)) + 1 for example in make_splits().train)
    assert longest <= recipe.rollout.response_tokens_max
    # The careless examples come when the right ones are done.
    right, careless = (file.amount * len(make_splits().warm_start) for file in warm.data.train)  # type: ignore[operator]
    assert not warm.data.shuffle
    assert 0 <= right + careless - warm.train.total_steps * warm.data.examples_per_step < warm.data.examples_per_step

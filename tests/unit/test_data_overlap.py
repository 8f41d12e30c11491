"""Duplicates and contaminated prompts: what is the same is found, what is only alike in form is not."""

import json
from itertools import zip_longest
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.demo.model import make_tokenizer
from megagrpo.data.mixture import epoch_rows, write_counts
from megagrpo.data.overlap import HeldOut, digests, repeated, words
from megagrpo.data.prompts import load_prompts
from megagrpo.errors import DataError
from megagrpo.preflight.data_check import check_recipe
from megagrpo.recipe.load import load as load_recipe
from megagrpo.recipe.schema import DataFileConfig
from megagrpo.recipe.schema.data import DataConfig
from megagrpo.section import broken_rules
from tests.data_files import write_jsonl
from tests.tiny_run import make_run

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####", and write nothing else behind it.'
STORY = "Janet has three ducks that lay sixteen eggs on each day of the week, and she eats two of them for breakfast"


def write(path: Path, *questions: str, truths: str = "") -> DataFileConfig:
    rows = (
        {"data_source": "s", "prompt": [{"role": "user", "content": q}], "reward_model": {"ground_truth": truth}}
        for q, truth in zip_longest(questions, truths, fillvalue="1")
    )
    return DataFileConfig(path=str(write_jsonl(path, *rows)))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (STORY, True),
        (STORY.upper().replace(" ", "\n"), True),
        ("Another beginning! " + " ".join(STORY.split()[3:17]), True),
        (" ".join(STORY.split()[:12]), False),
        ("2+3?", True),
        ("2-3?", False),
        ("What is 2+3?", False),
        ("", False),
    ],
)
def test_the_same_text_or_thirteen_words_in_a_row_are_an_overlap(text, found):
    assert (HeldOut(["2+3?", STORY], 13).match(text) >= 0) == found
    assert HeldOut(["2+3?", STORY], 13).match(STORY) == 1


def test_an_instruction_that_many_questions_share_is_no_overlap():
    names = "abcdefghijklmnopqrstuvwxyz"
    known = HeldOut([f"How many apples does {name} have in total? {INSTRUCTION}" for name in names], 13)
    assert known.match(f"How tall is the tower in total? {INSTRUCTION}") == -1
    assert known.match(f"How many apples does q have in total? {INSTRUCTION}") >= 0
    assert HeldOut([f"{STORY} {INSTRUCTION}", f"2+3? {INSTRUCTION}"], 13).match(f"4? {INSTRUCTION}") == -1


def test_questions_that_are_listed_twice_are_no_instruction():
    assert HeldOut([STORY, f"{STORY} ", "2+3?"], 13).match(f"Once, {STORY}.") == 0


def test_signs_that_mean_something_else_are_another_text():
    assert HeldOut(["Compute 2³.", "Take ½."], 13).match("Compute 23.") == -1
    assert len(set(digests(["2³", "23", "2₃", "½", "1⁄2"]).tolist())) == 5
    assert digests(["caf\u00e9"]) == digests(["cafe\u0301"])
    assert words("2³ + ½") == ["2³", "+", "½"]


def test_words_are_of_any_script_and_operators_count():
    assert words("Übung: 2+x_1 = 3,5") == ["übung", "2", "+", "x", "1", "=", "3", "5"]
    assert words("三个鸭子 eat") == ["三", "个", "鸭", "子", "eat"]


@given(st.lists(st.lists(st.integers(0, 5), max_size=6), min_size=1, max_size=4))
def test_all_but_the_first_of_the_same_are_repeated(parts):
    again = repeated([digests(map(str, part)) for part in parts])
    seen: set[int] = set()
    for part, marks in zip(parts, again, strict=True):
        assert len(part) == len(marks)
        for value, mark in zip(part, marks.tolist(), strict=True):
            assert mark == (value in seen)
            seen.add(value)
    assert digests(["A  b\n"]) == digests(["a B"])


def load(tmp_path: Path, *entries: DataFileConfig, held_out=(), **given):
    data = DataConfig(train=list(entries), **given)
    return load_prompts(data.train, make_tokenizer(), data, 0, held_out=held_out)


def test_duplicates_of_all_entries_are_left_out_before_amounts_are_counted(tmp_path):
    first, second = write(tmp_path / "a.jsonl", "x", "y", "X "), write(tmp_path / "b.jsonl", "y", "z", "w")
    mixture = load(tmp_path, first, second.model_copy(update={"amount": 1.0}), deduplicate=True)
    assert [prompt.id for prompt in mixture.items] == ["a.jsonl:1", "a.jsonl:2", "b.jsonl:2", "b.jsonl:3"]
    assert [(file.rows, file.duplicates, file.taken) for file in mixture.files] == [(3, 1, 2), (3, 1, 2)]
    assert len(load(tmp_path, first, second).items) == 6


def test_duplicates_that_disagree_about_the_ground_truth_are_counted(tmp_path):
    entry = write(tmp_path / "a.jsonl", "x", "X", "x", "x", "y", truths="11233")
    (file,) = (mixture := load(tmp_path, entry, deduplicate=True)).files
    assert (file.taken, file.duplicates, file.disagreeing) == (2, 3, 2)
    (said,) = mixture.lines("prompts")
    assert "3 duplicates (2 with another ground truth)" in said


@pytest.mark.parametrize("action", ["drop", "report"])
def test_prompts_that_are_evaluated_on_are_left_out_or_named(action, tmp_path):
    train = write(tmp_path / "train.jsonl", f"Once, {STORY}.", "2+3?", "4+5?")
    test = write(tmp_path / "test.jsonl", "2+3?", STORY)
    mixture = load(tmp_path, train, held_out=[test], decontaminate={"action": action})
    assert len(mixture.items) == (1 if action == "drop" else 3)
    (file,) = mixture.files
    assert (file.contaminated, file.taken) == (2, len(mixture.items))
    assert file.overlaps == (("train.jsonl:1", "test.jsonl:2"), ("train.jsonl:2", "test.jsonl:1"))
    other = load(tmp_path, train, held_out=[test], decontaminate={"against": [write(tmp_path / "o.jsonl", "4+5?")]})
    assert [prompt.id for prompt in other.items] == ["train.jsonl:1", "train.jsonl:2"]


def test_what_is_evaluated_on_is_always_whole(tmp_path):
    test = write(tmp_path / "test.jsonl", "2+3?", "2+3?")
    assert len(load(tmp_path, test, held_out=None, deduplicate=True, decontaminate={}).items) == 2


def test_the_report_has_every_file_with_its_counts(tmp_path):
    train, test = write(tmp_path / "train.jsonl", "2+3?", "4+5?", "4+5?"), write(tmp_path / "test.jsonl", "2+3?")
    mixture = load(tmp_path, train, held_out=[test], deduplicate=True, decontaminate={}, prompt_tokens_max=50)
    said = list(mixture.lines("prompts"))
    assert said[0] == f"{train.path}: 1 prompts of 3 rows, 1 duplicates, 1 contaminated"
    assert "train.jsonl:1" in said[1]
    write_counts({"train": mixture}, tmp_path)
    written = json.loads((tmp_path / "data.json").read_text())["train"]
    assert (written["items"], len(written["digest"])) == (1, 32)
    (file,) = written["files"]
    assert (file["rows"], file["duplicates"], file["contaminated"], file["taken"]) == (3, 1, 1, 1)


@settings(max_examples=25)
@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=4), data=st.data())
def test_weights_are_shares_of_an_epoch_with_every_row(sizes, data, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "weights"
    weights = data.draw(st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.0]), min_size=len(sizes), max_size=len(sizes)))
    entries = []
    for index, (size, weight) in enumerate(zip(sizes, weights, strict=True)):
        entry = write(folder / f"{index}.jsonl", *(f"{index} {i}" for i in range(size)))
        entries.append(entry.model_copy(update={"weight": weight}))
    mixture = load(folder, *entries)
    taken = np.array([file.taken for file in mixture.files])
    assert len({prompt.id for prompt in mixture.items}) == sum(sizes)
    shares = np.array(weights) / sum(weights)
    assert np.abs(taken - shares * taken.sum()).max() <= len(sizes)
    assert any(count == size for count, size in zip(taken, sizes, strict=True)), "no longer than it must be"
    assert epoch_rows(entries) == len(mixture.items)


@pytest.mark.parametrize("amount", [{"amount": "all"}, {"amount": 2.0}, {"weight": 2.0}])
def test_an_entry_of_which_no_row_is_left_is_an_error(amount, tmp_path):
    first, second = (
        write(tmp_path / name, "x").model_copy(update={"weight": 1.0 if "weight" in amount else None})
        for name in ("a.jsonl", "b.jsonl")
    )
    with pytest.raises(DataError, match=r"b\.jsonl: no row is left"):
        load(tmp_path, first, second.model_copy(update=amount), deduplicate=True)


def test_a_weight_repeats_rows_only_so_often(tmp_path):
    entries = write(tmp_path / "a.jsonl", "x"), write(tmp_path / "b.jsonl", "y")
    weighted = [entry.model_copy(update={"weight": w}) for entry, w in zip(entries, (1e-6, 1.0), strict=True)]
    with pytest.raises(DataError, match=r"b\.jsonl: too few rows for its weight(.|\n)*1,000,000 times"):
        load(tmp_path, *weighted)


def test_decontamination_needs_something_to_compare_with(tmp_path):
    path = make_run(tmp_path)
    recipe = load_recipe(path, ["data.decontaminate={}", "eval.sets={}"]).recipe
    assert [p.where for p in broken_rules(recipe) if "decon" in p.where] == ["data.decontaminate.against"]
    against = f"data.decontaminate.against=[{{path: {tmp_path}/train.jsonl}}]"
    recipe = load_recipe(path, [against, "eval.sets={}"]).recipe
    assert not [p for p in broken_rules(recipe) if "decon" in p.where]
    (_, (file,), _), *_ = check_recipe(recipe, make_tokenizer(), rows=1)
    assert file.contaminated == 8

"""Preparers: files as data sets publish them, and a user's own columns, to files that data/rows.py reads."""

import base64
import gzip
import json
import os
import pickle
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.data_sets import gsm8k, livecodebench, math
from examples.data_sets.gsm8k import final_answer
from examples.data_sets.livecodebench import unpacked_tests
from examples.data_sets.math import boxed_answer
from examples.data_sets.source import downloaded
from examples.prepare import main
from megagrpo.data.prepare import prepare_jsonl
from megagrpo.data.rows import prompt_schema, read
from megagrpo.errors import DataError
from megagrpo.reward.answer_text import final_answer as final_answer_of
from tests.data_files import write_jsonl, write_parquet

GSM8K = [
    {"question": "Janet has 3 ducks.", "answer": "3 * 6 = <<3*6=18>>18\n#### 18"},
    {"question": "A house costs?", "answer": "It is #### odd.\n#### 1,234,567"},
    {"question": "Change?", "answer": "So it falls.\n#### -2.50"},
]
GOOD = {"prompt": "a", "answer": 1}


@pytest.mark.parametrize(
    ("write", "pattern"),
    [
        (write_jsonl, "{}.jsonl"),
        (write_jsonl, "grade_school_math/data/{}.jsonl"),
        (write_parquet, "{}-00000-of-00001.parquet"),
        (write_parquet, "main/{}-00000-of-00002.parquet"),
    ],
)
def test_gsm8k_is_prepared_from_its_published_files(write, pattern, tmp_path):
    source = tmp_path / "source"
    shards = 1 + ("of-00002" in pattern)
    for shard in range(shards):  # they are joined in order
        name = pattern.format("train").replace("-00000-", f"-{shard:05}-")
        write(source / name, *(GSM8K[2 * shard :] if shard or shards == 1 else GSM8K[:2]))
    write(source / pattern.format("test"), GSM8K[0])
    prepared = gsm8k.prepare(source, tmp_path / "out")
    assert (prepared.train_rows, prepared.test_rows) == (3, 1)
    rows = read(prepared.train, prompt_schema())
    assert [row.ground_truth for row in rows] == ["18", "1234567", "-2.50"]
    (message,) = rows[0].messages
    assert (message["role"], message["content"][:19]) == ("user", "Janet has 3 ducks. ")
    assert rows[1].extra_info == {"split": "train", "index": 1, **GSM8K[1]}
    assert (rows[0].data_source, rows[0].ability) == ("openai/gsm8k", "math")
    assert read(prepared.test, prompt_schema())[0].extra_info["split"] == "test"
    assert sorted(os.listdir(tmp_path / "out")) == ["test.parquet", "train.parquet"]


def test_rows_without_a_final_answer_are_named_and_nothing_is_written(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", *GSM8K)
    answers = ["it is 18", "#### ", "18 ####", "#### many", None, 18]
    rows = ({"question": "?", "answer": answer} for answer in answers)
    bad = write_jsonl(tmp_path / "test.jsonl", GSM8K[0], *rows)
    with pytest.raises(DataError, match="no final answer") as raised:
        gsm8k.prepare(tmp_path, tmp_path / "out")
    assert [problem.where.partition(":")[0] for problem in raised.value.problems] == [
        f"{bad} line {number}" for number in range(2, 8)
    ]
    assert not (tmp_path / "out").exists()


def test_a_missing_split_says_what_is_there_and_what_is_needed(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", *GSM8K)
    with pytest.raises(DataError, match=r"test split\n.*train.jsonl\n.*test.parquet or test.jsonl"):
        gsm8k.prepare(tmp_path, tmp_path / "out")
    with pytest.raises(DataError, match="none"):
        gsm8k.prepare(tmp_path / "none", tmp_path / "out")


def test_a_source_is_never_overwritten(tmp_path):
    for split in ("train", "test"):
        write_parquet(tmp_path / f"{split}.parquet", *GSM8K)
    before = (tmp_path / "train.parquet").read_bytes()
    with pytest.raises(DataError, match="overwrite its own source"):
        gsm8k.prepare(tmp_path, tmp_path)
    assert (tmp_path / "train.parquet").read_bytes() == before
    with pytest.raises(DataError, match="cannot be written"):
        gsm8k.prepare(tmp_path, tmp_path / "train.parquet")


def test_the_command_of_examples_writes_both_splits_and_says_so(tmp_path, capsys):
    for split, rows in (("train", GSM8K), ("test", GSM8K[:1])):
        write_jsonl(tmp_path / f"{split}.jsonl", *rows)
    output = tmp_path / "out"
    assert main(["gsm8k", "--source", str(tmp_path), "--output", str(output)]) == 0
    assert capsys.readouterr().out == f"3 rows in {output}/train.parquet\n1 rows in {output}/test.parquet\n"
    assert main(["gsm8k", "--source", str(output / "none"), "--output", str(output)]) == 2
    assert "no such folder" in capsys.readouterr().err
    assert main(["gsm8k", "--source", str(tmp_path), "--output", str(output / ("x" * 300))]) == 2


@given(st.integers(-(10**12), 10**12), st.text(alphabet="ab #,1\n", max_size=20))
def test_the_number_after_the_last_marker_is_the_answer(number, before):
    assert final_answer(f"{before}\n#### {number:,}\n") == str(number)


def test_own_columns_are_prepared(tmp_path):
    rows = [{"q": q, "a": a, "level": level} for q, a, level in (("2+3", 5, 1), ("1/2", 0.5, 2), ("x", "y", 3))]
    source = write_jsonl(tmp_path / "mine.jsonl", *rows)
    columns = {"prompt_column": "q", "answer_column": "a", "data_source": "sums"}
    texts = {"instruction": "Be brief.", "system_prompt": "You add."}
    prepared = prepare_jsonl(source, tmp_path / "out", **columns, **texts)
    rows = read(prepared.train, prompt_schema())
    assert (prepared.test, prepared.test_rows, prepared.train_rows) == (None, 0, 3)
    assert [row.ground_truth for row in rows] == ["5", "0.5", "y"]
    assert rows[0].messages == ({"role": "system", "content": "You add."}, {"role": "user", "content": "2+3 Be brief."})
    assert (rows[0].data_source, rows[1].extra_info) == ("sums", {"q": "1/2", "level": 2, "index": 1})


def test_the_held_out_share_is_seeded_and_shares_no_prompt_in_whatever_white_space(tmp_path):
    rows = ({"prompt": f"{i % 20}" + " " * i, "answer": i} for i in range(40))
    source = write_jsonl(tmp_path / "mine.jsonl", *rows)

    def questions(seed: int, name: str) -> tuple[set[str], set[str]]:
        prepared = prepare_jsonl(source, tmp_path / name, test_share=0.25, seed=seed)
        assert prepared.test is not None
        assert prepared.train_rows + prepared.test_rows == 40
        train, test = (
            {row.messages[0]["content"].strip() for row in read(path, prompt_schema())}
            for path in (prepared.train, prepared.test)
        )
        return train, test

    train, test = questions(0, "a")
    assert (len(train), len(test), train & test) == (15, 5, set())
    assert questions(0, "b") == (train, test)
    assert questions(1, "c") != (train, test)


def test_own_data_sources_and_indices_are_kept_and_the_name_is_without_its_suffix(tmp_path):
    rows = [{"prompt": "a", "answer": 1, "index": 7, "data_source": "sums"}, {"prompt": "b", "answer": 2}]
    source = tmp_path / "mine.v2.jsonl.gz"
    source.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    first, second = read(prepare_jsonl(source, tmp_path / "out").train, prompt_schema())
    assert (first.data_source, first.extra_info["index"]) == ("sums", 7)
    assert second.data_source == "mine.v2"


def test_older_held_out_rows_do_not_stay_beside_new_ones(tmp_path):
    source = write_jsonl(tmp_path / "mine.jsonl", *({"prompt": f"{i}", "answer": i} for i in range(4)))
    before = prepare_jsonl(source, tmp_path / "out", test_share=0.5)
    with pytest.raises(DataError, match=r"test\.parquet"):
        prepare_jsonl(source, tmp_path / "out")
    assert len(read(before.train, prompt_schema())) == 2
    assert prepare_jsonl(source, tmp_path / "out", test_share=0.25).train_rows == 3


@pytest.mark.parametrize(
    ("rows", "options", "needle"),
    [
        ([GOOD, {"prompt": " ", "answer": 1}], {}, "line 2, prompt"),
        ([GOOD, {"prompt": "b", "answer": None}], {}, "line 2, answer"),
        ([{"prompt": "a", "answer": True}], {}, "line 1, answer"),
        ([GOOD, {"prompt": "b", "answer": float("nan")}], {}, "line 2, answer"),
        ([GOOD, {"prompt": "\ud800", "answer": 1}], {}, "line 2, prompt"),
        ([GOOD, {"prompt": "b", "answer": "\udfff"}], {}, "lone surrogate"),
        ([GOOD | {"x": 2**80}], {}, "line 1, x"),
        ([GOOD, GOOD | {"x": "\ud800"}], {}, "line 2, x"),
        ([GOOD | {"x": None}, GOOD | {"x": {}}], {}, "line 2, x"),
        ([{"prompt": "a", "anwser": 1}], {}, "'anwser' to 'answer'"),
        ([{"question": "a", "answer": 1}], {}, "--prompt-column NAME"),
        ([*[GOOD | {"x": 1}] * 6, GOOD | {"x": "y"}, GOOD], {}, "line 7, x"),
        ([GOOD], {"test_share": 0.5}, "empty"),
        ([GOOD], {"test_share": 1.0}, "share"),
    ],
)
def test_bad_input_of_a_users_own_is_named(rows, options, needle, tmp_path):
    source = write_jsonl(tmp_path / "mine.jsonl", *rows)
    with pytest.raises(DataError, match=needle):
        prepare_jsonl(source, tmp_path / "out", **options)
    assert not list(tmp_path.glob("out/*"))


MATH = [
    {"problem": "One half?", "level": "Level 1", "type": "Algebra", "solution": r"It is $\boxed{\frac{1}{2}}$."},
    {"problem": "A set?", "level": "Level 5", "type": "Algebra", "solution": r"\boxed{1}, or \fbox{\{1, 2\}}."},
]


@pytest.mark.parametrize("kind", ["a file for each", "parquet", "jsonl"])
def test_math_is_prepared_from_its_published_files(kind, tmp_path):
    for split, rows in (("train", MATH), ("test", MATH[:1])):
        if kind == "parquet":
            write_parquet(tmp_path / "data" / f"{split}-00000-of-00001.parquet", *rows)
        elif kind == "jsonl":
            write_jsonl(tmp_path / f"{split}.jsonl", *rows)
        for index, row in enumerate(rows if kind == "a file for each" else []):
            folder = tmp_path / "MATH" / split / "algebra"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{index}.json").write_text(json.dumps(row, indent=4))
    prepared = math.prepare(tmp_path, tmp_path / "out")
    assert (prepared.train_rows, prepared.test_rows) == (2, 1)
    rows = read(prepared.train, prompt_schema())
    assert [row.ground_truth for row in rows] == [r"\frac{1}{2}", r"\{1, 2\}"]
    assert rows[0].messages[0]["content"].startswith("One half? ")
    assert (rows[1].extra_info["level"], rows[1].extra_info["index"]) == ("Level 5", 1)


def test_problems_of_math_without_an_answer_are_named(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", *MATH, MATH[0] | {"solution": "so it is 2"}, MATH[0] | {"problem": ""})
    write_jsonl(tmp_path / "test.jsonl", *MATH)
    with pytest.raises(DataError, match=r"line 3: no final answer(.|\n)*line 4: no problem"):
        math.prepare(tmp_path, tmp_path / "out")


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"$\boxed 3$", "3"),
        (r"$\boxed x$, boxed", "x"),
        (r"$\boxed\frac{1}{2}$.", r"\frac{1}{2}"),
        (r"\boxed{a{b}c}", "a{b}c"),
        (r"\boxed{1", None),
        (r"\boxed{}", None),
        ("3", None),
    ],
)
def test_the_answer_is_what_stands_in_the_last_box(solution, answer):
    assert boxed_answer(solution) == answer
    assert (final_answer_of(solution) or "").strip() == (answer or ""), "as a response's is read"


def packed(value: object) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


class Attack:
    def __reduce__(self):
        return os.mkdir, ("attacked",)


TEST = [{"input": "1\n", "output": "2", "testtype": "stdin"}]
PROGRAM = {
    "question_content": "Add one.",
    "public_test_cases": json.dumps(TEST),
    "private_test_cases": packed(json.dumps(TEST)),
    "metadata": '{"func_name": null}',
    "starter_code": "",
    "difficulty": "easy",
}


def test_livecodebench_is_prepared_with_all_of_its_tests(tmp_path):
    rows = (PROGRAM, PROGRAM | {"starter_code": "def add_one(x):", "metadata": '{"func_name": "add_one"}'})
    prepared = livecodebench.prepare(write_jsonl(tmp_path / "test.jsonl", *rows), tmp_path / "out")
    first, second = read(prepared.train, prompt_schema())
    tests = json.loads(second.ground_truth)
    assert tests == {"public_test_cases": TEST, "private_test_cases": TEST, "metadata": {"func_name": "add_one"}}
    assert "standard input" in first.messages[0]["content"]
    assert "def add_one(x):" in second.messages[0]["content"]
    assert first.extra_info == {"difficulty": "easy"}


@pytest.mark.parametrize(
    "tests",
    [packed(Attack()), packed(["no text"]), packed(json.dumps([1])), "?", base64.b64encode(b"?").decode(), "{}"],
)
def test_tests_that_are_no_text_are_refused_and_nothing_is_run(tests, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError):
        unpacked_tests(tests)
    source = write_jsonl(tmp_path / "test.jsonl", PROGRAM, PROGRAM | {"private_test_cases": tests})
    with pytest.raises(DataError, match="line 2, private_test_cases"):
        livecodebench.prepare(source, tmp_path / "out")
    assert not (tmp_path / "attacked").exists()


def test_a_data_set_that_the_hub_does_not_give_is_named_with_what_to_check(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in ("openai/gsm8k-that-is-not-here", "no name"):
        with pytest.raises(DataError, match=rf"{name}(.|\n)*HF_HUB_OFFLINE"):
            downloaded(name)

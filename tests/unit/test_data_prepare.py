"""Preparers: GSM8K's own files and a user's own columns, to files that data/rows.py reads."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megagrpo.data.prepare import final_answer, prepare_gsm8k, prepare_jsonl
from megagrpo.data.rows import PROMPT_ROWS, read
from megagrpo.errors import DataError
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
    prepared = prepare_gsm8k(source, tmp_path / "out")
    assert (prepared.train_rows, prepared.test_rows) == (3, 1)
    rows = read(prepared.train, PROMPT_ROWS)
    assert [row.ground_truth for row in rows] == ["18", "1234567", "-2.50"]
    (message,) = rows[0].messages
    assert (message["role"], message["content"][:19]) == ("user", "Janet has 3 ducks. ")
    assert rows[1].extra_info == {"split": "train", "index": 1, **GSM8K[1]}
    assert (rows[0].data_source, rows[0].ability) == ("openai/gsm8k", "math")
    assert read(prepared.test, PROMPT_ROWS)[0].extra_info["split"] == "test"
    assert sorted(os.listdir(tmp_path / "out")) == ["test.parquet", "train.parquet"]


def test_rows_without_a_final_answer_are_named_and_nothing_is_written(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", *GSM8K)
    answers = ["it is 18", "#### ", "18 ####", "#### many", None, 18]
    rows = ({"question": "?", "answer": answer} for answer in answers)
    bad = write_jsonl(tmp_path / "test.jsonl", GSM8K[0], *rows)
    with pytest.raises(DataError, match="no final answer") as raised:
        prepare_gsm8k(tmp_path, tmp_path / "out")
    assert [problem.where.partition(":")[0] for problem in raised.value.problems] == [
        f"{bad} line {number}" for number in range(2, 8)
    ]
    assert not (tmp_path / "out").exists()


def test_a_missing_split_says_what_is_there_and_what_is_needed(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", *GSM8K)
    with pytest.raises(DataError, match=r"test split\n.*train.jsonl\n.*test.parquet or test.jsonl"):
        prepare_gsm8k(tmp_path, tmp_path / "out")
    with pytest.raises(DataError, match="none"):
        prepare_gsm8k(tmp_path / "none", tmp_path / "out")


def test_a_source_is_never_overwritten(tmp_path):
    for split in ("train", "test"):
        write_parquet(tmp_path / f"{split}.parquet", *GSM8K)
    before = (tmp_path / "train.parquet").read_bytes()
    with pytest.raises(DataError, match="overwrite its own source"):
        prepare_gsm8k(tmp_path, tmp_path)
    assert (tmp_path / "train.parquet").read_bytes() == before
    with pytest.raises(DataError, match="cannot be written"):
        prepare_gsm8k(tmp_path, tmp_path / "train.parquet")


@given(st.integers(-(10**12), 10**12), st.text(alphabet="ab #,1\n", max_size=20))
def test_the_number_after_the_last_marker_is_the_answer(number, before):
    assert final_answer(f"{before}\n#### {number:,}\n") == str(number)


def test_own_columns_are_prepared(tmp_path):
    rows = [{"q": q, "a": a, "level": level} for q, a, level in (("2+3", 5, 1), ("1/2", 0.5, 2), ("x", "y", 3))]
    source = write_jsonl(tmp_path / "mine.jsonl", *rows)
    columns = {"prompt_column": "q", "answer_column": "a", "data_source": "sums"}
    texts = {"instruction": "Be brief.", "system_prompt": "You add."}
    prepared = prepare_jsonl(source, tmp_path / "out", **columns, **texts)
    rows = read(prepared.train, PROMPT_ROWS)
    assert (prepared.test, prepared.test_rows, prepared.train_rows) == (None, 0, 3)
    assert [row.ground_truth for row in rows] == ["5", "0.5", "y"]
    assert rows[0].messages == ({"role": "system", "content": "You add."}, {"role": "user", "content": "2+3 Be brief."})
    assert (rows[0].data_source, rows[1].extra_info) == ("sums", {"level": 2, "index": 1})


def test_the_held_out_share_is_seeded_and_shares_no_prompt(tmp_path):
    source = write_jsonl(tmp_path / "mine.jsonl", *({"prompt": f"{i % 20}", "answer": i} for i in range(40)))

    def questions(seed: int, name: str) -> tuple[set[str], set[str]]:
        prepared = prepare_jsonl(source, tmp_path / name, test_share=0.25, seed=seed)
        assert prepared.test is not None
        assert prepared.train_rows + prepared.test_rows == 40
        train, test = (
            {row.messages[0]["content"] for row in read(p, PROMPT_ROWS)} for p in (prepared.train, prepared.test)
        )
        return train, test

    train, test = questions(0, "a")
    assert (len(train), len(test), train & test) == (15, 5, set())
    assert questions(0, "b") == (train, test)
    assert questions(1, "c") != (train, test)


@pytest.mark.parametrize(
    ("rows", "options", "needle"),
    [
        ([GOOD, {"prompt": " ", "answer": 1}], {}, "line 2, prompt"),
        ([GOOD, {"prompt": "b", "answer": None}], {}, "line 2, answer"),
        ([{"prompt": "a", "answer": True}], {}, "line 1, answer"),
        ([GOOD, {"prompt": "b", "answer": float("nan")}], {}, "line 2, answer"),
        ([GOOD, {"prompt": "\ud800", "answer": 1}], {}, "line 2, prompt"),
        ([GOOD, {"prompt": "b", "answer": "\udfff"}], {}, "lone surrogate"),
        ([GOOD | {"x": 2**80}], {}, "table"),
        ([GOOD | {"x": "\ud800"}], {}, "table"),
        ([{"prompt": "a", "anwser": 1}], {}, "'anwser' to 'answer'"),
        ([{"question": "a", "answer": 1}], {}, "--prompt-column NAME"),
        ([GOOD | {"x": 1}, GOOD | {"x": "y"}], {}, "table"),
        ([GOOD], {"test_share": 0.5}, "empty"),
        ([GOOD], {"test_share": 1.0}, "share"),
    ],
)
def test_bad_input_of_a_users_own_is_named(rows, options, needle, tmp_path):
    source = write_jsonl(tmp_path / "mine.jsonl", *rows)
    with pytest.raises(DataError, match=needle):
        prepare_jsonl(source, tmp_path / "out", **options)
    assert not list(tmp_path.glob("out/*"))

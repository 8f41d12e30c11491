"""Prompt files: good ones are read, and every bad one ends in a DataError that names the file and the row."""

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megagrpo.data.rows import PROMPT_ROWS, quick_look, read
from megagrpo.errors import DataError


def row(**changes: Any) -> dict[str, Any]:
    good = {
        "data_source": "sums",
        "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 + 3?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "5"},
        "extra_info": {"index": 0},
    }
    return {name: value for name, value in {**good, **changes}.items() if value is not ...}


def write_jsonl(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return path


def write_parquet(path: Path, *rows: Any) -> Path:
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


@pytest.mark.parametrize(("write", "name", "first"), [(write_parquet, "a.parquet", 0), (write_jsonl, "a.jsonl", 1)])
def test_a_good_file_is_read_whole(write, name, first, tmp_path):
    rows = read(
        write(tmp_path / name, row(), row(ability=None, extra_info=None), row(data_source="other")), PROMPT_ROWS
    )
    assert [r.number for r in rows] == [first, first + 1, first + 2]
    assert rows[0].messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 2 + 3?"},
    )
    assert (rows[0].ground_truth, rows[0].ability, rows[0].extra_info) == ("5", "math", {"index": 0})
    assert (rows[1].ability, rows[1].extra_info, rows[2].data_source) == ("", {}, "other")


def test_optional_columns_may_be_absent_and_blank_lines_are_skipped(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(
        "\ufeff" + json.dumps(row(ability=..., extra_info=...)) + "\n\n" + json.dumps(row()), encoding="utf-8"
    )
    assert [(r.number, r.extra_info) for r in read(path, PROMPT_ROWS)] == [(1, {}), (3, {"index": 0})]


BAD_SECOND_LINES = {
    "not JSON": (b'{"data_source": ', "not valid JSON"),
    "JSON nested too deep": (b"[" * 100_000, "not valid JSON"),
    "not an object": (b"[1, 2]", "not a JSON object"),
    "latin-1": (json.dumps(row()).encode().replace(b"brief", b"br\xe9f"), "not UTF-8"),
    "missing key": (json.dumps(row(reward_model=...)).encode(), "no 'reward_model'"),
    "data_source is a number": (json.dumps(row(data_source=3)).encode(), "data_source"),
    "prompt is text": (json.dumps(row(prompt="What is 2 + 3?")).encode(), "prompt"),
    "prompt is empty": (json.dumps(row(prompt=[])).encode(), "no messages"),
    "message is text": (json.dumps(row(prompt=["hello"])).encode(), "prompt[0]"),
    "bad role": (json.dumps(row(prompt=[{"role": "human", "content": "hi"}])).encode(), "prompt[0].role"),
    "no content": (json.dumps(row(prompt=[{"role": "user"}])).encode(), "prompt[0].content"),
    "blank content": (json.dumps(row(prompt=[{"role": "user", "content": " "}])).encode(), "without any text"),
    "ends with the assistant": (
        json.dumps(row(prompt=[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}])).encode(),
        "prompt[1].role",
    ),
    "reward_model is null": (json.dumps(row(reward_model=None)).encode(), "reward_model"),
    "no ground truth": (json.dumps(row(reward_model={"style": "rule"})).encode(), "ground_truth"),
    "ground truth is a number": (json.dumps(row(reward_model={"ground_truth": 5})).encode(), "write it as text: '5'"),
    "extra_info is a list": (json.dumps(row(extra_info=[1])).encode(), "extra_info"),
    "lone surrogate": (json.dumps(row(data_source="\ud800")).encode(), "valid Unicode"),
}


@pytest.mark.parametrize(("line", "needle"), BAD_SECOND_LINES.values(), ids=BAD_SECOND_LINES.keys())
def test_a_bad_line_is_named(line, needle, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(json.dumps(row()).encode() + b"\n" + line + b"\n")
    with pytest.raises(DataError) as raised:
        read(path, PROMPT_ROWS)
    assert f"{path} line 2" in str(raised.value)
    assert needle in str(raised.value)
    assert quick_look(path, PROMPT_ROWS) == list(raised.value.problems)


def test_a_bad_parquet_row_is_named(tmp_path):
    path = write_parquet(tmp_path / "bad.parquet", row(), row(prompt=[]), row(reward_model={"ground_truth": None}))
    with pytest.raises(DataError) as raised:
        read(path, PROMPT_ROWS)
    assert [p.where for p in raised.value.problems] == [
        f"{path} row 1 (counting from 0), prompt",
        f"{path} row 2 (counting from 0), reward_model.ground_truth",
    ]


def test_a_parquet_string_that_is_not_utf8_is_named(tmp_path):
    table = pa.Table.from_pylist([row(), row(), row()])
    latin1 = pa.array([b"sums", b"caf\xe9", b"sums"], pa.binary()).view(pa.string())
    path = tmp_path / "bad.parquet"
    pq.write_table(table.set_column(0, "data_source", latin1), path)
    with pytest.raises(DataError, match=r"row 1 \(counting from 0\): not UTF-8\n\s+given: byte 0xe9 at position 3"):
        read(path, PROMPT_ROWS)


@pytest.mark.parametrize(("write", "name"), [(write_parquet, "a.parquet"), (write_jsonl, "a.jsonl")])
def test_a_missing_column_is_said_once_with_those_present_and_the_nearest(write, name, tmp_path):
    path = write(tmp_path / name, *[{("promt" if k == "prompt" else k): v for k, v in row().items()}] * 50)
    with pytest.raises(DataError) as raised:
        read(path, PROMPT_ROWS)
    (problem,) = raised.value.problems
    assert problem.where == f"{path}: no column 'prompt'"
    assert "data_source, promt, ability" in problem.given
    assert problem.fix == "rename 'promt' to 'prompt'"


def test_ten_problems_are_shown_and_the_rest_counted(tmp_path):
    path = write_jsonl(tmp_path / "bad.jsonl", row(), *[row(prompt=[])] * 25)
    with pytest.raises(DataError) as raised:
        read(path, PROMPT_ROWS)
    assert len(raised.value.problems) == 11
    assert raised.value.problems[-1].where == f"{path}: and 15 more"


def truncated(path: Path) -> None:
    write_parquet(path, *[row()] * 100)
    path.write_bytes(path.read_bytes()[:-200])


def corrupt(path: Path) -> None:
    write_parquet(path, *[row()] * 100)
    content = bytearray(path.read_bytes())
    content[4:400] = b"\xff" * 396
    path.write_bytes(content)


BAD_FILES = {
    "missing": ("a.parquet", lambda path: None, "no such file"),
    "a directory": ("a.parquet", lambda path: path.mkdir(), "not a file"),
    "unknown extension": ("a.csv", lambda path: path.write_text("a,b"), "unknown kind of file"),
    "no bytes": ("a.jsonl", lambda path: path.touch(), "the file is empty"),
    "only blank lines": ("a.jsonl", lambda path: path.write_text("\n\n"), "no rows"),
    "no rows": ("a.parquet", lambda path: pq.write_table(pa.Table.from_pylist([row()])[:0], path), "no rows"),
    "not parquet": ("a.parquet", lambda path: path.write_text("PAR0" * 100), "cannot be read as parquet"),
    "truncated parquet": ("a.parquet", truncated, "cannot be read as parquet"),
    "corrupt parquet": ("a.parquet", corrupt, "cannot be read as parquet from row 0 on"),
    "UTF-16": ("a.jsonl", lambda path: path.write_text(json.dumps(row()), encoding="utf-16"), "line 1: not UTF-8"),
}


@pytest.mark.parametrize(("name", "make", "needle"), BAD_FILES.values(), ids=BAD_FILES.keys())
def test_a_bad_file_is_named(name, make, needle, tmp_path):
    path = tmp_path / name
    make(path)
    with pytest.raises(DataError) as raised:
        read(path, PROMPT_ROWS)
    assert str(path) in str(raised.value)
    assert needle in str(raised.value)
    assert quick_look(path, PROMPT_ROWS) == list(raised.value.problems)


def test_a_missing_file_suggests_its_neighbour(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", row())
    assert "train.jsonl?" in quick_look(tmp_path / "trian.jsonl", PROMPT_ROWS)[0].fix


def test_the_quick_check_reads_only_the_first_rows(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", *[row()] * 100, row(prompt=[]))
    assert quick_look(path, PROMPT_ROWS) == []
    with pytest.raises(DataError, match="line 101"):
        read(path, PROMPT_ROWS)


def test_the_example_of_the_docs_is_a_valid_row(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    example = re.search(r"<!-- example: line.jsonl -->\n```json\n(.*?)```", page, re.DOTALL)
    assert example is not None
    (tmp_path / "line.jsonl").write_text(example.group(1))
    (line,) = read(tmp_path / "line.jsonl", PROMPT_ROWS)
    assert (line.data_source, line.ground_truth, line.extra_info) == ("sums", "5", {"index": 0})

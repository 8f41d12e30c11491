"""Prompt files: good ones are read, and every bad one ends in a DataError that names the file and the row."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megagrpo.data.rows import prompt_schema, quick_look, read
from megagrpo.errors import DataError, Problem
from tests.data_files import write_jsonl, write_parquet


def row(**changes: Any) -> dict[str, Any]:
    good = {
        "data_source": "sums",
        "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 + 3?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "5"},
        "extra_info": {"index": 0},
    }
    return {name: value for name, value in {**good, **changes}.items() if value is not ...}


@pytest.fixture(params=["a.parquet", "a.jsonl"])
def write(request, tmp_path):
    """Writes rows to a file of either kind, and gives its path."""
    kind = write_parquet if request.param.endswith("parquet") else write_jsonl
    return lambda *rows: kind(tmp_path / request.param, *rows)


def test_a_good_file_is_read_whole(write):
    path = write(row(), row(ability=None, extra_info=None), row(data_source="other"))
    rows, first = read(path, prompt_schema()), path.suffix == ".jsonl"
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
    assert [(r.number, r.extra_info) for r in read(path, prompt_schema())] == [(1, {}), (3, {"index": 0})]


def problems_of(path: Path) -> list[Problem]:
    with pytest.raises(DataError) as raised:
        read(path, prompt_schema())
    return list(raised.value.problems)


def message(role: str = "user", content: Any = "hi") -> dict[str, Any]:
    return {"role": role, "content": content}


PART = {"type": "text", "text": "What is on it?"}


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"images": [{"bytes": None, "path": "a.png"}]}, "images"),
        ({"image": {"bytes": "aGk=", "path": None}}, "image"),
        ({"prompt": [message(content=[PART | {"type": "image"}, PART])]}, "prompt[0].content"),
        ({"prompt": [message(content=[PART | {"type": "image_url"}])]}, "prompt[0].content"),
    ],
)
def test_pictures_are_refused(changes, where, write):
    [problem] = problems_of(write(row(**changes)))
    assert problem.where.endswith(f", {where}")
    assert problem.needed == "text alone: pictures are not read"


def test_a_column_image_of_text_or_without_pictures_is_none(write):
    rows = read(write(row(image="python:3.12", images=[]), row(image="", images=None)), prompt_schema())
    assert [its.extra_info["image"] for its in rows] == ["python:3.12", ""]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"data_source": ', "JSON"),
        (b"[" * 100_000, "JSON"),
        (b"[1, 2]", "JSON object"),
        (json.dumps(row()).encode().replace(b"brief", b"br\xe9f"), "UTF-8"),
        (row(reward_model=...), "'reward_model'"),
        (b'{"prompt": "1+1=", "data_source": "a", "prompt": "2+2="}', "the key 'prompt' twice"),
        (row(data_source=3), "data_source"),
        (row(data_source="\ud800"), "Unicode"),
        (row(prompt=" "), "prompt"),
        (row(prompt=3), "prompt"),
        (row(prompt=[]), "prompt"),
        (row(prompt=["hello"]), "prompt[0]"),
        (row(prompt=[message(role="human")]), "prompt[0].role"),
        (row(prompt=[message(content=None)]), "prompt[0].content"),
        (row(prompt=[message(content=" ")]), "prompt"),
        (row(prompt=[message(), message("assistant")]), "prompt[1].role"),
        (row(reward_model=None), "reward_model"),
        (row(reward_model={"style": "rule"}), "ground_truth"),
        (row(reward_model={"ground_truth": float("nan")}), "ground_truth"),
        (row(reward_model={"ground_truth": "\ud800"}), "Unicode"),
        (row(ability=3), "ability"),
        (row(extra_info=[1]), "extra_info"),
    ],
)
def test_a_bad_line_is_named(line, said, tmp_path):
    path = write_jsonl(tmp_path / "bad.jsonl", row())
    with path.open("ab") as file:
        file.write(line if isinstance(line, bytes) else json.dumps(line).encode())
    (problem,) = problems_of(path)
    assert f"{path} line 2" in problem.where
    assert said in str(problem)
    assert quick_look(path, prompt_schema()) == [problem]


def test_ten_bad_rows_are_named_and_the_rest_counted(write):
    path = write(row(), *[row(prompt=[])] * 25)
    problems, place = problems_of(path), "line 2" if path.suffix == ".jsonl" else "row 1 (counting from 0)"
    expected = (11, f"{path} {place}, prompt", f"{path}: and 15 more")
    assert (len(problems), problems[0].where, problems[-1].where) == expected


def test_a_parquet_string_that_is_not_utf8_is_named(tmp_path):
    table = pa.Table.from_pylist([row(), row(), row()])
    latin1 = pa.array([b"sums", b"caf\xe9", b"sums"], pa.binary()).view(pa.string())
    path = tmp_path / "bad.parquet"
    pq.write_table(table.set_column(0, "data_source", latin1), path)
    with pytest.raises(DataError, match=r"row 1 \(counting from 0\): not UTF-8"):
        read(path, prompt_schema())


@pytest.mark.parametrize(("names", "place"), [(("prompt", "prompt"), ""), (("x",), " of x")])
@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_two_columns_of_one_name_are_refused_at_any_depth(names, place, suffix, tmp_path):
    twice = pa.StructArray.from_arrays([pa.array(["1"])] * 2, names=["a", "a"])
    table, path = (
        pa.table([twice] * len(names) if place else [pa.array(["1"])] * 2, names=names),
        tmp_path / f"a.{suffix}",
    )
    arrow_file(path, table) if suffix == "arrow" else pq.write_table(table, path)
    (problem,) = problems_of(path)
    assert problem.where == f"{path}: columns{place}"
    assert "twice" in problem.given


def arrow_file(path: Path, table: pa.Table) -> Path:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    return path


def test_an_arrow_file_whose_texts_end_before_they_begin_is_named(tmp_path):
    batches = [pa.table({"prompt": prompts}) for prompts in (["1+1="], ["1+1=", "2+22="])]
    content = arrow_file(tmp_path / "a.arrow", pa.concat_tables(batches)).read_bytes()
    ends = np.array([0, 4, 9], np.int32).tobytes()
    assert content.count(ends) == 1
    (tmp_path / "a.arrow").write_bytes(content.replace(ends, np.array([0, 4, 2], np.int32).tobytes()))
    (problem,) = problems_of(tmp_path / "a.arrow")
    assert problem.where.endswith("from row 1 on")


def test_a_missing_column_is_said_once_with_those_present_and_the_nearest(write):
    path = write(*[{("promt" if k == "prompt" else k): v for k, v in row().items()}] * 50)
    (problem,) = problems_of(path)
    assert problem.where == f"{path}{' line 1' * (path.suffix == '.jsonl')}: no column 'prompt'"
    assert "data_source, promt, ability" in problem.given
    assert "{prompt: promt}" in problem.fix


def damaged(path: Path, first: int, last: int | None, by: bytes) -> None:
    """Replaces these bytes of a parquet file."""
    content = bytearray(write_parquet(path, *[row()] * 100).read_bytes())
    content[first:last] = by
    path.write_bytes(content)


BAD_FILES = {
    "missing": ("a.parquet", lambda path: None, "no such file"),
    "a directory": ("a.parquet", lambda path: path.mkdir(), "not a file"),
    "unknown extension": ("a.csv", lambda path: path.write_text("a,b"), "kind of file"),
    "no bytes": ("a.jsonl", lambda path: path.touch(), "empty"),
    "only blank lines": ("a.jsonl", lambda path: path.write_text("\n\n"), "no rows"),
    "no rows": ("a.parquet", lambda path: pq.write_table(pa.Table.from_pylist([row()])[:0], path), "no rows"),
    "not parquet": ("a.parquet", lambda path: path.write_text("PAR0" * 100), "parquet"),
    "truncated parquet": ("a.parquet", lambda path: damaged(path, -200, None, b""), "parquet"),
    "corrupt parquet": ("a.parquet", lambda path: damaged(path, 4, 400, b"\xff" * 396), "from row 0 on"),
    "UTF-16": ("a.jsonl", lambda path: path.write_text(json.dumps(row()), encoding="utf-16"), "line 1: not UTF-8"),
}


@pytest.mark.parametrize(("name", "make", "needle"), BAD_FILES.values(), ids=BAD_FILES.keys())
def test_a_bad_file_is_named(name, make, needle, tmp_path):
    path = tmp_path / name
    make(path)
    problems = problems_of(path)
    assert str(path) in str(problems[0])
    assert needle in str(problems[0])
    assert quick_look(path, prompt_schema()) == problems


def test_a_line_that_is_too_long_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("megagrpo.data.files.LINE_BYTES_MAX", 1000)
    path = write_jsonl(tmp_path / "long.jsonl", row(), row(data_source="x" * 1000))
    (problem,) = problems_of(path)
    assert (problem.where, problem.needed) == (f"{path} line 2", "at most 1,000")


def test_a_missing_file_suggests_its_neighbour(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", row())
    assert "train.jsonl" in quick_look(tmp_path / "trian.jsonl", prompt_schema())[0].fix
    (tmp_path / "gone.jsonl").symlink_to("nowhere")
    assert "gone.jsonl" not in quick_look(tmp_path / "gone.jsonl", prompt_schema())[0].fix


def test_the_quick_check_reads_only_the_first_rows(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", *[row()] * 100, row(prompt=[]))
    assert quick_look(path, prompt_schema()) == []
    with pytest.raises(DataError, match="line 101"):
        read(path, prompt_schema())


def test_the_example_of_the_docs_is_a_valid_row(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    example = re.search(r"<!-- example: line.jsonl -->\n```json\n(.*?)```", page, re.DOTALL)
    assert example is not None
    (tmp_path / "line.jsonl").write_text(example.group(1))
    (line,) = read(tmp_path / "line.jsonl", prompt_schema())
    assert (line.data_source, line.ground_truth, line.extra_info) == ("sums", "5", {"index": 0})

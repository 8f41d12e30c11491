"""Sources and archives of files: every way gives the same rows, with names that say where they are."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megagrpo.data.files import columns, records, row_count
from megagrpo.data.locations import files_of, is_absent, size_and_version
from megagrpo.errors import DataError
from tests.data_files import write_jsonl, write_parquet

ROWS = [{"a": i, "b": "é" * i} for i in range(7)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def zstd(path: Path) -> None:
    with pa.CompressedOutputStream(str(path), "zstd") as file:
        file.write(LINES)


def arrow(path: Path, rows: list[Any] = ROWS) -> None:
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)


WRITERS: dict[str, Callable[[Path], Any]] = {
    "a.jsonl": lambda path: path.write_bytes(LINES),
    "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress(LINES)),
    "a.jsonl.zst": zstd,
    "a.json": lambda path: path.write_text(json.dumps(ROWS, indent=1)),
    "a.arrow": arrow,
    "a.parquet": lambda path: write_parquet(path, *ROWS),
}


@pytest.mark.parametrize("remote", [False, True], ids=["here", "remote"])
@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_of_file_gives_the_same_rows(name, remote, tmp_path):
    WRITERS[name](tmp_path / name)
    path = str(tmp_path / name)
    if remote:
        path = f"memory://{tmp_path}/{name}"
        with fsspec.open(path, "wb") as file:
            file.write((tmp_path / name).read_bytes())
    found = list(records(path))
    first = int(".jsonl" in name)
    assert [number for number, _ in found] == list(range(first, first + 7))
    assert [record for _, record in found] == ROWS
    assert (columns(path), row_count(path)) == (("a", "b"), 7)
    assert size_and_version(path)[0] == (tmp_path / name).stat().st_size


@pytest.mark.parametrize("name", [name for name in WRITERS if name != "a.jsonl"])
def test_a_file_that_was_cut_off_is_an_error_that_names_it(name, tmp_path):
    WRITERS[name](tmp_path / name)
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(whole[: len(whole) * 2 // 3])
    with pytest.raises(DataError, match=name):
        list(records(str(tmp_path / name)))


@given(
    rows=st.lists(st.dictionaries(st.text(max_size=3), st.text(max_size=4), max_size=3), max_size=5),
    step=st.integers(1, 9),
)
def test_an_array_of_objects_is_read_piece_by_piece(rows, step, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "rows.json"
    path.write_text(json.dumps(rows, ensure_ascii=bool(step % 2), indent=step % 3 or None))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megagrpo.data.files.READ_BYTES", step)
        assert [record for _, record in records(str(path))] == rows


def test_one_object_alone_is_a_row_and_what_is_none_is_named(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"a": 1}')
    assert list(records(str(path))) == [(0, {"a": 1})]
    path.write_text('[{"a": 1}, 2]')
    (_, good), (_, bad) = records(str(path))
    assert good == {"a": 1}
    assert bad.where == f"{path} row 1 (counting from 0): not a JSON object"
    path.write_text('[{"a": 1}, {"a"')
    with pytest.raises(DataError, match=r"row 1 .*not valid JSON"):
        list(records(str(path)))


def test_an_arrow_file_that_is_no_stream_is_named_with_what_to_do(tmp_path):
    feather.write_feather(pa.Table.from_pylist(ROWS), tmp_path / "a.arrow")
    with pytest.raises(DataError, match=r"a\.arrow: another kind(.|\n)*as parquet"):
        list(records(str(tmp_path / "a.arrow")))


@pytest.mark.parametrize("path", ["none/*.jsonl", "nowhere://a.jsonl", "memory://none.jsonl"])
def test_a_place_without_files_is_not_to_be_corrected_as_a_file(path):
    with pytest.raises(DataError) as raised:
        files_of(path)
    assert raised.value.problems[0].fix


@pytest.mark.parametrize("text", ['{"a": 1}\n{"a": 2}\n', '[{"a": 1}]\n[{"a": 2}]', '[{"a": 1}],'])
def test_a_json_file_that_goes_on_after_its_end_is_an_error(text, tmp_path):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(DataError, match=r"row 1 (.|\n)*\.jsonl"):
        list(records(str(path)))
    with pytest.raises(DataError, match="row 1 "):
        row_count(str(path))


def test_folders_and_patterns_stand_for_their_files(tmp_path, monkeypatch):
    for name in ("x/b.jsonl", "x/a.jsonl", "x/y/c.jsonl", "x/.hidden/d.jsonl", "z.jsonl"):
        write_jsonl(tmp_path / name, *ROWS)
    (tmp_path / "x" / "README.md").write_text("not data")
    monkeypatch.chdir(tmp_path)
    assert files_of("x") == ["x/a.jsonl", "x/b.jsonl", "x/y/c.jsonl"]
    assert files_of("x/*.jsonl") == ["x/a.jsonl", "x/b.jsonl"]
    assert files_of("**/?.jsonl") == ["x/a.jsonl", "x/b.jsonl", "x/y/c.jsonl", "z.jsonl"]
    assert files_of("z.jsonl") == ["z.jsonl"]
    write_jsonl(Path("[1].jsonl"), *ROWS)
    assert files_of("[1].jsonl") == ["[1].jsonl"], "a file of this very name is no pattern"
    (tmp_path / "empty").mkdir()
    for path, said in (("x/*.csv", "pattern"), ("empty", "without data files"), ("zz.jsonl", "did you mean z.jsonl")):
        with pytest.raises(DataError, match=said):
            files_of(path)


def test_a_folder_that_datasets_saved_gives_its_files_in_their_order(tmp_path):
    names = ["data-00001-of-00002.arrow", "data-00000-of-00002.arrow"]
    for name in names:
        (tmp_path / "train").mkdir(exist_ok=True)
        arrow(tmp_path / "train" / name)
    (tmp_path / "train" / "dataset_info.json").write_text("{}")
    listed = {"_data_files": [{"filename": name} for name in names]}
    (tmp_path / "train" / "state.json").write_text(json.dumps(listed))
    assert files_of(str(tmp_path / "train")) == [str(tmp_path / "train" / name) for name in names]
    assert files_of(str(tmp_path / "t*")) == sorted(files_of(str(tmp_path / "train")))
    (tmp_path / "train" / names[1]).unlink()
    with pytest.raises(DataError, match=rf"no file {names[1]}\n(.|\n)*the 2 files"):
        files_of(str(tmp_path / "train"))
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(DataError, match=r"several splits: train, test(.|\n)*/train"):
        files_of(str(tmp_path))


@pytest.mark.parametrize("name", ["dataset_dict.json", "state.json"])
@pytest.mark.parametrize("content", [b"\xff", b"[" * 100_000, b"[1]", b'{"splits": 1, "_data_files": [2]}'])
def test_a_damaged_list_of_a_saved_data_set_is_named(name, content, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=name):
        files_of(str(tmp_path))


def test_every_file_is_there_once_whatever_links_and_patterns_lead_to_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("x/a.jsonl", "x/y/b.jsonl", "z/c.jsonl"):
        write_jsonl(tmp_path / name, *ROWS)
    Path("x/latest").symlink_to(".")
    Path("x/up").symlink_to("..")
    Path("x/z").symlink_to("../z")
    assert files_of("x") == ["x/a.jsonl", "x/y/b.jsonl", "x/z/c.jsonl"]
    assert files_of("x/**/**/*.jsonl") == ["x/a.jsonl", "x/y/b.jsonl", "x/z/c.jsonl"]
    assert files_of("**/*.jsonl") == ["x/a.jsonl", "x/y/b.jsonl", "z/c.jsonl"]
    Path("z/_log.jsonl").touch()
    (tmp_path / "z" / "empty").mkdir()
    assert files_of("z/*") == ["z/c.jsonl"]


def test_urls_are_read_by_fsspec_and_what_it_lacks_is_named(tmp_path):
    root = f"memory://{tmp_path}"
    for name in ("f/b.jsonl", "f/a.jsonl", "f/c.txt"):
        with fsspec.open(f"{root}/{name}", "wb") as file:
            file.write(LINES)
    assert files_of(f"{root}/f") == files_of(f"{root}/f/*.jsonl") == [f"{root}/f/a.jsonl", f"{root}/f/b.jsonl"]
    assert files_of(f"{root}/f/a.jsonl") == [f"{root}/f/a.jsonl"]
    assert size_and_version(f"{root}/f/a.jsonl")[1], "when it was written is known"
    assert files_of(f"file://{write_jsonl(tmp_path / 'here.jsonl', *ROWS)}") == [f"file://{tmp_path}/here.jsonl"]
    for path, said in ((f"{root}/none.jsonl", "no such file"), ("nowhere://a.jsonl", "cannot be reached")):
        assert is_absent(path)
        with pytest.raises(DataError, match=said):
            files_of(path)


def test_a_path_is_absent_only_if_nothing_here_is_like_it(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", *ROWS)
    assert [is_absent(str(tmp_path / name)) for name in ("train.jsonl", "trian.jsonl", "*.jsonl", ".")] == [False] * 4
    assert [is_absent(str(tmp_path / name)) for name in ("x/*.jsonl", "other/rows.parquet")] == [True] * 2


def test_a_parquet_file_is_read_by_columns_that_are_wanted(tmp_path):
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet", row_group_size=2)
    assert [record for _, record in records(str(tmp_path / "a.parquet"), ["a"])] == [{"a": i} for i in range(7)]

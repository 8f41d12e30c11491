"""`megagrpo data show`: what the model will see, how long it is, and which rows are wrong."""

import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from examples.demo.model import make_tokenizer
from megagrpo.cli import main
from megagrpo.data.show import View, draw, entry_of, histogram, look
from megagrpo.errors import DataError
from megagrpo.recipe.schema import DataFileConfig
from tests.data_files import write_jsonl
from tests.tiny_run import make_run

ROWS = [{"q": f"{i}+{i}?" * (i + 1), "a": 2 * i, "kind": "even" if i % 2 == 0 else "odd"} for i in range(10)]


@pytest.fixture
def entry(tmp_path: Path) -> DataFileConfig:
    columns = {"prompt": "q", "ground_truth": "a", "data_source": "kind"}
    return DataFileConfig(path=str(write_jsonl(tmp_path / "a.jsonl", *ROWS)), columns=columns)


def drawn(entry: DataFileConfig, view: View, rows: int = 2) -> str:
    file = io.StringIO()
    draw(*look(entry, view, rows), view, Console(file=file, width=100))
    return file.getvalue()


def test_rows_are_shown_as_the_model_sees_them_with_their_tokens(entry):
    tokenizer = make_tokenizer()
    view = View(tokenizer, system_prompt="Add.", tokens_max=40)
    examples, lengths, sources = look(entry, view, 2)
    texts = [f"<|system|>Add.<|user|>{row['q']}<|assistant|>" for row in ROWS]
    assert [example.text for example in examples] == texts[:2]
    counted = [len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
    assert lengths.tolist() == counted
    assert sources == {"even": 5, "odd": 5}
    text = drawn(entry, view)
    assert f"{counted[1]} tokens: " in text
    assert f"above {view.tokens_max}" in text
    assert text.count("│ <|system|>") == 2


def test_without_a_model_messages_are_shown_and_characters_counted(entry):
    (example,), *_ = look(entry, View(), 1)
    assert (example.text, example.length) == ("[user] 0+0?", 4)
    assert "characters" in drawn(entry, View(), 0)


def test_an_entry_is_found_however_its_files_are_written(entry, monkeypatch):
    folder = Path(entry.path).parent
    monkeypatch.chdir(folder)
    for path in (str(folder), "*.jsonl", "."):
        found = entry_of("./a.jsonl", [DataFileConfig(path="none"), entry.model_copy(update={"path": path})])
        assert (found.path, found.columns) == ("./a.jsonl", entry.columns)
    write_jsonl(folder / "b.jsonl", *ROWS)
    assert entry_of(".", [entry]).columns == DataFileConfig(path=".").columns


def test_text_of_a_row_does_not_control_the_terminal(tmp_path):
    row = {"prompt": "a\x1b[2Jb [red]c", "ground_truth": "1", "data_source": "s"}
    entry = DataFileConfig(path=str(write_jsonl(tmp_path / "a.jsonl", row)))
    assert r"a\x1b[2Jb [red]c" in drawn(entry, View())


def test_all_bad_rows_are_named(entry):
    write_jsonl(Path(entry.path), ROWS[0], {**ROWS[1], "a": None}, {**ROWS[2], "q": ""})
    with pytest.raises(DataError, match=r"line 2, a(.|\n)*line 3, q"):
        look(entry, View(), 1)


def test_a_histogram_has_every_row_once_and_marks_what_is_above_the_limit():
    lengths = np.array([1] * 5 + [50] * 7 + [100] * 3)
    lines = histogram(lengths, 60).plain.splitlines()
    assert sum(int(line.replace(" above the limit", "").split()[-1]) for line in lines) == 15
    assert [("above" in line) for line in lines].count(True) == 4
    assert len(histogram(np.array([7, 7]), None).plain.splitlines()) == 1


def test_the_command_takes_columns_and_template_of_a_recipe(tmp_path, capsys):
    recipe = make_run(tmp_path)
    assert main(["data", "show", str(tmp_path / "train.jsonl"), "--recipe", str(recipe), "--rows", "1"]) == 0
    told = capsys.readouterr().out
    assert " tokens: " in told
    assert "│ 1+1= " in told
    assert "above 16" in told, "the recipe's data.prompt_tokens_max"
    told = [str(tmp_path / "train.jsonl"), "--recipe", str(recipe), "data.prompt_tokens_max=17"]
    assert main(["data", "show", *told]) == 0
    assert "above 17" in capsys.readouterr().out
    assert main(["data", "show", str(tmp_path / "none.jsonl")]) == 2
    capsys.readouterr()
    assert main(["data", "show", str(recipe)]) == 2
    assert f"--recipe {recipe}" in capsys.readouterr().err

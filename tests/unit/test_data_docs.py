"""The commands and recipes that docs/data.md shows do what the page says."""

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from examples import prepare
from megagrpo import cli
from megagrpo.data.locations import SUFFIXES
from megagrpo.recipe.schema import Recipe
from megagrpo.section import broken_rules
from tests.data_files import write_jsonl, write_parquet
from tests.tiny_run import ROW, make_model, recipe

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
MAINS = {"megagrpo": cli.main, "python -m examples.prepare": prepare.main}
COMMANDS = re.findall(rf"^\$ ({'|'.join(MAINS)}) (.*)$", PAGE, re.MULTILINE)
RECIPES = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes the files that the page's commands name."""
    monkeypatch.chdir(tmp_path)
    make_model(Path("models/sums"))
    write_jsonl(Path("data/mine.jsonl"), ROW, ROW)
    write_parquet(Path("data/train.parquet"), ROW, ROW)
    questions = [{"question": f"{i}+{i}?", "answer": 2 * i} for i in range(10)]
    write_jsonl(Path("data/questions.jsonl"), *questions)
    tree = recipe(tmp_path)
    tree["model"]["path"] = "models/sums"
    columns = {"prompt": "question", "ground_truth": "answer", "data_source": {"value": "sums"}}
    tree["data"]["train"] = [{"path": "data/questions.jsonl", "columns": columns}]
    Path("recipe.yaml").write_text(yaml.safe_dump(tree))
    for split in ("train", "test"):
        write_jsonl(Path(f"gsm8k/{split}.jsonl"), {"question": "1+1?", "answer": "#### 2"})
        write_jsonl(Path(f"MATH/{split}.jsonl"), {"problem": "1+1?", "solution": r"\boxed{2}"})
    tests = json.dumps([{"input": "1", "output": "1", "testtype": "stdin"}])
    columns = {"public_test_cases": tests, "private_test_cases": tests, "metadata": "{}", "starter_code": ""}
    write_jsonl(Path("livecodebench/test.jsonl"), {"question_content": "Print it.", **columns})
    return tmp_path


@pytest.mark.parametrize(("main", "command"), COMMANDS)
def test_a_command_of_the_page_works(main, command, folder, capsys):
    assert MAINS[main](shlex.split(command)) == 0
    assert capsys.readouterr().out


def test_the_page_has_every_command_of_data_and_every_preparer():
    assert {" ".join(command.split()[:2]) for main, command in COMMANDS if main == "megagrpo"} == {
        "data show", "data check", "prepare jsonl",
    }  # fmt: skip
    data_sets = {name for name, (module, _) in prepare.NAMES.items() if module.startswith("data_sets.")}
    assert {command.split()[0] for main, command in COMMANDS if main != "megagrpo"} == data_sets
    assert [suffix for suffix in SUFFIXES if f"`{suffix}`" not in PAGE] == []


@pytest.mark.parametrize("text", RECIPES)
def test_a_recipe_of_the_page_is_one(text):
    tree = recipe(Path("tiny"))
    tree["rollout"]["response_tokens_max"], tree["train"]["tokens_per_microbatch"] = 1024, 2048
    for section, settings in yaml.safe_load(text).items():
        tree[section] = {**tree.get(section, {}), **settings} if section != "reward" else settings
    assert broken_rules(Recipe.model_validate(tree)) == []

"""The pages of docs/moving/: their tables are those that `megagrpo import` reads, and the worked example comes out."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from megagrpo.cli import main, parse
from megagrpo.importing.read import FRAMEWORKS
from megagrpo.recipe.load import load
from megagrpo.recipe.schema import Recipe
from megagrpo.section import broken_rules
from tools.moving_tables import with_tables

PAGES = Path(__file__).resolve().parents[2] / "docs" / "moving"
FIELD = re.compile(r"^\| `[^`]+` \|(?: `[^`]*`)? ?\| `([^`]+)` \|", re.MULTILINE)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_the_tables_of_a_page_are_those_of_the_import(name: str) -> None:
    page = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    assert page == with_tables(page, FRAMEWORKS[name]), "run python -m tools.moving_tables docs/moving"


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_every_field_that_a_table_names_is_in_a_section_of_a_recipe(name: str) -> None:
    fields = FIELD.findall((PAGES / f"{name}.md").read_text(encoding="utf-8"))
    assert len(fields) > 20
    assert {field.split(".")[0] for field in fields} <= set(Recipe.model_fields)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_the_commands_of_a_page_are_commands(name: str) -> None:
    page = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    commands = re.findall(r"^\$ megagrpo ([^#\n]+)", page, re.MULTILINE)
    assert commands
    for command in commands:
        assert parse(shlex.split(command)).command


def test_the_worked_example_of_verl_gives_the_recipe_that_the_page_shows_and_it_has_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (PAGES / "verl.md").read_text(encoding="utf-8")
    script, recipe = (re.findall(rf"```{kind}\n(.*?)```", page, re.DOTALL)[0] for kind in ("sh", "yaml"))
    monkeypatch.chdir(tmp_path)
    Path("run_gsm8k.sh").write_text(script)
    Path("rewards").mkdir()
    Path("rewards/gsm8k.py").write_text("def compute_score(data_source, solution_str, ground_truth): return 1.0\n")
    first, second = re.findall(r"^\$ megagrpo (\S.*)$", page, re.MULTILINE)[:2]
    assert main(shlex.split(first)) == 0
    assert Path("gsm8k.yaml").read_text().endswith(recipe)
    assert main(shlex.split(second)) == 0
    assert capsys.readouterr().out.splitlines()[-2] == "OK"
    overrides = re.findall(r"```sh\nmegagrpo train gsm8k.yaml (.*?)```", page, re.DOTALL)[0].replace("\\\n", " ")
    small = load("gsm8k.yaml", shlex.split(overrides)).recipe
    assert small.rollout.engine == "transformers"
    assert not list(broken_rules(small))

"""The JSON schema is current, and the recipes and commands that the pages of docs/ show are right."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from megagrpo.algorithm.advantages import AdvantageConfig
from megagrpo.algorithm.aggregation import AggregationConfig
from megagrpo.algorithm.policy_losses import PolicyLossConfig
from megagrpo.cli import main
from megagrpo.recipe.schema import AnyRecipe, Recipe, SftRecipe
from megagrpo.recipe.yaml12 import parse
from megagrpo.section import Section, broken_rules
from tests.methods import names
from tests.tiny_run import ROW, make_model, recipe
from tools.recipe_docs import PAGES, json_schema, reference, written

RECIPES, ALGORITHMS, SFT = (
    (Path(__file__).parents[2] / "docs" / f"{page}.md").read_text(encoding="utf-8")
    for page in ("recipes", "algorithms", "sft")
)
COMMANDS = re.findall(r"```console\n\$ megagrpo ([^\n]*)\n(.*?)```", RECIPES, re.DOTALL)
PRESETS = re.findall(r"```yaml\n# (.*?)\n(.*?)```", ALGORITHMS, re.DOTALL)


@pytest.mark.parametrize(("path", "text"), written().items(), ids=[path.name for path in written()])
def test_a_file_that_is_made_from_the_recipes_classes_is_current(path: Path, text: str) -> None:
    assert path.read_text(encoding="utf-8") == text, "run: python -m tools.recipe_docs"


@pytest.mark.parametrize("recipe_class", PAGES, ids=["grpo", "sft"])
def test_the_reference_has_every_field(recipe_class: type[AnyRecipe]) -> None:
    assert set(paths(recipe_class)) <= set(re.findall(r"^- .*?\*\*`(.+?)`\*\*", reference(recipe_class), re.MULTILINE))


def paths(section: type[Section], prefix: str = "") -> Iterator[str]:
    """Every field that the loader knows, outside of lists and of methods that are chosen by name."""
    for name, info in section.model_fields.items():
        yield prefix + name
        inner = info.annotation
        if isinstance(inner, type) and issubclass(inner, Section):
            yield from paths(inner, f"{prefix}{name}.")


def test_the_schema_refuses_what_the_loader_refuses() -> None:
    tree = recipe(Path("tiny"))
    jsonschema.validate(tree, json.loads(json_schema(Recipe)))
    tree["train"]["layout"]["tensr"] = 2
    with pytest.raises(jsonschema.ValidationError, match="tensr"):
        jsonschema.validate(tree, json.loads(json_schema(Recipe)))


@pytest.mark.parametrize(("command", "output"), COMMANDS, ids=[command for command, _ in COMMANDS])
def test_a_command_of_the_page_names_the_fields_and_files_that_the_page_shows(
    command: str, output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    make_model(Path("models/sums"))
    for directory in ("data", "yaml_recipes"):
        Path(directory).mkdir()
    Path("data/train.jsonl").write_text(f"{json.dumps(ROW)}\n" * 8)
    (shown, *_) = re.findall(r"```yaml\n(.*?)```", RECIPES, re.DOTALL)
    Path("yaml_recipes/sums.yaml").write_text(shown)
    wrong = shown.replace("tensor: 2", "tensr: 4").replace("prompts_per_step: 32", "prompts_per_step: many")
    Path("yaml_recipes/wrong.yaml").write_text(wrong)
    assert main(shlex.split(command)) == (2 if "problem" in output else 0)
    printed = capsys.readouterr()
    assert set(re.findall(r"[\w/]+\.[\w.]+", output)) <= set(re.findall(r"[\w/]+\.[\w.]+", printed.out + printed.err))


@pytest.mark.parametrize("union", [AdvantageConfig, PolicyLossConfig, AggregationConfig], ids=["A", "L", "T"])
def test_every_method_has_a_row(union: Any) -> None:
    assert set(names(union)) <= set(re.findall(r"^\| `(\w+)`", ALGORITHMS, re.MULTILINE))


@pytest.mark.parametrize(("name", "text"), PRESETS, ids=[name for name, _ in PRESETS])
def test_a_preset_is_a_recipe(name: str, text: str) -> None:
    values = recipe(Path("tiny"))
    values["rollout"]["response_tokens_max"] = 4096
    values["train"] |= {"tokens_per_microbatch": 8192, "total_steps": 20}
    for section, settings in yaml.safe_load(text).items():
        values.setdefault(section, {}).update(settings)
    assert broken_rules(Recipe.model_validate(values)) == []


def test_the_recipe_of_fine_tuning_is_one() -> None:
    (shown,) = re.findall(r"```yaml\n(.*?)```", SFT, re.DOTALL)
    assert broken_rules(SftRecipe.model_validate(parse(shown, str).tree)) == []

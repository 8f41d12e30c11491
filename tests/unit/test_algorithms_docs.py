"""docs/algorithms.md names every method and every refusal, and its presets are recipes that nothing refuses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from megagrpo.recipe.algorithm_checks import ALGORITHM_RULES
from megagrpo.recipe.checks import RULES, recipe_problems
from megagrpo.recipe.schema import AdvantageConfig, AlgorithmConfig, PolicyLossConfig, Recipe
from tests.tiny_run import recipe
from tests.unit.test_recipe_algorithm_checks import CASES
from tests.unit.test_recipe_checks import recipe_with

TEXT = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")
PRESETS = re.findall(r"```yaml\n# (.*?)\n(.*?)```", TEXT, re.DOTALL)
REFUSALS = TEXT.split("## What is refused, and why")[1]
UNREAD = ALGORITHM_RULES[0]  # settings that the chosen method does not read: one row for all of a section


@pytest.mark.parametrize(
    ("section", "field"),
    [(AdvantageConfig, "name"), (PolicyLossConfig, "name"), (AlgorithmConfig, "aggregation")],
    ids=str,
)
def test_every_name_has_a_row(section: Any, field: str) -> None:
    rows = set(re.findall(r"^\| `(\w+)`", TEXT, re.MULTILINE))
    assert set(get_args(section.model_fields[field].annotation)) <= rows


def test_the_refusals_are_those_of_the_rules() -> None:
    """By the tests of these rules: each field that one of them refuses has a row, and each row such a test."""
    refused = set()
    for overrides, _, _ in CASES:
        for rule in RULES:
            for problem in rule(recipe_with(*overrides)):
                field = re.sub(r"\.\d+\.", "[].", problem.where).removeprefix("algorithm.")
                refused.add(field.split(".")[0] + ".…" if rule is UNREAD else field)
    rows = re.findall(r"^\|(.*?)\|", REFUSALS, re.MULTILINE)
    assert {field for row in rows for field in re.findall(r"`(.*?)`", row)} == refused


@pytest.mark.parametrize(("name", "text"), PRESETS, ids=[name for name, _ in PRESETS])
def test_a_preset_is_a_recipe(name: str, text: str) -> None:
    values = recipe(Path("tiny"))
    values["rollout"]["response_tokens_max"] = 4096
    values["train"] |= {"tokens_per_microbatch": 8192, "total_steps": 20}
    for section, settings in yaml.safe_load(text).items():
        values.setdefault(section, {}).update(settings)
    assert recipe_problems(Recipe.model_validate(values)) == []

"""docs/algorithms.md names every method and every refusal, and its presets are recipes that nothing refuses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from megagrpo.recipe.schema import AdvantageConfig, AggregationConfig, PolicyLossConfig, Recipe
from megagrpo.section import broken_rules
from tests.methods import names
from tests.tiny_run import recipe
from tests.unit.test_recipe_rules import BROKEN

TEXT = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")
PRESETS = re.findall(r"```yaml\n# (.*?)\n(.*?)```", TEXT, re.DOTALL)
REFUSALS = TEXT.split("## What is refused, and why")[1]


@pytest.mark.parametrize("union", [AdvantageConfig, PolicyLossConfig, AggregationConfig], ids=["A", "L", "T"])
def test_every_name_has_a_row(union: Any) -> None:
    rows = set(re.findall(r"^\| `(\w+)`", TEXT, re.MULTILINE))
    assert set(names(union)) <= rows


def test_every_refusal_of_the_algorithm_has_a_row() -> None:
    refused = {
        re.sub(r"\.\d+\.", "[].", field).removeprefix("algorithm.") for field, _ in BROKEN if "algorithm" in field
    }
    rows = re.findall(r"^\|(.*?)\|", REFUSALS, re.MULTILINE)
    assert refused <= {field for row in rows for field in re.findall(r"`(.*?)`", row)}


@pytest.mark.parametrize(("name", "text"), PRESETS, ids=[name for name, _ in PRESETS])
def test_a_preset_is_a_recipe(name: str, text: str) -> None:
    values = recipe(Path("tiny"))
    values["rollout"]["response_tokens_max"] = 4096
    values["train"] |= {"tokens_per_microbatch": 8192, "total_steps": 20}
    for section, settings in yaml.safe_load(text).items():
        values.setdefault(section, {}).update(settings)
    assert broken_rules(Recipe.model_validate(values)) == []

"""docs/algorithms.md names every method there is, and its presets are recipes that nothing refuses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from megagrpo.recipe.checks import recipe_problems
from megagrpo.recipe.schema import Advantage, Algorithm, PolicyLoss, Recipe
from tests.tiny_run import recipe

TEXT = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")
PRESETS = re.findall(r"```yaml\n# (.*?)\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.parametrize(
    ("section", "field"), [(Advantage, "name"), (PolicyLoss, "name"), (Algorithm, "aggregation")], ids=str
)
def test_every_name_has_a_row(section: Any, field: str) -> None:
    rows = set(re.findall(r"^\| `(\w+)`", TEXT, re.MULTILINE))
    assert set(get_args(section.model_fields[field].annotation)) <= rows


@pytest.mark.parametrize(("name", "text"), PRESETS, ids=[name for name, _ in PRESETS])
def test_a_preset_is_a_recipe(name: str, text: str) -> None:
    values = recipe(Path("tiny"))
    values["rollout"]["response_tokens_max"] = 4096
    values["train"] |= {"tokens_per_microbatch": 8192, "total_steps": 20}
    for section, settings in yaml.safe_load(text).items():
        values.setdefault(section, {}).update(settings)
    assert recipe_problems(Recipe.model_validate(values)) == []

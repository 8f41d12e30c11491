"""The generated JSON schema is current, and the recipes of the repository use it."""

import json
from pathlib import Path

import jsonschema
import pytest

from megagrpo.recipe.json_schema import DIRECTORY, FILES, first_line, json_schema
from megagrpo.recipe.load import load_any
from megagrpo.recipe.schema import AnyRecipe, Recipe
from megagrpo.recipe.yaml12 import parse
from tests.tiny_run import recipe

RECIPES = sorted(DIRECTORY.glob("*.yaml"))


@pytest.mark.parametrize("recipe_class", FILES, ids=["grpo", "sft"])
def test_the_schema_in_the_repository_is_current(recipe_class: type[AnyRecipe]) -> None:
    written = FILES[recipe_class].read_text(encoding="utf-8")
    assert written == json_schema(recipe_class), "run: python -m megagrpo.recipe.json_schema"


@pytest.mark.parametrize("path", RECIPES, ids=[path.name for path in RECIPES])
def test_a_recipe_names_the_schema_and_fits_it(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    recipe_class = type(load_any(path).recipe)
    assert text.splitlines()[0] == first_line(recipe_class)
    jsonschema.validate(parse(text, str).tree, json.loads(json_schema(recipe_class)))


def test_the_schema_refuses_what_the_loader_refuses() -> None:
    tree = recipe(Path("tiny"))
    jsonschema.validate(tree, json.loads(json_schema(Recipe)))
    tree["train"]["layout"]["tensr"] = 2
    with pytest.raises(jsonschema.ValidationError, match="tensr"):
        jsonschema.validate(tree, json.loads(json_schema(Recipe)))

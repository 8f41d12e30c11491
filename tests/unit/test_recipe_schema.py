"""The generated JSON schema is current, and the recipes of the repository use it."""

import json
from pathlib import Path

import jsonschema
import pytest

from megagrpo.recipe.json_schema import FILE, FIRST_LINE, json_schema
from megagrpo.recipe.load import load
from megagrpo.recipe.yaml12 import parse
from tests.tiny_run import recipe

RECIPES = sorted(FILE.parent.glob("*.yaml"))


def test_the_schema_in_the_repository_is_current() -> None:
    assert FILE.read_text(encoding="utf-8") == json_schema(), "run: python -m megagrpo.recipe.json_schema"


@pytest.mark.parametrize("path", RECIPES, ids=[path.name for path in RECIPES])
def test_a_recipe_names_the_schema_and_fits_it(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.splitlines()[0] == FIRST_LINE
    load(path)
    jsonschema.validate(parse(text, str).tree, json.loads(json_schema()))


def test_the_schema_refuses_what_the_loader_refuses() -> None:
    tree = recipe(Path("tiny"))
    jsonschema.validate(tree, json.loads(json_schema()))
    tree["train"]["layout"]["tensr"] = 2
    with pytest.raises(jsonschema.ValidationError, match="tensr"):
        jsonschema.validate(tree, json.loads(json_schema()))

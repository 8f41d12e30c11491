"""The recipes' JSON schemas, with which editors complete keys, show the docs and mark mistakes.

`python -m megagrpo.recipe.json_schema` writes them to yaml_recipes/.
"""

from __future__ import annotations

import json
from pathlib import Path

from megagrpo.recipe.schema import AnyRecipe, Recipe, SftRecipe

DIRECTORY = Path(__file__).parents[2] / "yaml_recipes"
FILES: dict[type[AnyRecipe], Path] = {
    Recipe: DIRECTORY / "recipe.schema.json",
    SftRecipe: DIRECTORY / "sft.schema.json",
}


def json_schema(recipe_class: type[AnyRecipe]) -> str:
    """Returns the schema's text, JSON Schema draft 2020-12."""
    described = recipe_class.model_json_schema()
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **described, "title": "megagrpo recipe"}
    return json.dumps(schema, indent=2) + "\n"


def first_line(recipe_class: type[AnyRecipe]) -> str:
    """Returns the line with which a recipe beside the schema names it."""
    return f"# yaml-language-server: $schema={FILES[recipe_class].name}"


if __name__ == "__main__":
    for recipe_class, file in FILES.items():
        file.write_text(json_schema(recipe_class), encoding="utf-8")
        print(file)

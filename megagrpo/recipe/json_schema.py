"""The recipe's JSON schema, with which editors complete keys, show the docs and mark mistakes.

`python -m megagrpo.recipe.json_schema` writes it to yaml_recipes/recipe.schema.json.
"""

from __future__ import annotations

import json
from pathlib import Path

from megagrpo.recipe.schema import Recipe

FILE = Path(__file__).parents[2] / "yaml_recipes" / "recipe.schema.json"
FIRST_LINE = "# yaml-language-server: $schema=recipe.schema.json"
"""How a recipe beside the schema names it."""


def json_schema() -> str:
    """The schema's text, JSON Schema draft 2020-12."""
    described = Recipe.model_json_schema()
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **described, "title": "megagrpo recipe"}
    return json.dumps(schema, indent=2) + "\n"


if __name__ == "__main__":
    FILE.write_text(json_schema(), encoding="utf-8")
    print(FILE)

"""Records the recipes that `megagrpo import` makes of the files in peers/, beside them as NAME.recipe.yaml.

    python -m tests.golden.record_imported

The files are written for these tests, in the form that each framework's own scripts have.
"""

from __future__ import annotations

from pathlib import Path

from megagrpo.importing.read import Imported, import_recipe

PEERS = Path(__file__).with_name("peers")
FRAMEWORKS = {
    "verl_gsm8k.sh": "verl",
    "verl_megatron.sh": "verl",
    "verl_resolved.yaml": "verl",
    "open_instruct_math.sh": "open_instruct",
    "slime_math.sh": "slime",
    "trl_grpo.py": "trl",
}
ENVIRONMENT = {"HOME": "/home/me"}


def imported(name: str) -> Imported:
    return import_recipe(FRAMEWORKS[name], PEERS / name, {}, ENVIRONMENT)


def golden(name: str) -> Path:
    return PEERS / f"{name}.recipe.yaml"


if __name__ == "__main__":
    for name in FRAMEWORKS:
        golden(name).write_text(imported(name).text, encoding="utf-8")

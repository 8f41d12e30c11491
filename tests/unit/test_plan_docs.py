"""docs/plan.md lists every flag, every GPU, and every assumption with the default that plans use."""

import re
from dataclasses import fields
from pathlib import Path

from megagrpo.cli import parse
from megagrpo.plan.assumptions import Assumptions
from megagrpo.plan.machines import GPUS
from megagrpo.plan.plan import unit_of

DOCS = (Path(__file__).parents[2] / "docs" / "plan.md").read_text(encoding="utf-8")


def rows(section: str) -> dict[str, list[str]]:
    """Cells of the section's table by the code in its first column."""
    lines = DOCS.partition(f"\n## {section}\n")[2].partition("\n## ")[0].splitlines()
    cells = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `"))
    return {first.strip("`"): rest for first, *rest in cells}


def test_flags_gpus_and_assumptions_are_listed() -> None:
    asked = vars(parse(["plan", "recipe.yaml"]))
    flags = {name for name in asked if name not in ("command", "recipe", "overrides")}
    assert set(re.findall(r"^--(\w+)", "\n".join(rows("Flags")), re.MULTILINE)) == flags
    assert list(rows("GPUs")) == list(GPUS)
    assert {name: (cells[0], cells[1]) for name, cells in rows("Assumptions").items()} == {
        field.name: ("-" if field.default is None else f"{field.default:g}", unit_of(field.name))
        for field in fields(Assumptions)
    }

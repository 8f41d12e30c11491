"""docs/plan.md lists every GPU and every assumption, with the figures that plans use."""

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


def test_every_assumption_is_listed_with_its_default_and_unit() -> None:
    listed = {name: (cells[0], cells[1]) for name, cells in rows("Assumptions").items()}
    known = {
        field.name: ("-" if field.default is None else f"{field.default:g}", unit_of(field.name))
        for field in fields(Assumptions)
    }
    assert listed == known


def test_every_gpu_is_listed_with_its_figures() -> None:
    listed = {name: [float(cell) for cell in cells[:4]] for name, cells in rows("GPUs").items()}
    known = {
        name: [
            float(f"{figure:g}")
            for figure in (
                gpu.memory_bytes / 2**30,
                gpu.flops / 1e12,
                gpu.memory_bytes_per_second / 1e9,
                gpu.node_bytes_per_second / 1e9,
            )
        ]
        for name, gpu in GPUS.items()
    }
    assert listed == known


def test_every_flag_is_listed() -> None:
    asked = vars(parse(["plan", "recipe.yaml"]))
    flags = {name for name in asked if name not in ("command", "recipe", "overrides")}
    assert {re.match(r"--(\w+)", text).group(1) for text in rows("Flags")} == flags  # type: ignore[union-attr]

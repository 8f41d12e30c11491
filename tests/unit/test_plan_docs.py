"""docs/plan.md lists every GPU and every assumption, with the figures that plans use, and shows what is printed."""

import io
import re
from dataclasses import fields
from pathlib import Path

from rich.console import Console

from megagrpo.cli import parse
from megagrpo.plan.assumptions import Assumptions
from megagrpo.plan.machines import GPUS
from megagrpo.plan.parameters import known_models
from megagrpo.plan.plan import plan_of, unit_of
from megagrpo.plan.search import search_for
from megagrpo.plan.show.terminal import draw
from megagrpo.recipe.load import load
from megagrpo.weights.families import read_architecture

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")


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


def test_examples_show_what_is_printed() -> None:
    recipe = load(ROOT / "yaml_recipes" / "grpo_70b.yaml").recipe
    planned = plan_of(recipe, read_architecture(known_models()[recipe.model.path]))
    printed = io.StringIO()
    draw(planned, search_for(planned, None), Console(file=printed, width=80, highlight=False))
    text = re.sub(r" +$", "", printed.getvalue(), flags=re.MULTILINE)
    examples = re.findall(r"```console\n\$ megagrpo plan yaml_recipes/grpo_70b.yaml.*\n…\n([^…]+)…\n```", DOCS)
    assert len(examples) == 2
    for example in examples:
        assert example in text

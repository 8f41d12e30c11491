"""docs/scaling.md holds what benchmarks/scaling.py prints."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_tables_are_those_of_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    scaling = importlib.import_module("scaling")
    written = (ROOT / "docs/scaling.md").read_text().splitlines()
    for name, size in scaling.SIZES.items():
        assert f"### {name}: {size.model} on {size.gpu}" in written
        assert all(any(line.startswith(f"| {gpus:,} |") for line in written) for gpus in size.gpus)
    for name, gpus in (("8B", 8), ("70B", 16)):
        assert set(scaling.table(name, (gpus,))) <= set(written)

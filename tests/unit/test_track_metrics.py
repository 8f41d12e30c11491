"""The table of metrics and the page made from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from megagrpo.track.metrics import METRICS, as_markdown, undocumented

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_page_is_what_the_table_says() -> None:
    assert (DOCS / "metrics.md").read_text(encoding="utf-8") == as_markdown(), (
        "run python -m megagrpo.track.metrics > docs/metrics.md"
    )


def test_names_are_unique() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    "name", ["reward/mean", "reward/gsm8k", "eval/mean@1", "eval/adder/pass@16", "seconds/weight_sync", "grad_norm"]
)
def test_documented_names_are_known(name: str) -> None:
    assert undocumented([name]) == []


@pytest.mark.parametrize("name", ["rewards/mean", "grad_norms", "eval/mean", "eval/best@4", "seconds/", "xgrad_norm"])
def test_other_names_are_not(name: str) -> None:
    assert undocumented(["reward/mean", name]) == [name]

"""The table of layouts in which ranks are tested covers every pair of factors that may occur together."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

from megagrpo.layout.parallel import ParallelLayout, stage_problems
from tests.distributed.layouts import KINDS, ROWS, Row

AXES = ("tensor", "pipeline", "virtual_pipeline", "context", "expert", "expert_tensor", "data")
UNEQUAL = {"first_stage_layers": 4}


def pairs(row: Row) -> set[frozenset[Any]]:
    layout, tied = row.layout, row.family == "qwen2_tied"
    factors = {axis: getattr(layout, axis) > 1 for axis in AXES} | {
        "unequal": bool(dict(layout.stage_lengths())),
        "distributed": row.distributed_optimizer,
        "dtype": row.dtype,
        "tied": tied,
        "kind": row.kind,
    }
    if row.kind == "dense":  # no experts to split
        del factors["expert"], factors["expert_tensor"]
    return {frozenset(pair) for pair in combinations(factors.items(), 2)}


def possible() -> list[Row]:
    """Lists the layouts that recipes allow: experts that are not shared out are split as tensor ranks do."""
    rows = []
    for sizes in product((1, 2), repeat=len(AXES)):
        for lengths, family in product(({}, UNEQUAL), ("qwen2_tied", "qwen3", "qwen3_moe", "deepseek_v3")):
            layout = ParallelLayout(**dict(zip(AXES, sizes, strict=True)), **lengths)
            experts = KINDS[family] != "dense"
            if layout.ranks > 8 or layout.expert_tensor > layout.tensor or layout.problems():
                continue
            if (not experts and layout.expert * layout.expert_tensor > 1) or (
                experts and layout.expert == 1 and layout.expert_tensor != layout.tensor
            ):
                continue
            rows += [Row(layout, family, *rest) for rest in product(("float32", "bfloat16"), (False, True))]
    return rows


def test_every_pair_of_factors_that_may_occur_together_does() -> None:
    wanted = {pair for row in possible() for pair in pairs(row)}
    found = {pair for row in ROWS.values() for pair in pairs(row)}
    assert sorted(map(sorted_pair, wanted - found)) == []


def test_every_row_is_possible() -> None:
    for name, row in ROWS.items():
        assert row.layout.problems() == [], name
        assert stage_problems(row.layers, row.layout) == [], name
        assert row.layout.ranks <= 8, name


def sorted_pair(pair: frozenset[Any]) -> str:
    return " and ".join(sorted(f"{factor}={value}" for factor, value in pair))

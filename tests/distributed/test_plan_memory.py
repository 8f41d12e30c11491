"""Planned bytes of parameters, gradients, optimizer, reference and critic against those that real ranks hold: equal,
but for the padding of the distributed optimizer."""

from __future__ import annotations

from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest

from megagrpo.layout.parallel import ParallelLayout
from megagrpo.plan.case import A_CPU, Case
from megagrpo.plan.memory import model_parts
from megagrpo.recipe.schema import Recipe
from megagrpo.weights.families import read_architecture
from tests.distributed import memory_ranks
from tests.distributed.conftest import Tiny
from tests.distributed.layouts import ROWS, soak
from tests.distributed.step_case import make_recipe
from tests.rank_group import run_ranks
from tests.tiny_models import USUAL_FAMILIES

TOLERANCE = 0.002
NUMBERS = [(dtype, distributed) for dtype in ("float32", "bfloat16") for distributed in (False, True)]


@pytest.mark.parametrize(
    ("family", "ranks", "in_turn"),
    [
        ("qwen2_tied", 4, True),
        ("deepseek_v3", 4, True),
        pytest.param("mixtral", 4, False, marks=pytest.mark.long),
        *soak(*((family, 4, False) for family in USUAL_FAMILIES if family != "mixtral")),
        *soak(*((family, 8, False) for family in USUAL_FAMILIES)),
    ],
)
def test_planned_bytes_are_those_of_real_ranks(family: str, ranks: int, in_turn: bool, tiny: Tiny) -> None:
    """Every layout with one dtype and one kind of optimizer in turn, or with two of each."""
    layouts, both = layouts_of(family, ranks), (NUMBERS[0], NUMBERS[-1])
    chosen = zip(layouts, cycle(reversed(NUMBERS)), strict=False) if in_turn else product(layouts, both)
    check(tiny(family), [recipe_of(layout, dtype, distributed_optimizer=own) for layout, (dtype, own) in chosen])


def test_planned_bytes_of_adapters(tiny: Tiny) -> None:
    """Adapters on some of the matrices of a fused layer, and on experts."""
    some: dict[str, Any] = {"rank": 3, "targets": ["q_proj", "v_proj", "down_proj"]}
    layout = ParallelLayout(tensor=2, pipeline=2, expert_tensor=2)
    check(
        tiny("qwen2_tied"),
        [recipe_of(layout, dtype, lora=some, distributed_optimizer=distributed) for dtype, distributed in NUMBERS],
    )
    kl = {"kl": {"coefficient": 0.1}}
    check(
        tiny("qwen3_moe"),
        [
            recipe_of(ParallelLayout(data=4, expert=expert), dtype, kl, lora={"rank": 5}, distributed_optimizer=True)
            for dtype in ("float32", "bfloat16")
            for expert in (1, 2)
        ],
    )


def test_planned_bytes_of_a_reference_and_a_critic(tiny: Tiny) -> None:
    """The critic of a model with tied embeddings has a head of its own, float32 also in a bfloat16 model."""
    algorithm: dict[str, Any] = {
        "advantage": {"name": "gae"},
        "critic": {},
        "kl": {"coefficient": 0.1},
        "reference": {"update_every_steps": 2, "share": 0.5},
    }
    layout = ParallelLayout(pipeline=2, data=2)
    recipes = [recipe_of(layout, dtype, algorithm, distributed_optimizer=distributed) for dtype, distributed in NUMBERS]
    check(tiny("qwen2_tied"), recipes)


@pytest.mark.parametrize("family", [*soak("qwen2_tied"), "qwen3_moe"])
def test_planned_bytes_of_muon(family: str, tiny: Tiny) -> None:
    """Its matrices belong to one data rank each, which leaves buffers with room that is not used."""
    layouts = [
        ParallelLayout(data=4),
        ParallelLayout(tensor=2, data=2, expert_tensor=2),
        ParallelLayout(pipeline=2, data=2),
    ]
    layouts += [ParallelLayout(data=4, expert=2)] if family == "qwen3_moe" else []
    algorithm = {"advantage": {"name": "gae"}, "critic": {}} if family == "qwen2_tied" else None
    own = {"optimizer": {"kind": "muon"}}
    wanted = product(layouts, NUMBERS[:1] + NUMBERS[-1:] if family == "qwen3_moe" else NUMBERS)
    check(
        tiny(family), [recipe_of(at, dtype, algorithm, distributed_optimizer=of, **own) for at, (dtype, of) in wanted]
    )


def layouts_of(family: str, ranks: int) -> list[ParallelLayout]:
    return list(dict.fromkeys(row.of(family) for row in ROWS.values() if row.layout.ranks == ranks and not row.changes))


def recipe_of(layout: ParallelLayout, dtype: str, algorithm: dict[str, Any] | None = None, **train: Any) -> Recipe:
    return make_recipe(
        layout, model={"path": "unused", "dtype": dtype}, train=train, algorithm=algorithm or {"kl": {"coefficient": 0}}
    )


def check(directory: Path, recipes: list[Recipe]) -> None:
    """The fullest rank of each stage has what is planned, and the padding of its buffers."""
    layout = recipes[0].train.layout.parallel()
    by_rank: list[list[dict[str, int]]] = run_ranks(
        layout.ranks, memory_ranks.measure_all, [(directory, recipe) for recipe in recipes]
    )
    architecture = read_architecture(directory)
    for index, recipe in enumerate(recipes):
        layout = recipe.train.layout.parallel()
        per_stage = layout.ranks // layout.pipeline
        for stage in range(layout.pipeline):
            ranks = [held[index] for held in by_rank[stage * per_stage : (stage + 1) * per_stage]]
            planned = model_parts(Case(recipe, architecture, A_CPU), stage)
            told = f"stage {stage} of {layout}, {recipe.model.dtype}: {planned}, {ranks}"
            assert all(held.keys() == planned.keys() for held in ranks), told
            for name, size in planned.items():
                fullest = max(held[name] for held in ranks)
                assert size * (1 - TOLERANCE) < fullest < size * (1 + tolerance_of(recipe)), (name, told)


def tolerance_of(recipe: Recipe) -> float:
    """The distributed optimizer pads parameters to 64 elements and buckets to 128 for each data rank, which a plan does
    not count: nothing to a real model, 6 % of these tiny ones and 20 % of their adapters."""
    if not recipe.train.distributed_optimizer:
        return TOLERANCE
    return 0.2 if recipe.train.lora else 0.06

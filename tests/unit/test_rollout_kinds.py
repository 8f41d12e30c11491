"""An engine is a kind: added by one file and one line, planned and trained with. No room asks for its name."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megagrpo.preflight import machine
from megagrpo.preflight.machine import engine_problems
from megagrpo.recipe.schema import EngineLayoutConfig
from megagrpo.rollout.kinds import ENGINES
from tests import plans
from tests.tiny_run import make_run, recipe_with
from tests.toy_engine import MEMORY, Toy
from tests.weights_oracle import moe_architecture

PACKAGE = Path(__file__).resolve().parents[2] / "megagrpo"
MAY_NAME_ENGINES = ("rollout", "importing", "doctor")


def test_a_kind_is_planned_with_the_memory_that_it_states_and_refused_by_its_side(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(ENGINES, "toy", Toy())
    given = plans.recipe({"rollout.layout": None, "rollout.sglang": None}, model__path=plans.LLAMA_8B)
    rollout = given.rollout.model_copy(update={"engine": "toy", "engines": 2})
    plan = plans.planned(given.model_copy(update={"rollout": rollout}))
    held = {part.name: part for kind in plan.memory for phase in kind.phases for part in phase.parts}
    assert [held[f"engine {name}"].bytes for name in ("weights", "cache")] == [MEMORY.weights, MEMORY.cache]
    assert held["engine cache"].lowered_by == MEMORY.cache_lowered_by
    assert plan.time is not None
    assert "2 toy engines" in plan.summary["ranks"]
    assert list(engine_problems(plan.grpo, plan.architecture, plan_only=True)) == []
    split = rollout.model_copy(update={"layout": EngineLayoutConfig(tensor=2)})
    (problem,) = engine_problems(given.model_copy(update={"rollout": split}), plan.architecture, plan_only=True)
    assert "toy" in problem.where


def test_an_embedded_engine_is_not_quantised_for_families_that_are_not_all_in_blocks() -> None:
    quantized = recipe_with("rollout.quantization=fp8")
    assert not list(engine_problems(quantized, moe_architecture(), plan_only=True))
    (problem,) = engine_problems(quantized, moe_architecture(family="gpt_oss"), plan_only=True)
    assert "not all in blocks" in str(problem)


@pytest.mark.timeout(300)
def test_a_kind_that_is_added_by_one_line_trains(tmp_path: Path) -> None:
    recipe = make_run(tmp_path)
    words = ["train", str(recipe), "rollout.engine=toy", "rollout.engines=2", "track.mlflow=null", "cluster.device=cpu"]
    named = "from megagrpo.rollout import kinds; kinds.ENGINES['toy'] = kinds.EngineKind()"  # recipes read it
    added = f"{named}; from tests.toy_engine import Toy; kinds.ENGINES['toy'] = Toy()"
    run = "from pathlib import Path; from tests.loop.without_ray import run"
    program = f"{added}; {run}; run({words!r}, Path({str(tmp_path / 'output')!r}))"
    done = subprocess.run([sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": str(PACKAGE.parent)})
    assert done.returncode == 0, (tmp_path / "output").read_text()
    lines = (tmp_path / "runs" / "tiny" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["weights/version"] for line in lines] == [1, 2]


def test_a_deterministic_embedded_engine_decodes_one_request_at_once() -> None:
    embedded = recipe_with("rollout.requests_at_once=8")
    assert embedded.rollout.kind.requests_at_once(embedded) == 8
    deterministic = recipe_with("rollout.requests_at_once=8", "deterministic=true")
    assert deterministic.rollout.kind.requests_at_once(deterministic) == 1


def test_packages_of_an_engines_extra_are_checked_unless_another_interpreter_has_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []
    monkeypatch.setattr(machine, "package_findings", lambda *, extras: asked.append(set(extras)) or ())
    for override in ("rollout.engine=transformers", "rollout.engine=sglang", "rollout.sglang={python: other}"):
        list(machine.package_problems(recipe_with("rollout.engine=sglang", override)))
    assert ["sglang" in extras for extras in asked] == [False, True, False]


def names_compared(tree: ast.AST) -> Iterator[int]:
    """Lines that compare something with an engine's name, or look the name up."""
    for node in ast.walk(tree):
        sides: list[ast.AST | None] = []
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
        elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Dict):
            sides = list(node.value.keys)
        elif isinstance(node, ast.MatchValue):
            sides = [node.value]
        for side in sides:
            parts = side.elts if isinstance(side, ast.Tuple | ast.List | ast.Set) else [side]
            if any(isinstance(part, ast.Constant) and part.value in ENGINES for part in parts):
                yield node.lineno


def test_no_other_room_compares_an_engines_name() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).parts[0] not in MAY_NAME_ENGINES
        for line in names_compared(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert found == []
    wrong = ('x.engine == "sglang"', '{"external": 1}[x]', 'x in ("transformers", "sglang")')
    assert all(list(names_compared(ast.parse(text))) for text in wrong)

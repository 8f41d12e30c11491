"""An engine is a kind: added in one line, planned and sampled from with no other change. No room asks for its name."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import ray

from megagrpo.cluster import engines
from megagrpo.cluster.rollouts import Rollouts
from megagrpo.preflight import machine
from megagrpo.preflight.machine import engine_problems
from megagrpo.recipe.schema import Recipe
from megagrpo.recipe.schema.rollout import RolloutConfig
from megagrpo.rollout.engine import Done, Engine, EngineSpec, SoFar
from megagrpo.rollout.kinds import ENGINES, EngineKind
from megagrpo.types import Prompt, Request, Sample
from tests import plans
from tests.tiny_run import recipe_with

PACKAGE = Path(__file__).resolve().parents[2] / "megagrpo"
MAY_NAME_ENGINES = ("rollout", "importing", "doctor")


class Toy(EngineKind):
    """Answers a prompt with its tokens, backwards."""

    def engine(self, spec: EngineSpec, server: Any) -> Engine:
        def begin(requests: Mapping[int, Request], done: Done) -> None:
            for ticket, at in requests.items():
                tokens, zeros = np.array(at.tokens[::-1], np.int32), np.zeros(len(at.tokens), np.int32)
                done(ticket, Sample(at.prompt_id, at.index, tokens, zeros.astype(np.float32), zeros, "stop", spec.name))

        engine: Any = SimpleNamespace(begin=begin, so_far=lambda: SoFar.of({}), rests=lambda: True, close=lambda: None)
        return engine


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES, "toy", Toy())


def with_toys(recipe: Recipe) -> Recipe:
    rollout = recipe.rollout.model_copy(update={"engine": "toy", "engines": 2})
    return recipe.model_copy(update={"rollout": rollout})


class Here:
    """An actor in this process, whose calls run one by one in a thread: with `remote` and `options`, as Ray's."""

    def __init__(self, actor_class: Any) -> None:
        self.actor, self.calls = actor_class.__ray_metadata__.modified_class(), ThreadPoolExecutor(1)

    def __getattr__(self, name: str) -> Any:
        def remote(*given: Any) -> Any:
            answer = self.calls.submit(getattr(self.actor, name), *given)
            if name != "finished":
                return answer
            parts = [self.calls.submit(lambda at=at: answer.result()[at]) for at in (0, 1)]  # type: ignore[misc]
            return tuple(parts)

        return SimpleNamespace(remote=remote, options=lambda **given: SimpleNamespace(remote=remote))


def wait_here(refs: Sequence[Future[Any]], num_returns: int = 1, timeout: float | None = None) -> tuple[Any, Any]:
    found = wait(refs, timeout, "FIRST_COMPLETED" if num_returns < len(refs) else "ALL_COMPLETED")
    return list(found.done)[:num_returns], [ref for ref in refs if ref not in list(found.done)[:num_returns]]


@pytest.mark.usefixtures("toy")
def test_a_kind_is_sampled_from_as_the_driver_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "prepare_process", lambda *given: None)
    monkeypatch.setattr(ray, "wait", wait_here)
    monkeypatch.setattr(ray, "get", lambda ref, timeout=None: ref.result(timeout))
    monkeypatch.setattr(ray, "kill", lambda actor: None)
    runtime: Any = SimpleNamespace(
        device="cpu",
        devices=SimpleNamespace(engine_share=1.0, node_bundles=lambda engine: ()),
        places=(),
        places_of=lambda bundles: (),
        shares_gpus=False,
        start=lambda actor_class, bundles, share: Here(actor_class),
        watch=SimpleNamespace(check=lambda: None),
    )
    recipe = with_toys(recipe_with())
    actors = engines.EngineActors(runtime, recipe, Path("model"), Path("model"), keeps_weights=True)
    rollouts = Rollouts(actors)
    try:
        rollouts.wait_until_ready()
        rollouts.serve_all()
        prompts = [Prompt("a", (1, 2, 3), "sums", "2"), Prompt("b", (4, 5), "sums", "2")]
        groups = rollouts.generate(prompts, 1)
    finally:
        rollouts.close()
    assert [group.samples[0].tokens.tolist() for group in groups] == [[3, 2, 1], [5, 4]]
    assert {len(group.samples) for group in groups} == {recipe.rollout.samples_per_prompt}
    assert {sample.text for group in groups for sample in group.samples} == {"engine 0", "engine 1"}


@pytest.mark.usefixtures("toy")
def test_a_kind_is_planned() -> None:
    values = {"rollout.engine": "transformers", "rollout.layout": None, "rollout.sglang": None}
    plan = plans.planned(with_toys(plans.recipe(values, model__path=plans.LLAMA_8B)))
    parts = {part.name for kind in plan.memory for phase in kind.phases for part in phase.parts}
    assert {"engine weights", "engine cache"} <= parts
    assert plan.time is not None
    assert "2 toy engines" in plan.summary["ranks"]
    assert list(engine_problems(plan.grpo, plan.architecture, plan_only=True)) == []


def test_every_engine_that_a_recipe_may_name_has_a_kind() -> None:
    assert list(get_args(RolloutConfig.model_fields["engine"].annotation)) == list(ENGINES)


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

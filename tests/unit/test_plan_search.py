"""Searches for layouts: legal, fitting, no slower than any other choice, and of few estimates."""

import io
import json
import shlex
from typing import Any

import pytest
from rich.console import Console

from megagrpo.errors import RecipeError
from megagrpo.plan import search as searching
from megagrpo.plan.parameters import known_models
from megagrpo.plan.plan import lacking_bytes
from megagrpo.plan.schedules import ASYNC, steady_seconds
from megagrpo.plan.search import SPARE, SPLITS_SHOWN, legal, search
from megagrpo.plan.show.as_json import plan_json
from megagrpo.plan.show.page import page
from megagrpo.plan.show.terminal import draw
from megagrpo.recipe.defaults import plan_devices
from megagrpo.recipe.load import Places, apply_overrides
from megagrpo.recipe.model_rules import model_problems
from megagrpo.recipe.schema import Recipe
from megagrpo.section import broken_rules, changed
from megagrpo.weights.blocks import Shapes, in_blocks
from megagrpo.weights.boxes import Manifest
from megagrpo.weights.families import read_architecture
from megagrpo.weights.sides import sglang
from megagrpo.weights.sides.sglang import split_problems
from tests.plans import H100, LLAMA_8B, ON_2048, QWEN_30B, architecture, plan, planned, recipe, searched

SMALL: dict[str, Any] = {
    "model__path": LLAMA_8B,
    "train__layout": {"tensor": 2},
    "rollout__layout": {"tensor": 1},
    "rollout__engines": 2,
    "cluster__gpu": "H200",
}


def applied(overrides: tuple[str, ...], changes: dict[str, Any]) -> Recipe:
    """Applies the changes as the command line does."""
    tree, _, problems = apply_overrides(recipe(changes).model_dump(), Places("recipe"), overrides)
    assert not problems
    return Recipe.model_validate(tree)


@pytest.mark.parametrize(
    ("changes", "gpus"),
    [
        pytest.param({}, 128, marks=pytest.mark.soak),
        ({"model.path": QWEN_30B, "train.offload": []}, 16),
        pytest.param({"algorithm.kl.coefficient": 0.001}, 64, marks=pytest.mark.soak),
    ],
)
def test_choices_are_ready_overrides_that_obey_every_rule_and_fit(changes: dict[str, Any], gpus: int) -> None:
    of = recipe(changes)
    found = searched(of, gpus)
    assert found.choices
    assert found.nearest is None
    assert 10 < found.legal < found.estimated < 1500  # milliseconds each
    seconds = [choice.time.seconds for choice in found.choices]
    assert seconds == sorted(seconds)
    model = architecture(of)
    for choice in (*found.choices, *found.asynchronous):
        chosen = applied(tuple(shlex.split(choice.words)), changes)
        assert not broken_rules(chosen)
        assert not model_problems(chosen, model)
        assert not split_problems(model, chosen.rollout.layout, "cuda")
        assert plan_devices(chosen, "cuda").bundles == gpus
        again = planned(chosen)
        assert (again.memory, again.time, again.lacking_bytes) == (choice.memory, choice.time, choice.lacking_bytes)
        assert lacking_bytes(again.memory, H100.gpu.memory_bytes, SPARE) == 0
        assert chosen.rollout.engine in choice.reason or "engine" in choice.reason


def test_splits_between_ranks_and_engines_are_ranked_by_their_asynchronous_step() -> None:
    found = searched(recipe({}), 128)
    assert len(found.asynchronous) == SPLITS_SHOWN
    seconds = [split.schedule.seconds for split in found.asynchronous]
    assert seconds == sorted(seconds)
    assert seconds[0] < 0.8 * found.choices[0].time.seconds
    for split in found.asynchronous:
        assert "cluster.placement=disaggregated" in split.overrides
        chosen = planned(applied(split.overrides, {}))
        again = {time.name: time for time in chosen.schedules}[split.schedule.name]
        assert again == split.schedule
        bound = steady_seconds(chosen, split.time, ASYNC)
        assert bound < 1.05 * split.schedule.seconds < 1.3 * bound
    assert len({split.overrides for split in found.asynchronous}) == SPLITS_SHOWN
    whole = plan({})
    told = json.loads(plan_json(whole, found))["search"]["asynchronous"]
    assert [split["schedule"]["seconds"] for split in told] == seconds
    stream = io.StringIO()
    draw(whole, found, Console(file=stream, width=80, highlight=False))
    for text in (stream.getvalue(), page(whole, found)):
        assert f"sample all the time ({split.schedule.name})" in text
        assert split.words in text


@pytest.mark.parametrize("kind", ["async", pytest.param("one_step_off", marks=pytest.mark.soak)])
def test_layouts_are_found_for_a_recipe_whose_engines_sample_during_training(kind: str) -> None:
    changes = {**SMALL, "cluster.placement": "disaggregated", "schedule": {"kind": kind}}
    changes |= {"train.offload": [], "rollout.sglang": {}}
    found = searched(recipe(changes), 4)
    assert found.choices
    assert found.asynchronous
    for choice in (*found.choices, *found.asynchronous):
        assert not broken_rules(applied(tuple(shlex.split(choice.words)), changes))


def test_a_repeatable_run_is_not_told_to_sample_all_the_time() -> None:
    found = searched(recipe({**SMALL, "deterministic": True}), 4)
    assert any("cluster.placement=disaggregated" in choice.overrides for choice in found.choices)
    assert not found.asynchronous


def test_the_best_choice_is_that_of_all_choices() -> None:
    of = recipe(SMALL, rollout__prompts_per_step=8)  # each estimate plays all responses of its steps
    case = planned(of)
    every = (
        searching.placed(of, {**layout, **saving, **engine}, colocated=gpus == 2)
        for gpus in (2, 1)
        for layout in searching.layouts(case, gpus)
        for saving in searching.savings(case, layout)
        for engine in searching.engines(case, gpus, colocated=gpus == 2)
    )
    best = float("inf")
    for values in every:
        candidate = planned(changed(of, values))
        if legal(candidate) and lacking_bytes(candidate.memory, candidate.card_bytes, SPARE) == 0:
            best = min(best, candidate.time.seconds)
    assert searched(of, 2).choices[0].time.seconds == pytest.approx(best)


def test_layouts_fit_a_critic_of_its_own() -> None:
    of = recipe(train__layout={"tensor": 4}, algorithm__critic={"path": "unused"}, algorithm__advantage={"name": "gae"})
    critic = read_architecture(known_models()["Qwen/Qwen2.5-0.5B-Instruct"])  # 14 heads
    with_critic = planned(of, critic=critic)
    assert not legal(with_critic)
    found = search(with_critic, 64)
    assert found.choices
    for choice in found.choices:
        assert "train.layout.tensor=2" in choice.overrides or "train.layout.tensor=1" in choice.overrides


def test_blocks_of_quantised_engines_are_made_once_for_each_size(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def counted(manifest: Manifest, shapes: Shapes) -> Manifest:
        made.append(str(manifest.storages))
        return in_blocks(manifest, shapes)

    monkeypatch.setattr(sglang, "in_blocks", counted)
    found = searched(recipe({**SMALL, "rollout.quantization": "fp8"}), 4)
    assert found.choices
    assert len(made) == len(set(made)) < 5 < found.estimated / 10


def test_searches_need_a_kind_of_gpu() -> None:
    for changes, fix in (({"cluster.gpu": None}, "cluster.gpu=H100"), ({"cluster.device": "cpu"}, "device=cuda")):
        with pytest.raises(RecipeError, match=fix):
            search(plan(changes))


def test_engines_apart_have_whole_nodes_and_no_offload() -> None:
    of = recipe()
    assert searching.engine_gpus(of, 128) == [16, 32, 48, 64, 80, 96, 112]
    assert searching.engine_gpus(of, 8) == list(range(1, 8))
    given = {"train.offload": ["optimizer"], "rollout.sglang.enable_memory_saver": True}
    values = searching.placed(of, given, colocated=False)
    assert values["train.offload"] == []
    assert "rollout.sglang.enable_memory_saver" not in values


def test_the_last_of_uneven_stages_is_the_shortest() -> None:
    of = recipe({"model.path": ON_2048["model.path"]})
    lengths = {
        values["train.layout.pipeline"]: values["train.layout.last_stage_layers"]
        for values in searching.layouts(planned(of), 128)
        if values["train.layout.virtual_pipeline"] == 1
    }
    assert (lengths[1], lengths[2], lengths[4], lengths[8], lengths[16], lengths[32]) == (None, 30, 13, 5, 1, None)

"""The recipes in yaml_recipes/ are complete, planned for the machines that they name, and say how to run them."""

from __future__ import annotations

import json
import re
import shlex
from functools import cache
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from megagrpo.errors import MegagrpoError
from megagrpo.megatron import config
from megagrpo.plan.advice import impossible, unwise
from megagrpo.plan.case import GPUS
from megagrpo.plan.parameters import known_models
from megagrpo.preflight.preflight import preflight
from megagrpo.recipe.defaults import plan_devices
from megagrpo.recipe.load import LoadedRecipe, load, load_any
from megagrpo.recipe.schema import AnyRecipe, Recipe
from megagrpo.recipe.yaml12 import parse
from megagrpo.rollout.sglang import arguments
from megagrpo.section import broken_rules
from tests.plans import known_model, planned
from tools.recipe_docs import YAML_RECIPES, first_line, json_schema

FILES = sorted(YAML_RECIPES.glob("*.yaml"))
ON_GPUS = [file for file in FILES if not file.stem.endswith("_cpu")]
NODES = {
    "code_agent_qwen3_30b_a3b_2x8": 2,
    "deepseek_v3_671b": 16,
    "disaggregated_qwen3_32b_4x8": 4,
    "distill_qwen3_4b": 1,
    "grpo_70b": 16,
    "gsm8k_qwen2.5_0.5b_1gpu": 1,
    "long_context_qwen3_8b_2x8": 2,
    "lora_qwen3_8b_1gpu": 1,
    "math_glm4.5_air_4x8": 4,
    "math_gpt_oss_20b_8gpu": 1,
    "math_qwen3.5_35b_a3b_2x8": 2,
    "math_qwen3_next_80b_a3b_4x8": 4,
    "math_qwen3_30b_a3b_2x8": 2,
    "math_qwen3_32b_4x8": 4,
    "math_qwen3_32b_8b200": 1,
    "math_qwen3_32b_8h200": 1,
    "math_qwen3_8b_8a100": 1,
    "math_qwen3_8b_8gpu": 1,
    "math_qwen3_8b_vllm_8gpu": 1,
    "search_qwen3_8b_8gpu": 1,
    "swe_qwen3_32b_4x8": 4,
}


@cache
def loaded(file: Path) -> LoadedRecipe[AnyRecipe]:
    return load_any(file)


@cache
def schema_of(kind: type[AnyRecipe]) -> Any:
    schema = json.loads(json_schema(kind))
    made = jsonschema.validators.validator_for(schema)
    made.check_schema(schema)
    return made(schema)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with neither data, models nor SGLang, but with this directory and the examples."""
    for directory in (YAML_RECIPES, YAML_RECIPES.parent / "examples"):
        (tmp_path / directory.name).symlink_to(directory)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("megagrpo.preflight.model.cached_directory", lambda path: None)
    monkeypatch.setattr("megagrpo.rollout.arguments.asked", lambda *asked: {"environment": "", "problems": []})


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_recipe_loads_keeps_the_rules_and_fits_the_schema_that_it_names(file: Path) -> None:
    recipe, text = loaded(file).recipe, file.read_text(encoding="utf-8")
    assert recipe.name == file.stem
    assert not broken_rules(recipe)
    assert text.splitlines()[0] == first_line(type(recipe))
    schema_of(type(recipe)).validate(parse(text, str).tree)


@pytest.mark.parametrize("file", ON_GPUS, ids=lambda file: file.stem)
def test_a_recipe_is_planned_on_a_machine_that_has_nothing(file: Path, elsewhere: None) -> None:
    ready = preflight(loaded(file), plan_only=True)
    assert ready.recipe.model.path in known_models()
    teachers = [f"the tokenizer of teachers.{name}" for name in ready.teachers]
    missing = [f"the tokenizer of {ready.recipe.model.path}", "train.parquet", "test.parquet", *teachers]
    missing.append("this machine's devices")
    assert all(what in said for what, said in zip(missing, ready.unchecked, strict=True))


@pytest.mark.parametrize("file", [file for file in FILES if file not in ON_GPUS], ids=lambda file: file.stem)
def test_a_demo_recipe_without_its_model_names_the_target_that_makes_it(file: Path, elsewhere: None) -> None:
    with pytest.raises(MegagrpoError) as refused:
        preflight(loaded(file), plan_only=True)
    (fix,) = (problem.fix for problem in refused.value.problems if "model.path" in problem.where)
    (target,) = re.findall("^make (.*) makes it$", fix)
    assert re.search(f"^{target}:", (YAML_RECIPES.parent / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


def test_fusions_of_experts_are_planned_for_gpus_and_refused_without_transformer_engine(
    elsewhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "find_spec", lambda package: None)
    recipe = loaded(YAML_RECIPES / "math_qwen3_30b_a3b_2x8.yaml")
    assert preflight(recipe, plan_only=True).recipe.train.megatron  # moe_act and grouped products: only on GPUs
    refused = r"moe_permute_fusion(?s:.)*transformer_engine, which is not installed"
    model = known_model(recipe.recipe.model.path)
    with pytest.raises(MegagrpoError, match=refused):
        config.transformer_config(model, recipe.recipe.train, torch.float32, "cpu")


@pytest.mark.parametrize("file", ON_GPUS, ids=lambda file: file.stem)
def test_a_recipe_fills_whole_nodes_and_no_server_process_spans_two(file: Path) -> None:
    recipe = loaded(file).recipe
    assert recipe.cluster.gpu in GPUS
    devices, node = plan_devices(recipe, "cuda"), recipe.cluster.gpus_per_node
    assert devices.bundles == node * NODES[recipe.name]
    for engine in range(len(devices.bundles_of_engine)):
        for on_node in devices.node_bundles(engine):
            assert len({device // node for device in on_node}) == 1
    assert recipe.cluster.start_timeout_seconds >= 900, "engines compile kernels at their first start"


@pytest.mark.parametrize("file", ON_GPUS, ids=lambda file: file.stem)
def test_a_recipe_fits_its_gpus_with_room_to_spare_and_is_not_unwise(file: Path, elsewhere: None) -> None:
    assert_fits(loaded(file).recipe)


def assert_fits(recipe: AnyRecipe) -> None:
    assert isinstance(recipe, Recipe)
    plan = planned(recipe)
    assert impossible(plan) == unwise(plan) == ()
    card = GPUS[str(recipe.cluster.gpu)].memory_bytes
    assert max(kind.fullest.bytes for kind in plan.memory) < 0.95 * card


def test_the_changes_with_which_the_largest_recipe_runs_elsewhere_fit_the_nodes_that_it_names(elsewhere: None) -> None:
    file = YAML_RECIPES / "deepseek_v3_671b.yaml"
    changes = re.findall(r"takes (\d+) nodes.*\n((?:#   .+\n)+)", file.read_text(encoding="utf-8"))
    assert len(changes) == 2
    for nodes, lines in changes:
        recipe = load(file, shlex.split(lines.replace("\n#", "").lstrip("#"))).recipe
        assert plan_devices(recipe, "cuda").bundles == int(nodes) * recipe.cluster.gpus_per_node
        assert_fits(recipe)


@pytest.mark.parametrize("file", ON_GPUS, ids=lambda file: file.stem)
def test_a_recipe_says_how_to_prepare_plan_and_run_it(file: Path) -> None:
    header = file.read_text(encoding="utf-8").split("\nname:")[0]
    commands = re.findall(r"megagrpo (plan|train) yaml_recipes/(\S+)\.yaml", header)
    assert commands == [("plan", file.stem), ("train", file.stem)]
    recipe = loaded(file).recipe
    (output,) = re.findall(r"prepare .*--output (\S+)", header)
    data = [*recipe.data.train, *chain(*recipe.eval.files_of_sets().values())]
    assert {str(Path(entry.path).parent) for entry in data} == {output}


@pytest.mark.long
@pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed")
def test_the_installed_sglang_takes_the_arguments_of_every_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megagrpo.rollout.arguments.CHECK_SECONDS", 280.0)  # a busy machine is no reason to refuse
    recipes = [loaded(file).recipe for file in ON_GPUS]
    options: dict[str, object] = {}
    for recipe in recipes:
        assert isinstance(recipe, Recipe)
        options |= recipe.rollout.sglang.model_extra or {}
    assert options
    settings = recipes[0].rollout.sglang.model_validate(options)
    assert arguments.ARGUMENTS.problems(settings, "rollout.sglang", "rollout.engine", plan_only=False) == []

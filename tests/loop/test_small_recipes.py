"""Recipes that differ from a small one in a choice of the schema, or in many: `plan` and two steps of `train` agree on
whether they run."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from megagrpo.errors import EXIT_USER_ERROR
from megagrpo.recipe.schema import Recipe
from tests.loop import small_run
from tests.recipe_choices import Choices, base, changed, cover, is_valid
from tests.tiny_run import CHAT_TEMPLATE

OWN = """import numpy as np

def advantage(inputs, scale=1.0):
    return scale * (inputs.scores - np.nanmean(inputs.scores))

def loss(inputs, width=1.0):
    ratio = (inputs.logprobs - inputs.old_logprobs).exp()
    return -inputs.advantages * ratio + (ratio - 1).square() / width
"""
PROBLEM = re.compile(r"^ +(\S.*)\n +given:", re.MULTILINE)
DISAGGREGATED = {"cluster.placement": "disaggregated"}  # so that an engine may have more ranks than the trainer
ON_SGLANG = (
    {"rollout.sglang": {"disable_radix_cache": True}, "weights.pause": "in_place"},
    {"rollout.layout.tensor": 2, "rollout.stop_token_ids": [1], "weights.transfer": "disk"} | DISAGGREGATED,
    {"rollout.engines": 2, "rollout.requests_at_once": 1, "weights.transfer": "process_group"},
    {"rollout.temperature": 0.5, "rollout.timeout_seconds": 100.0, "deterministic": True},
)
"""Settings of a recipe that servers read, in few runs: a server takes half a minute to start."""
SLOW = r"mlflow|reasoning_gym|max_terms|Classifier|tensorboard|seconds|bfloat16|deterministic|profile|AgentConfig\."
REFUSED = r"enable_thinking|routing=\"replay\"|AgentConfig\.(tools|parser)|arguments left out|workers=0|bubblewrap"
"""For the sake of the template, the data or the machine: the schema allows them."""
NOT_TOGETHER = re.compile(rf"{SLOW}|{REFUSED}|dynamic_sampling|ground_truth=\[|=[\d.]+$")
"""Choices that no recipe of many has. With dynamic sampling an untrained model may never end a step."""


@pytest.fixture(scope="module")
def made(inputs: Path) -> Path:
    """Makes the files that recipes name, beside the small model and its data."""
    (inputs / "own.py").write_text(OWN)
    (inputs / "template.jinja").write_text(CHAT_TEMPLATE)
    model = AutoModelForSequenceClassification.from_pretrained(inputs / "model", num_labels=1)
    model.save_pretrained(inputs / "classifier")
    AutoTokenizer.from_pretrained(inputs / "model").save_pretrained(inputs / "classifier")
    return inputs


def in_one_process(recipe: dict[str, Any]) -> bool:
    if not is_valid(recipe):
        return True
    made = Recipe.model_validate(recipe)
    return made.train.layout.parallel().ranks == 1 and made.rollout.engine != "sglang"


def disagreement(inputs: Path, output: Path, recipe: Mapping[str, Any]) -> str | None:
    """Returns the difference between `plan` and `train` on a recipe. Empty: it runs, with finite metrics. None: both
    refuse it, and the run reports the plan's problems."""
    from tests.loop import without_ray  # imports Megatron, which takes seconds

    output.mkdir()
    file = output / "recipe.yaml"
    text = yaml.safe_dump(recipe, sort_keys=False)
    file.write_text(text.replace("{inputs}", str(inputs)).replace("{output}", str(output)))
    codes = [without_ray.command([command, str(file)], output / command) for command in ("plan", "train")]
    planned, trained = ((output / command).read_text() for command in ("plan", "train"))
    if codes == [EXIT_USER_ERROR] * 2:
        told = set(PROBLEM.findall(planned))
        return None if told and told <= set(PROBLEM.findall(trained)) else f"plan: {planned} train: {trained}"
    if codes != [0, 0] or "Traceback" in planned + trained:
        return f"plan: {codes[0]}, train: {codes[1]}, {trained[-2000:]}"
    (metrics,) = output.rglob("metrics.jsonl")
    by_step = small_run.metrics(metrics.parent)
    wrong = [name for entry in by_step.values() for name, value in entry.items() if not math.isfinite(value)]
    return f"{wrong} are not finite" if wrong else "" if 1 in by_step else f"no step: {trained}"


def disagreements(recipes: Mapping[str, dict[str, Any]], inputs: Path, output: Path) -> tuple[dict[str, str], set[str]]:
    """By recipe; and those that both refuse."""
    places = [output / f"{index}" for index in range(len(recipes))]
    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(recipes, pool.map(partial(disagreement, inputs), places, recipes.values()), strict=True))
    return {name: one for name, one in found.items() if one}, {name for name, one in found.items() if one is None}


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_plan_and_train_agree_on_recipes_of_many_choices(made: Path, tmp_path: Path) -> None:
    singles = {name: one for name, one in Choices().of(base()).items() if is_valid(one) and in_one_process(one)}
    named = {name: one for name, one in singles.items() if not NOT_TOGETHER.search(name)}
    rows = cover(base(), named, 20)
    assert {name for names, _ in rows for name in names} == named.keys()
    assert disagreements({"\n".join(names): recipe for names, recipe in rows}, made, tmp_path) == ({}, set())


@pytest.mark.long
def test_the_smallest_recipe_on_sglang_runs(made: Path, tmp_path: Path) -> None:
    """Without evaluation sets, among others."""
    assert disagreement(made, tmp_path / "minimal", on_sglang({})) == ""


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_servers_of_a_run_read_what_a_recipe_says_of_them(made: Path, tmp_path: Path) -> None:
    assert disagreements({str(one): on_sglang(one) for one in ON_SGLANG}, made, tmp_path) == ({}, set())


def on_sglang(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Adds fields without a default, and lengths that fit the model, for servers of the run's own."""
    own = base()
    rollout = {"engine": "sglang", "prompts_per_step": 4, "response_tokens_max": 8}
    own |= {"rollout": rollout, "eval": {}, "algorithm": {}, "checkpoint": {}, "seed": 0}
    return changed(own, changes)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_plan_and_train_agree_on_each_choice(made: Path, tmp_path: Path, ray: Mapping[str, str]) -> None:
    recipes = Choices().of(base())
    wrong, refused = disagreements({name: one for name, one in recipes.items() if in_one_process(one)}, made, tmp_path)
    assert wrong == {}
    assert [name for name in refused if is_valid(recipes[name]) and not re.search(REFUSED, name)] == []
    of_ranks = {name: one for name, one in recipes.items() if not in_one_process(one) and ".rollout" not in name}
    for name, one in of_ranks.items():
        text = yaml.safe_dump(one | {"name": "ranks"}).replace("{inputs}", str(made))
        file = tmp_path / "ranks.yaml"
        file.write_text(text.replace("{output}", str(tmp_path / name)))
        small_run.train(file, environment=ray)
        assert 2 in small_run.metrics(tmp_path / name / "ranks")

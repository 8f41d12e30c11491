"""The checks before `megagrpo eval` starts anything: the recipe's fields that it reads, then the model."""

from __future__ import annotations

import os
from dataclasses import replace

from megagrpo.errors import PreflightError, Problem
from megagrpo.preflight.agent import check_agent
from megagrpo.preflight.data import data_problems
from megagrpo.preflight.machine import address_problems, engine_problems
from megagrpo.preflight.model import model_directory, served_problems, tokenizer_directory, tokenizer_problems
from megagrpo.preflight.preflight import Preflight, attempt, own_reward_problems
from megagrpo.preflight.reward_models import reward_model_directories, server_problems
from megagrpo.recipe.defaults import device_here, plan_engines
from megagrpo.recipe.load import LoadedRecipe
from megagrpo.recipe.model_rules import token_problems
from megagrpo.recipe.schema import Recipe
from megagrpo.reward.scorer import reward_problems
from megagrpo.section import broken_rules
from megagrpo.weights.families import read_architecture
from megagrpo.weights.sides.checkpoint import manifests


def check_recipe(loaded: LoadedRecipe[Recipe]) -> None:
    """Checks rules, evaluation sets, their data and rewards. Raises PreflightError with every problem found."""
    recipe = loaded.recipe
    problems = [*broken_rules(recipe)]
    if not recipe.eval.sets:
        fix = "add eval: {sets: {NAME: {files: [{path: ...}]}}}"
        problems.append(Problem("eval.sets", "none", "at least one set of prompts to evaluate on", fix))
    data = recipe.data.model_copy(update={"train": []})
    problems += data_problems(replace(loaded, recipe=recipe.model_copy(update={"data": data})), ())
    if any(not one.functions for one in recipe.eval.sets.values()):
        problems += reward_problems(recipe.reward)
    problems += own_reward_problems(recipe)
    problems += address_problems(recipe, plan_only=False)
    if problems:
        raise PreflightError(map(loaded.places.located, problems))


def check_model(recipe: Recipe) -> Preflight[Recipe]:
    """Checks the model at model.path, its tokenizer, engines, reward models and their devices. If others run the
    servers, the weight files are not checked. Raises PreflightError with every problem found."""
    problems: list[Problem] = []
    served = not recipe.rollout.kind.started_by_us
    model = attempt(problems, lambda: model_directory(recipe, plan_only=False))
    architecture = attempt(problems, lambda: read_architecture(model)) if model else None
    tokenizer = attempt(problems, lambda: tokenizer_directory(recipe, model))
    if tokenizer:
        found = tokenizer_problems(tokenizer, recipe, architecture.vocab if architecture else None)
        problems += found or check_agent(recipe, tokenizer, plan_only=False).problems
    if model and architecture:
        if not served:
            attempt(problems, lambda: manifests(model))
            problems += served_problems(recipe, model)
        problems += token_problems(recipe, architecture)
    scoring = attempt(problems, lambda: reward_model_directories(recipe, plan_only=False)) or {}
    problems += server_problems(recipe, plan_only=False)
    problems += engine_problems(recipe, architecture, plan_only=False)
    problems += _device_problems(recipe)
    if problems or not (model and architecture and tokenizer):
        raise PreflightError(problems)
    return Preflight(recipe, architecture, model.absolute(), tokenizer.absolute(), reward_models=scoring)


def _device_problems(recipe: Recipe) -> list[Problem]:
    """Returns a problem if this machine has too few GPUs for an evaluation that joins no cluster."""
    if recipe.cluster.address or os.environ.get("RAY_ADDRESS") or device_here(recipe) == "cpu":
        return []
    import torch  # takes a second

    devices, needed = torch.cuda.device_count(), plan_engines(recipe, "cuda").bundles
    if devices >= needed:
        return []
    fix = "rollout.engines=1, a smaller rollout.layout, or a Ray cluster that has them: cluster.address or RAY_ADDRESS"
    return [Problem("cluster.device", f"{devices} CUDA devices here", f"{needed} for engines and reward models", fix)]

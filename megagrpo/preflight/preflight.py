"""All checks in their order, in about a second. Every problem is reported, not only the first."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from megagrpo.algorithm.advantages import OwnAdvantageConfig
from megagrpo.algorithm.policy_losses import OwnLossConfig
from megagrpo.data.files import near_file, records
from megagrpo.data.mixture import epoch_rows
from megagrpo.data.rows import PROMPT_ROWS, RowSchema, quick_look
from megagrpo.errors import MegagrpoError, PreflightError, Problem
from megagrpo.plan.advice import disk_problems, runs_here
from megagrpo.plan.parameters import known_models
from megagrpo.preflight import machine
from megagrpo.preflight.model import (
    critic_directory,
    model_directory,
    template_file_problems,
    tokenizer_directory,
    tokenizer_problems,
)
from megagrpo.recipe.load import Kind, LoadedRecipe
from megagrpo.recipe.model_rules import model_problems
from megagrpo.recipe.schema import AnyRecipe, Recipe, SftRecipe
from megagrpo.reward.scorer import reward_problems
from megagrpo.section import broken_rules
from megagrpo.weights.families import read_architecture
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.sides.checkpoint import manifests

PROBLEMS_OF_A_PART = 10
Found = TypeVar("Found")


@dataclass(frozen=True)
class Preflight(Generic[Kind]):
    """A recipe that can run, and what the checks found. Directories are local, hub ids resolved."""

    recipe: Kind
    architecture: Architecture
    model_directory: Path
    tokenizer_directory: Path
    critic_directory: Path | None = None  # None: no critic, or one that starts from the model
    unchecked: tuple[str, ...] = ()  # what a plan could not check on this machine
    epoch_rows: int | None = None  # rows of data.train, with over-long ones; None unless a plan counts them


def preflight(loaded: LoadedRecipe[Kind], *, plan_only: bool = False, engines_too: bool = True) -> Preflight[Kind]:
    """Checks the recipe's rules, model, data files, rewards, disk, devices, packages, engines and directories.

    `plan_only` does without the safetensors files of a hub model and this machine's GPUs, because the run may start on
    another machine. Data files and a known model's tokenizer that are not here are then unchecked, not wrong. Files
    that are here are always checked (safetensors: their headers). Without `engines_too` the run starts no engines, and
    what they need is not checked. Raises PreflightError with every problem found.
    """
    recipe = loaded.recipe
    problems: list[Problem] = [*broken_rules(recipe)]
    unchecked: list[str] = []
    model = _attempt(problems, lambda: model_directory(recipe, plan_only))
    architecture = _attempt(problems, lambda: read_architecture(model)) if model else None
    if architecture:
        problems += model_problems(recipe, architecture)
    if model and architecture and (not plan_only or Path(recipe.model.path).is_dir()):
        _attempt(problems, lambda: manifests(model))
    tokenizer = _attempt(problems, lambda: tokenizer_directory(recipe, model))
    if tokenizer and tokenizer in known_models().values():
        unchecked.append(f"the tokenizer of {recipe.model.path}: not on this machine")
        if recipe.model.chat_template:
            problems += template_file_problems(recipe.model.chat_template, recipe.data.chat_template_arguments)
    elif tokenizer:
        vocabulary = architecture.vocab if architecture else None
        problems += tokenizer_problems(tokenizer, recipe, vocabulary)
    absent = _absent_data(recipe) if plan_only else []
    unchecked += [f"{path}: no such file on this machine" for path in absent]
    problems += _data_problems(loaded, absent)
    critic = None
    if isinstance(recipe, Recipe):
        grpo = recipe
        critic = _attempt(problems, lambda: critic_directory(grpo, architecture, plan_only))
        problems += _attempt(problems, lambda: list(_metric_problems(grpo))) or []
        problems += reward_problems(recipe.reward)
        for method in (recipe.algorithm.advantage, recipe.algorithm.loss):
            if isinstance(method, OwnAdvantageConfig | OwnLossConfig):
                _attempt(problems, method.function().load)
    if architecture and (not plan_only or runs_here(recipe)):
        problems += disk_problems(recipe, architecture, read_architecture(critic) if critic else None)
    if not plan_only:
        problems += machine.device_problems(recipe, architecture, engines_too=engines_too)
    problems += machine.package_problems(recipe, architecture)
    if isinstance(recipe, Recipe) and engines_too:
        problems += machine.engine_problems(recipe, architecture, plan_only)
    problems += machine.address_problems(recipe, plan_only)
    problems += machine.directory_problems(recipe)
    problems += machine.megatron_problems(recipe, None if problems else architecture, plan_only)
    if problems or not (model and architecture and tokenizer):
        raise PreflightError(map(loaded.places.located, problems))
    rows = None
    if plan_only and recipe.train.total_epochs and not any(file.path in absent for file in recipe.data.train):
        rows = epoch_rows(recipe.data.train)
    return Preflight(recipe, architecture, model, tokenizer, critic, tuple(unchecked), rows)


def _attempt(problems: list[Problem], find: Callable[[], Found]) -> Found | None:
    """What `find` returns; or None, and the first ten of the problems that it raises are added."""
    try:
        return find()
    except MegagrpoError as error:
        problems += error.problems[:PROBLEMS_OF_A_PART]
        if (more := len(error.problems) - PROBLEMS_OF_A_PART) > 0:
            problems.append(Problem(f"and {more} more problems like the last"))
        return None


def _absent_data(recipe: AnyRecipe) -> list[str]:
    """Data files that may be on the cluster: they are not here, and no file here has nearly the same name."""
    paths = [file.path for file in (*recipe.data.train, *recipe.eval.files)]
    return [path for path in dict.fromkeys(paths) if not Path(path).exists() and near_file(Path(path)) is None]


def _data_problems(loaded: LoadedRecipe[AnyRecipe], absent: Collection[str]) -> Iterator[Problem]:
    """What is wrong with the data files that are here."""
    recipe = loaded.recipe
    schema: RowSchema[Any] = PROMPT_ROWS
    if isinstance(recipe, SftRecipe):
        from megagrpo.data.messages import CONVERSATION_ROWS  # imports transformers, which takes seconds

        schema = CONVERSATION_ROWS
    sections = {"data.train": recipe.data.train, "eval.files": recipe.eval.files}
    for section, files in sections.items():
        for index, file in enumerate(files):
            if file.path in absent:
                continue
            written = loaded.places.where(f"{section}.{index}.path")
            for problem in quick_look(Path(file.path), schema):
                yield replace(problem, where=f"{written}: {problem.where}")


def _metric_problems(recipe: Recipe) -> Iterator[Problem]:
    """Metrics of one data source (SOURCE/mean@1) that an evaluation will not have.

    It has them if its files have that source and at least one other.
    """
    stopping = recipe.eval.early_stopping
    asked = {
        "checkpoint.keep_best": recipe.checkpoint.keep_best,
        "eval.early_stopping.metric": stopping and stopping.metric,
    }
    named = {field: str(metric).rpartition("/")[0] for field, metric in asked.items() if "/" in str(metric)}
    paths = [Path(file.path) for file in recipe.eval.files]
    if not named or any(quick_look(path, PROMPT_ROWS) for path in paths):
        return
    found = [record for path in paths for _, record in records(path, ("data_source",))]
    sources = sorted({str(record.get("data_source")) for record in found if isinstance(record, dict)})
    for field, source in named.items():
        if source not in sources:
            needed = f"one of {', '.join(sources)}, as in eval.files"
            yield Problem(field, given=f"the data source {source}", needed=needed)
        elif len(sources) == 1:
            given = f"{source}, the only data source of eval.files"
            yield Problem(field, given, needed="a metric without a source")

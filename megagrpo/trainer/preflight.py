"""All that can be known of a run before any process starts, checked at once and in about a second."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

from megagrpo.data.amounts import epoch_rows
from megagrpo.data.files import near_file, records
from megagrpo.data.rows import file_problems
from megagrpo.errors import MegagrpoError, PreflightError, Problem
from megagrpo.plan.checks.disk import disk_problems, runs_here
from megagrpo.plan.known_models import known_models
from megagrpo.recipe.checks import recipe_problems
from megagrpo.recipe.cluster_address import address_problem
from megagrpo.recipe.defaults import checkpoint_directory, dtype_name, run_directory
from megagrpo.recipe.devices import plan_devices
from megagrpo.recipe.load import Kind, LoadedRecipe
from megagrpo.recipe.model_checks import critic_problems, divisors, either, model_problems
from megagrpo.recipe.schema import AnyRecipe, EngineLayoutConfig, Recipe, SftRecipe
from megagrpo.reward.functions import reward_problems
from megagrpo.rollout.sglang.arguments import sglang_problems
from megagrpo.trainer.model_files import (
    CONFIG_FILES,
    TOKENIZER_FILES,
    cached_directory,
    local_directory,
    template_file_problems,
    tokenizer_problems,
)
from megagrpo.trainer.package_checks import package_problems
from megagrpo.weights.families import read_architecture
from megagrpo.weights.families.architecture import Architecture, critic_of
from megagrpo.weights.sides.checkpoint import manifests
from megagrpo.weights.sides.sglang import split_problems

PROBLEMS_OF_A_PART = 10
Found = TypeVar("Found")


@dataclass(frozen=True)
class Preflight(Generic[Kind]):
    """A recipe that can run, and what was found out on the way. Directories are local, hub ids resolved."""

    recipe: Kind
    architecture: Architecture
    model_directory: Path
    tokenizer_directory: Path
    critic_directory: Path | None = None  # None: no critic, or one that starts from the model
    unchecked: tuple[str, ...] = ()  # what a plan could not look at on this machine
    epoch_rows: int | None = None  # of data.train, over-long ones included, if a plan needs them and the files are here


def preflight(loaded: LoadedRecipe[Kind], *, plan_only: bool = False) -> Preflight[Kind]:
    """Check the recipe's rules, the model, the data files, the rewards, Megatron's options, devices, packages,
    directories and room for checkpoints.

    `plan_only` leaves the safetensors files of a hub model on the hub, and this machine's GPUs out: the run may start
    on another. Data files and a known model's tokenizer that are not here are then unchecked, not wrong. Files that
    are here are always checked (safetensors: their headers). Raises PreflightError with every problem found.
    """
    recipe = loaded.recipe
    problems: list[Problem] = [*recipe_problems(recipe)]
    unchecked: list[str] = []
    model = _attempt(problems, lambda: _model_directory(recipe, plan_only))
    architecture = _attempt(problems, lambda: read_architecture(model)) if model else None
    if architecture:
        problems += model_problems(recipe, architecture)
    if model and architecture and (not plan_only or Path(recipe.model.path).is_dir()):
        _attempt(problems, lambda: manifests(model))
    tokenizer = _attempt(problems, lambda: _tokenizer_directory(recipe, model))
    if tokenizer and tokenizer in known_models().values():
        unchecked.append(f"the tokenizer of {recipe.model.path}: not on this machine")
        problems += template_file_problems(recipe.model.chat_template) if recipe.model.chat_template else []
    elif tokenizer:
        vocabulary = architecture.vocab if architecture else None
        problems += tokenizer_problems(tokenizer, recipe.model.chat_template, vocabulary)
    absent = _absent_data(recipe) if plan_only else []
    unchecked += [f"{path}: no such file on this machine" for path in absent]
    problems += _data_problems(loaded, absent)
    critic = None
    if isinstance(recipe, Recipe):
        grpo = recipe
        critic = _attempt(problems, lambda: _critic_directory(grpo, architecture, plan_only))
        problems += _attempt(problems, lambda: list(_metric_problems(grpo))) or []
        problems += reward_problems(recipe.reward)
    if architecture and (not plan_only or runs_here(recipe)):
        problems += disk_problems(recipe, architecture, read_architecture(critic) if critic else None)
    if not plan_only:
        problems += _device_problems(recipe)
    problems += package_problems(recipe)
    if isinstance(recipe, Recipe):
        problems += _engine_problems(recipe, architecture, plan_only)
    problems += _address_problems(recipe, plan_only)
    problems += _directory_problems(recipe)
    problems += _megatron_problems(recipe, None if problems else architecture)
    if problems or not (model and architecture and tokenizer):
        raise PreflightError(map(loaded.places.located, problems))
    rows = None
    if plan_only and recipe.train.total_epochs and not any(file.path in absent for file in recipe.data.train):
        rows = epoch_rows(recipe.data.train)
    return Preflight(recipe, architecture, model, tokenizer, critic, tuple(unchecked), rows)


def _attempt(problems: list[Problem], find: Callable[[], Found]) -> Found | None:
    """What `find` finds, or None and its problems added; the first ten of a long list."""
    try:
        return find()
    except MegagrpoError as error:
        problems += error.problems[:PROBLEMS_OF_A_PART]
        if (more := len(error.problems) - PROBLEMS_OF_A_PART) > 0:
            problems.append(Problem(f"and {more} more problems like the last"))
        return None


def _model_directory(recipe: AnyRecipe, plan_only: bool) -> Path:
    if plan_only and recipe.model.revision is None and (known := _known_directory(recipe.model.path)):
        return known
    patterns = CONFIG_FILES + TOKENIZER_FILES + (() if plan_only else ("*.safetensors",))
    return local_directory(recipe.model.path, recipe.model.revision, patterns, "model.path")


def _known_directory(path: str) -> Path | None:
    """Of a published model: its files in the local cache, or the config that comes with megagrpo."""
    known = None if Path(path).is_dir() else known_models().get(path)
    return known and (cached_directory(path) or known)


def _critic_directory(recipe: Recipe, policy: Architecture | None, plan_only: bool) -> Path | None:
    """The critic's own model, if it has one, which must fit the layout and know all of the policy's tokens."""
    critic = recipe.algorithm.critic
    if critic is None or critic.path is None:
        return None
    patterns = CONFIG_FILES + (() if plan_only else ("*.safetensors",))
    known = _known_directory(critic.path) if plan_only else None
    directory = known or local_directory(critic.path, None, patterns, "algorithm.critic.path")
    architecture = critic_of(read_architecture(directory))
    if not plan_only or Path(critic.path).is_dir():
        manifests(directory, architecture)
    problems: list[Problem] = [
        replace(problem, given=f"{problem.given} (the critic's)") for problem in critic_problems(recipe, architecture)
    ]
    if policy and architecture.vocab < policy.vocab:
        given, needed = f"a vocabulary of {architecture.vocab}", f"the policy's, of {policy.vocab}"
        problems.append(Problem("algorithm.critic.path", given, needed, "a critic of the same family of models"))
    if problems:
        raise PreflightError(problems)
    return directory


def _tokenizer_directory(recipe: AnyRecipe, model: Path | None) -> Path | None:
    if recipe.model.tokenizer is None:
        return model
    return local_directory(recipe.model.tokenizer, None, TOKENIZER_FILES, "model.tokenizer")


def _absent_data(recipe: AnyRecipe) -> list[str]:
    """Data files that are not here, but for those that look like a slip of the pen: they may be on the cluster."""
    paths = [file.path for file in (*recipe.data.train, *recipe.eval.files)]
    return [path for path in dict.fromkeys(paths) if not Path(path).exists() and near_file(Path(path)) is None]


def _data_problems(loaded: LoadedRecipe[AnyRecipe], absent: Collection[str]) -> Iterator[Problem]:
    """What is wrong with the data files, the `absent` ones left out."""
    recipe = loaded.recipe
    look = file_problems
    if isinstance(recipe, SftRecipe):
        from megagrpo.data import messages  # with transformers: seconds; the other checks do without

        look = messages.file_problems
    sections = {"data.train": recipe.data.train, "eval.files": recipe.eval.files}
    for section, files in sections.items():
        for index, file in enumerate(files):
            if file.path in absent:
                continue
            written = loaded.places.where(f"{section}.{index}.path")
            for problem in look(Path(file.path)):
                yield replace(problem, where=f"{written}: {problem.where}")


def _metric_problems(recipe: Recipe) -> Iterator[Problem]:
    """A metric of one data source (SOURCE/mean@1) exists if the evaluation files have that source, and others too."""
    stopping = recipe.eval.early_stopping
    asked = {
        "checkpoint.keep_best": recipe.checkpoint.keep_best,
        "eval.early_stopping.metric": stopping and stopping.metric,
    }
    named = {field: str(metric).rpartition("/")[0] for field, metric in asked.items() if "/" in str(metric)}
    paths = [Path(file.path) for file in recipe.eval.files]
    if not named or any(file_problems(path) for path in paths):
        return
    found = [record for path in paths for _, record in records(path, ("data_source",))]
    sources = sorted({str(record.get("data_source")) for record in found if isinstance(record, dict)})
    for field, source in named.items():
        if source not in sources:
            yield Problem(
                field, given=f"the data source {source}", needed=f"one of {', '.join(sources)}, as in eval.files"
            )
        elif len(sources) == 1:
            yield Problem(
                field, given=f"{source}, the only data source of eval.files", needed="a metric without a source"
            )


def _megatron_problems(recipe: AnyRecipe, architecture: Architecture | None) -> list[Problem]:
    """Wrong options, and, for an architecture, combinations of them with the model and layout that Megatron refuses."""
    if not recipe.train.megatron:
        return []
    import torch

    from megagrpo.megatron.config import transformer_config  # imports megatron: seconds
    from megagrpo.megatron.options import option_problems

    if problems := option_problems(recipe.train.megatron):
        return problems
    found: list[Problem] = []
    if architecture:
        device = _device(recipe)
        dtype = getattr(torch, dtype_name(recipe, device))
        _attempt(found, lambda: transformer_config(architecture, recipe.train, dtype, device))
    return found


def _engine_problems(recipe: Recipe, architecture: Architecture | None, plan_only: bool) -> Iterator[Problem]:
    """Arguments of SGLang servers, the key of external ones, and whether they can hold the model as it is split."""
    rollout = recipe.rollout
    if rollout.engine == "transformers":
        return
    if rollout.engine == "sglang":
        yield from sglang_problems(rollout.sglang, plan_only=plan_only)
    variable = rollout.api_key_variable
    if variable is not None and not plan_only and not os.environ.get(variable):
        yield Problem(
            "rollout.api_key_variable",
            given=f"{variable}, which is not set",
            needed="the API key of the servers in it",
            fix=f"export {variable}=...",
        )
    # A recipe that is only planned here may be for a cluster with GPUs, where SGLang holds more.
    device = "cuda" if plan_only and recipe.cluster.device == "auto" else _device(recipe)
    if architecture:
        sizes = [
            n
            for n in divisors(architecture.heads)
            if not split_problems(architecture, EngineLayoutConfig(tensor=n), device)
        ]
        for problem in split_problems(architecture, rollout.layout, device):
            fix = f"rollout.layout.tensor of {either(sizes)}, with expert: 1"
            yield replace(problem, where=f"rollout.layout: {problem.where}", fix=fix)
    if device == "cpu" and recipe.cluster.device == "auto" and rollout.layout.expert > 1:
        yield Problem(
            "rollout.layout.expert",
            given=f"{rollout.layout.expert} on CPUs",
            needed="1: SGLang's expert parallelism needs GPUs",
            fix="expert: 1",
        )


def _device(recipe: AnyRecipe) -> str:
    if recipe.cluster.device != "auto":
        return recipe.cluster.device
    import torch  # a second; the other checks do without

    return "cuda" if torch.cuda.is_available() else "cpu"


def _device_problems(recipe: AnyRecipe) -> Iterator[Problem]:
    """The GPUs of this machine, for a run that is given no other."""
    if recipe.cluster.device != "cuda" or recipe.cluster.address or os.environ.get("RAY_ADDRESS"):
        return
    import torch  # a second; the other checks do without

    devices, needed = torch.cuda.device_count(), plan_devices(recipe, "cuda").bundles
    if devices < needed:
        smaller = "a smaller train.layout" if devices else "cluster.device: cpu"
        engines = ""
        if isinstance(recipe, Recipe):
            engines = f" and rollout.engines with placement: {recipe.cluster.placement}"
        yield Problem(
            "cluster.device",
            given=f"cuda, on a machine with {devices or 'no'} CUDA device{'' if devices == 1 else 's'}",
            needed=f"{needed} for train.layout{engines}",
            fix=f"{smaller}, or a Ray cluster that has them: cluster.address or RAY_ADDRESS",
        )


def _address_problems(recipe: AnyRecipe, plan_only: bool) -> Iterator[Problem]:
    """The cluster to join. What RAY_ADDRESS says here is of no matter to a plan."""
    if recipe.cluster.address is not None:
        found = address_problem(recipe.cluster.address, "cluster.address")
    else:
        found = None if plan_only else address_problem(os.environ.get("RAY_ADDRESS", ""), "RAY_ADDRESS")
    if found:
        yield found


def _directory_problems(recipe: AnyRecipe) -> Iterator[Problem]:
    directories = {"track.directory": run_directory(recipe)}
    if recipe.checkpoint.directory is not None:
        directories["checkpoint.directory"] = checkpoint_directory(recipe)
    for field, directory in directories.items():
        existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
        if not existing.is_dir():
            yield Problem(
                field, given=f"{directory}, and {existing} is a file", needed="a directory, or a place to make one"
            )
        elif not os.access(existing, os.W_OK | os.X_OK):
            yield Problem(
                field, given=f"{directory}, and {existing} is not writable", needed="a directory that can be written"
            )

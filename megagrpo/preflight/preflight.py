"""All checks in their order, in about a second. Every problem is reported, not only the first."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from megagrpo.algorithm.advantages import OwnAdvantageConfig
from megagrpo.algorithm.policy_losses import OwnLossConfig
from megagrpo.data.mixture import epoch_rows
from megagrpo.errors import MegagrpoError, ModelError, PreflightError, Problem, brief
from megagrpo.plan.advice import disk_problems, runs_here
from megagrpo.plan.parameters import known_models
from megagrpo.preflight import machine
from megagrpo.preflight.agent import AgentChecks, check_agent
from megagrpo.preflight.data import absent_data, data_problems, sources_of
from megagrpo.preflight.model import (
    critic_directory,
    model_directory,
    served_problems,
    template_file_problems,
    template_problems,
    tokenizer_directory,
    tokenizer_problems,
)
from megagrpo.preflight.reward_models import reward_model_directories, server_problems
from megagrpo.recipe.defaults import own_rewards
from megagrpo.recipe.load import Kind, LoadedRecipe
from megagrpo.recipe.model_rules import model_problems
from megagrpo.recipe.schema import AnyRecipe, Recipe
from megagrpo.recipe.schema.run import ConsoleMode
from megagrpo.reward.functions import sandbox_problems
from megagrpo.reward.scorer import reward_problems
from megagrpo.section import broken_rules
from megagrpo.weights.families import read_architecture
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.sides.checkpoint import extra_tensors, manifests

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
    unchecked: tuple[str, ...] = ()  # what was not on this machine, or is not loaded
    epoch_rows: int | None = None  # rows of data.train, with over-long ones; None unless a plan counts them
    reward_models: Mapping[str, Path] = field(default_factory=dict)  # directories of reward.models, by name
    agent: Mapping[str, str] = field(default_factory=dict)  # lines about the agent for a plan, by name
    console: ConsoleMode | None = None  # what the command was told to print; None: what the recipe says


def preflight(loaded: LoadedRecipe[Kind], *, plan_only: bool = False, engines_too: bool = True) -> Preflight[Kind]:
    """Checks the recipe's rules, model, data files, rewards, agent, disk, devices, packages, engines and directories.

    `plan_only` does without the safetensors files of a hub model and this machine's GPUs, because the run may start on
    another machine. Data files, a known model's tokenizer and a sandbox that are not here are then unchecked, not
    wrong. Files that are here are always checked (safetensors: their headers). Without `engines_too` the run starts no
    engines, and what they need is not checked. Raises PreflightError with every problem found.
    """
    recipe = loaded.recipe
    problems: list[Problem] = [*broken_rules(recipe)]
    unchecked: list[str] = []
    model = attempt(problems, lambda: model_directory(recipe, plan_only))
    architecture = attempt(problems, lambda: read_architecture(model)) if model else None
    if architecture:
        problems += model_problems(recipe, architecture)
    if model and architecture and (not plan_only or Path(recipe.model.path).is_dir()):
        if attempt(problems, lambda: manifests(model)) and (more := extra_tensors(model)):
            unchecked.append(f"{len(more)} tensors of its files, which are not of the model or loaded: {brief(more)}")
        if isinstance(recipe, Recipe) and engines_too:
            problems += served_problems(recipe, model)
    tokenizer = attempt(problems, lambda: tokenizer_directory(recipe, model))
    chats = None  # where a tokenizer is whose template can be asked
    if tokenizer and tokenizer in known_models().values():
        unchecked.append(f"the tokenizer of {recipe.model.path}: not on this machine")
        if recipe.model.chat_template:
            problems += template_file_problems(recipe.model.chat_template, recipe)
    elif tokenizer:
        vocabulary = architecture.vocab if architecture else None
        found = tokenizer_problems(tokenizer, recipe, vocabulary)
        problems += found
        chats = None if found else tokenizer
    absent = absent_data(recipe) if plan_only else []
    unchecked += [f"{path}: no such file on this machine" for path in absent]
    problems += data_problems(loaded, absent)
    critic = None
    scoring: dict[str, Path] = {}
    agent = AgentChecks()
    if isinstance(recipe, Recipe):
        grpo = recipe
        critic = attempt(problems, lambda: critic_directory(grpo, architecture, plan_only))
        problems += attempt(problems, lambda: list(_metric_problems(grpo))) or []
        problems += reward_problems(recipe.reward, sandbox=not plan_only)
        problems += own_reward_problems(recipe, sandbox=not plan_only)
        unchecked += _absent_sandboxes(recipe) if plan_only else []
        agent = check_agent(recipe, chats, plan_only)
        problems, unchecked = [*problems, *agent.problems], [*unchecked, *agent.unchecked]
        scoring = attempt(problems, lambda: reward_model_directories(grpo, plan_only)) or {}
        elsewhere = [name for name in recipe.reward.models if plan_only and name not in scoring]
        unchecked += [f"reward.models.{name}: no such directory on this machine" for name in elsewhere]
        for method in (recipe.algorithm.advantage, recipe.algorithm.loss):
            if isinstance(method, OwnAdvantageConfig | OwnLossConfig):
                attempt(problems, method.function().load)
    if architecture and (not plan_only or runs_here(recipe)):
        problems += disk_problems(recipe, architecture, read_architecture(critic) if critic else None)
    if not plan_only:
        problems += machine.device_problems(recipe, architecture, engines_too=engines_too)
    problems += machine.package_problems(recipe, architecture)
    if isinstance(recipe, Recipe) and engines_too:
        problems += machine.engine_problems(recipe, architecture, plan_only)
        problems += server_problems(recipe, plan_only)
    problems += machine.address_problems(recipe, plan_only)
    problems += machine.directory_problems(recipe)
    problems += machine.megatron_problems(recipe, None if problems else architecture, plan_only)
    if problems or not (model and architecture and tokenizer):
        raise PreflightError(map(loaded.places.located, problems))
    rows = None
    if plan_only and recipe.train.total_epochs and not any(file.location in absent for file in recipe.data.train):
        rows = epoch_rows(recipe.data.train)
    return Preflight(recipe, architecture, model, tokenizer, critic, tuple(unchecked), rows, scoring, agent.lines)


def tokenizer_of(recipe: AnyRecipe) -> PreTrainedTokenizerBase:
    """Returns the tokenizer of a recipe's model, with its chat template, which reads the recipe's arguments. Raises
    ModelError."""
    from megagrpo.tokenizer import load_chat_tokenizer  # imports transformers, which takes seconds

    directory = tokenizer_directory(recipe, model_directory(recipe, plan_only=True))
    tokenizer = load_chat_tokenizer(directory or recipe.model.path, recipe.model.chat_template)
    if directory and (problems := template_problems(directory, recipe)):
        raise ModelError(problems)
    return tokenizer


def attempt(problems: list[Problem], find: Callable[[], Found]) -> Found | None:
    """Returns the result of `find`; or None, and appends the first ten of the problems that it raises."""
    try:
        return find()
    except MegagrpoError as error:
        problems += error.problems[:PROBLEMS_OF_A_PART]
        if (more := len(error.problems) - PROBLEMS_OF_A_PART) > 0:
            problems.append(Problem(f"and {more} more problems like the last"))
        return None


def own_reward_problems(recipe: Recipe, *, sandbox: bool = True) -> list[Problem]:
    """Returns the problems of the reward functions of evaluation sets."""
    return [
        replace(problem, where=re.sub(r"^reward\b", f"eval.sets.{name}", problem.where))
        for name, reward in own_rewards(recipe).items()
        for problem in reward_problems(reward, sandbox=sandbox)
    ]


def _absent_sandboxes(recipe: Recipe) -> list[str]:
    rewards = [recipe.reward, *own_rewards(recipe).values()]
    found = [f"the sandbox of programs: {one.given}" for reward in rewards for one in sandbox_problems(reward)]
    return list(dict.fromkeys(found))


def _metric_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yields a problem for a metric of one data source (SET/SOURCE/mean@1) that an evaluation will not have.

    An evaluation has it if the set's files have that source and at least one other.
    """
    stopping = recipe.eval.early_stopping
    asked = {
        "checkpoint.keep_best": recipe.checkpoint.keep_best,
        "eval.early_stopping.metric": stopping and stopping.metric,
    }
    files = recipe.eval.files_of_sets()
    for asking, metric in asked.items():
        name, _, of_set = str(metric).partition("/")
        source, slash, _ = of_set.rpartition("/")
        sources = sorted(sources_of(files[name])) if slash and name in files else []
        if sources and source not in sources:
            needed = f"one of {', '.join(sources)}, as in eval.sets.{name}.files"
            yield Problem(asking, given=f"the data source {source}", needed=needed)
        elif len(sources) == 1:
            given = f"{source}, the only data source of eval.sets.{name}.files"
            yield Problem(asking, given, needed="a metric without a source")

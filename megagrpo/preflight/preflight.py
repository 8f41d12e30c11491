"""All checks in their order, in about a second. Every problem is reported, not only the first."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic

from megagrpo.algorithm.advantages import OwnAdvantageConfig
from megagrpo.algorithm.policy_losses import OwnLossConfig
from megagrpo.data.mixture import epoch_rows
from megagrpo.errors import NAME_NEEDED, ModelError, PreflightError, Problem, brief
from megagrpo.plan.advice import disk_problems, runs_here
from megagrpo.plan.parameters import known_models
from megagrpo.preflight import machine
from megagrpo.preflight.agent import AgentChecks, check_agent
from megagrpo.preflight.data_check import absent_data, data_problems, sources_of
from megagrpo.preflight.model import (
    attempt,
    critic_directory,
    model_directory,
    reward_model_directories,
    template_file_problems,
    template_problems,
    tokenizer_directory,
    tokenizer_problems,
)
from megagrpo.recipe.defaults import device_here, own_rewards, plan_engines
from megagrpo.recipe.load import Kind, LoadedRecipe
from megagrpo.recipe.model_rules import model_problems, token_problems
from megagrpo.recipe.schema import AnyRecipe, Recipe
from megagrpo.recipe.schema.run import ConsoleMode
from megagrpo.reward.functions import sandbox_problems
from megagrpo.reward.scorer import reward_problems
from megagrpo.section import broken_rules
from megagrpo.track.jsonl import leaves
from megagrpo.weights.families import read_architecture
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.sides.checkpoint import extra_tensors, manifests

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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


@dataclass(frozen=True)
class Checking:
    """A recipe, and what was found for its CHECKS; None: not found. has_files: the model's are on this machine."""

    recipe: Any
    plan_only: bool
    engines_too: bool
    model: Any
    architecture: Any
    critic: Path | None
    has_files: object
    problems: Sequence[Problem]

    @property
    def grpo(self) -> bool:
        return isinstance(self.recipe, Recipe)

    @property
    def samples(self) -> bool:
        """Returns whether the run starts engines."""
        return self.grpo and self.engines_too


def preflight(loaded: LoadedRecipe[Kind], *, plan_only: bool = False, engines_too: bool = True) -> Preflight[Kind]:
    """Finds model, tokenizer, data, agent and reward models, then runs CHECKS: about a second in all.

    `plan_only` does without the safetensors files of a hub model and this machine's GPUs, because the run may start on
    another machine. Data files, a known model's tokenizer and a sandbox that are not here are then unchecked, not
    wrong. Files that are here are always checked (safetensors: their headers). Without `engines_too` the run starts no
    engines, and what they need is not checked. Raises PreflightError with every problem found.
    """
    recipe = loaded.recipe
    problems: list[Problem] = [*broken_rules(recipe)]
    unchecked: list[str] = []
    model = attempt(problems, model_directory, recipe, plan_only)
    architecture = attempt(problems, read_architecture, model) if model else None
    has_files = model and architecture and (not plan_only or Path(recipe.model.path).is_dir())
    if model and has_files and attempt(problems, manifests, model) and (more := extra_tensors(model)):
        unchecked.append(f"{len(more)} tensors of its files, which are not of the model or loaded: {brief(more)}")
    tokenizer = attempt(problems, tokenizer_directory, recipe, model)
    chats = None  # where a tokenizer is whose template can be asked
    if tokenizer and tokenizer in known_models().values():
        unchecked.append(f"the tokenizer of {recipe.model.path}: not on this machine")
        if recipe.model.chat_template:
            problems += template_file_problems(recipe.model.chat_template, recipe)
    elif tokenizer:
        wrong = tokenizer_problems(tokenizer, recipe, architecture.vocab if architecture else None)
        problems += wrong
        chats = None if wrong else tokenizer
    absent = absent_data(recipe) if plan_only else []
    unchecked += [f"{path}: no such file on this machine" for path in absent]
    problems += data_problems(loaded, absent)
    critic, scoring, agent = None, dict[str, Path](), AgentChecks()
    if isinstance(recipe, Recipe):
        grpo = recipe
        critic = attempt(problems, critic_directory, grpo, architecture, plan_only)
        unchecked += (attempt(problems, _absent_sandboxes, grpo) or []) if plan_only else []
        agent = attempt(problems, check_agent, grpo, chats, plan_only) or agent
        problems += agent.problems
        unchecked += agent.unchecked
        scoring = attempt(problems, reward_model_directories, grpo, plan_only) or {}
        elsewhere = [name for name in recipe.reward.models if plan_only and name not in scoring]
        unchecked += [f"reward.models.{name}: no such directory on this machine" for name in elsewhere]
    checking = Checking(recipe, plan_only, engines_too, model, architecture, critic, has_files, problems)
    run = replace(checking, plan_only=False)
    left = [name for name, when, _ in CHECKS if when(run) and not when(checking)]
    for find in [find for _, when, find in CHECKS if when(checking)]:
        problems += attempt(problems, lambda find=find: [*find(checking)]) or []
    unchecked += [f"{' and '.join(left)}: checked when the run starts"] if left else []
    if problems or not (model and architecture and tokenizer):
        raise PreflightError(_located(loaded, problems))
    rows = None
    if plan_only and recipe.train.total_epochs and not any(file.location in absent for file in recipe.data.train):
        rows = epoch_rows(recipe.data.train)
    return Preflight(recipe, architecture, model, tokenizer, critic, tuple(unchecked), rows, scoring, agent.lines)


def _located(loaded: LoadedRecipe[AnyRecipe], problems: Iterable[Problem]) -> Iterator[Problem]:
    """Yields the problems with their fields' places. A path that this machine cannot have comes once for each field."""
    path_problems = set[Problem]()
    for problem in problems:
        if problem.needed != NAME_NEEDED:
            yield loaded.places.located(problem)
        elif (located := _by_path(loaded, problem)) not in path_problems:
            path_problems.add(located)
            yield located


def _by_path(loaded: LoadedRecipe[AnyRecipe], problem: Problem) -> Problem:
    wrong, named = Path(problem.where).absolute(), []
    for at, value in leaves(loaded.recipe.model_dump()):
        for text in value if isinstance(value, list) else [value]:
            path = Path(re.sub(r"\.py:\w+$", ".py", text)).absolute() if text and isinstance(text, str) else None
            if path and (wrong.is_relative_to(path) or path.is_relative_to(wrong)):
                named.append((len(text), at, text))
    _, at, text = max(named, default=(0, "", ""))
    return replace(problem, where=loaded.places.where(at), given=f"{brief(text)}: {problem.given}") if at else problem


def _own_methods(checking: Checking) -> list[Problem]:
    problems: list[Problem] = []
    for method in (checking.recipe.algorithm.advantage, checking.recipe.algorithm.loss):
        if isinstance(method, OwnAdvantageConfig | OwnLossConfig):
            attempt(problems, method.function().load)
    return problems


CHECKS: list[tuple[str, Callable[[Checking], object], Callable[[Checking], Iterable[Problem]]]] = [
    ("sizes", lambda c: c.architecture, lambda c: model_problems(c.recipe, c.architecture)),
    ("model class", lambda c: c.has_files and c.samples, lambda c: c.recipe.rollout.kind.model_problems(c.model)),
    ("metrics", lambda c: c.grpo, lambda c: _metric_problems(c.recipe)),
    ("reward functions", lambda c: c.grpo, lambda c: reward_problems(c.recipe.reward, sandbox=not c.plan_only)),
    ("evaluation", lambda c: c.grpo, lambda c: own_reward_problems(c.recipe, sandbox=not c.plan_only)),
    ("methods of your own", lambda c: c.grpo, _own_methods),
    (
        "room on disk",
        lambda c: c.architecture and (not c.plan_only or runs_here(c.recipe)),
        lambda c: disk_problems(c.recipe, c.architecture, read_architecture(c.critic) if c.critic else None),
    ),
    (
        "this machine's devices",
        lambda c: not c.plan_only,
        lambda c: machine.device_problems(c.recipe, c.architecture, engines_too=c.engines_too),
    ),
    ("packages", lambda c: True, lambda c: machine.package_problems(c.recipe, c.architecture)),
    ("engines", lambda c: c.samples, lambda c: machine.engine_problems(c.recipe, c.architecture, c.plan_only)),
    ("the cluster's address", lambda c: True, lambda c: machine.address_problems(c.recipe, c.plan_only)),
    ("directories", lambda c: True, lambda c: machine.directory_problems(c.recipe)),
    (
        "options of Megatron",  # and their combinations, if nothing else is wrong
        lambda c: True,
        lambda c: machine.megatron_problems(c.recipe, None if c.problems else c.architecture, c.plan_only),
    ),
]
"""The checks after model, tokenizer and data are found, in this order: the name of each, the condition under which it
is due, and the function that finds its problems, which may also raise them."""


def tokenizer_of(recipe: AnyRecipe) -> PreTrainedTokenizerBase:
    """Returns the tokenizer of a recipe's model, with its chat template, which reads the recipe's arguments. Raises
    ModelError."""
    from megagrpo.tokenizer import load_chat_tokenizer  # imports transformers, which takes seconds

    directory = tokenizer_directory(recipe, model_directory(recipe, plan_only=True))
    tokenizer = load_chat_tokenizer(directory or recipe.model.path, recipe.model.chat_template)
    if directory and (problems := template_problems(directory, recipe)):
        raise ModelError(problems)
    return tokenizer


def own_reward_problems(recipe: Recipe, *, sandbox: bool = True) -> list[Problem]:
    """Returns the problems of the reward functions of evaluation sets."""
    return [
        replace(problem, where=re.sub(r"^reward\b", f"eval.sets.{name}", problem.where))
        for name, reward in own_rewards(recipe).items()
        for problem in reward_problems(reward, sandbox=sandbox)
    ]


def _absent_sandboxes(recipe: Recipe) -> list[str]:
    rewards = [recipe.reward, *own_rewards(recipe).values()]
    absent = [f"the sandbox of programs: {problem.given}" for reward in rewards for problem in sandbox_problems(reward)]
    return list(dict.fromkeys(absent))


def _metric_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yields a problem for a metric of one data source (SET/SOURCE/mean@1) that an evaluation will not have.

    An evaluation has it if the set's files have that source and at least one other.
    """
    files = recipe.eval.files_of_sets()
    for asking, metric in recipe.metrics_asked.items():
        name, _, of_set = metric.partition("/")
        source, slash, _ = of_set.rpartition("/")
        sources = sorted(sources_of(files[name])) if slash and name in files else []
        if sources and source not in sources:
            needed = f"one of {', '.join(sources)}, as in eval.sets.{name}.files"
            yield Problem(asking, given=f"the data source {source}", needed=needed)
        elif len(sources) == 1:
            given = f"{source}, the only data source of eval.sets.{name}.files"
            yield Problem(asking, given, needed="a metric without a source")


# --- megagrpo eval --------------------------------------------------------------------------------------------------


def check_sets(loaded: LoadedRecipe[Recipe]) -> None:
    """Checks rules, evaluation sets, their data and rewards. Raises PreflightError with every problem found."""
    recipe = loaded.recipe
    problems = [*broken_rules(recipe)]
    if not recipe.eval.sets:
        fix = "add eval: {sets: {NAME: {files: [{path: ...}]}}}"
        problems.append(Problem("eval.sets", "none", "at least one set of prompts to evaluate on", fix))
    data = recipe.data.model_copy(update={"train": []})
    problems += data_problems(replace(loaded, recipe=recipe.model_copy(update={"data": data})), ())
    if any(not one.functions for one in recipe.eval.sets.values()):
        problems += attempt(problems, reward_problems, recipe.reward) or []
    problems += attempt(problems, own_reward_problems, recipe) or []
    problems += machine.address_problems(recipe, plan_only=False)
    if problems:
        raise PreflightError(_located(loaded, problems))


def check_model(recipe: Recipe) -> Preflight[Recipe]:
    """Checks the model at model.path, its tokenizer, engines, reward models and their devices. If others run the
    servers, the weight files are not checked. Raises PreflightError with every problem found."""
    problems: list[Problem] = []
    served = not recipe.rollout.kind.started_by_us
    model = attempt(problems, model_directory, recipe, False)
    architecture = attempt(problems, read_architecture, model) if model else None
    tokenizer = attempt(problems, tokenizer_directory, recipe, model)
    if tokenizer:
        wrong = tokenizer_problems(tokenizer, recipe, architecture.vocab if architecture else None)
        problems += wrong or check_agent(recipe, tokenizer, plan_only=False).problems
    if model and architecture:
        if not served:
            attempt(problems, manifests, model)
            problems += recipe.rollout.kind.model_problems(model)
        problems += token_problems(recipe, architecture)
    scoring = attempt(problems, reward_model_directories, recipe, False) or {}
    problems += machine.engine_problems(recipe, architecture, plan_only=False)
    if not machine.joins_cluster(recipe) and device_here(recipe) == "cuda":
        smaller = "rollout.engines=1, a smaller rollout.layout"
        needed = plan_engines(recipe, "cuda").bundles
        problems += machine.gpu_problems(needed, "engines and reward models", smaller)
    if problems or not (model and architecture and tokenizer):
        raise PreflightError(problems)
    return Preflight(recipe, architecture, model.absolute(), tokenizer.absolute(), reward_models=scoring)

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
from megagrpo.errors import ModelError, PathProblem, PreflightError, Problem, brief
from megagrpo.plan.advice import disk_problems, runs_here
from megagrpo.plan.parameters import known_models
from megagrpo.preflight import machine
from megagrpo.preflight.agent import check_agent
from megagrpo.preflight.data_check import absent_data, data_problems, sources_of
from megagrpo.preflight.model import (
    attempt,
    critic_directory,
    directories_beside,
    model_directory,
    template_file_problems,
    template_problems,
    tokenizer_directory,
    tokenizer_problems,
)
from megagrpo.preflight.teachers import check_teachers
from megagrpo.recipe.defaults import device_here, own_rewards, plan_engines
from megagrpo.recipe.load import Kind, LoadedRecipe
from megagrpo.recipe.model_rules import model_problems, token_problems
from megagrpo.recipe.schema import AnyRecipe, Recipe
from megagrpo.recipe.schema.run import ConsoleMode
from megagrpo.reward.functions import sandbox_problems
from megagrpo.reward.scorer import reward_problems
from megagrpo.section import broken_rules, problem
from megagrpo.track.jsonl import leaves
from megagrpo.weights.families import read_architecture
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.sides.checkpoint import carried_tensors, extra_tensors, file_tensors, manifests, not_trained

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
    unchecked: tuple[str, ...] = ()  # parts that are not on this machine, or not loaded
    epoch_rows: int | None = None  # rows of data.train, with over-long ones; None unless a plan counts them
    models_beside: Mapping[str, Path] = field(default_factory=dict)  # directories of recipe.models_beside
    teachers: Mapping[str, Path] = field(default_factory=dict)  # directories of those on the ranks, by name
    found: Mapping[str, str] = field(default_factory=dict)  # lines for a plan, by name
    console: ConsoleMode | None = None  # the command's choice; None: the recipe's


@dataclass
class Checking:
    """A recipe, and what its CHECKS have found so far; None: not found."""

    recipe: Any
    plan_only: bool = False
    engines_too: bool = True
    weights_too: bool = True
    model: Any = None  # the directories of the model and its tokenizer
    architecture: Any = None
    has_files: bool = False  # the model's are on this machine
    tokenizer: Any = None
    templates: Path | None = None  # the tokenizer, if its chat template can be asked
    absent: Sequence[str] = ()  # data that may be on the cluster
    critic: Path | None = None
    models_beside: Mapping[str, Path] = field(default_factory=dict)
    teachers: Mapping[str, Path] = field(default_factory=dict)
    found: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)

    @property
    def grpo(self) -> bool:
        return isinstance(self.recipe, Recipe)

    @property
    def samples(self) -> bool:
        """Returns whether the run starts engines."""
        return self.grpo and self.engines_too

    def run(self, checks: Mapping[str, Check]) -> None:
        """Runs the checks that are due, in their order."""
        for is_due, find in checks.values():
            if is_due(self):
                self.problems += attempt(self.problems, lambda find=find: [*(find(self) or ())]) or []

    def find_model(self) -> None:
        self.model = model_directory(self.recipe, self.plan_only)
        self.architecture = read_architecture(self.model)
        self.has_files = not self.plan_only or Path(self.recipe.model.path).is_dir()
        has_weights = self.has_files and self.weights_too and manifests(self.model)
        if not has_weights:
            return
        tensors = file_tensors(self.model)
        if carried := carried_tensors(tensors, self.architecture):
            self.found["not trained"] = not_trained(carried)
        if more := [name for name in extra_tensors(tensors, self.architecture) if name not in carried]:
            unloaded = f"{len(more)} tensors of its files, which are not of the model or loaded: {brief(more)}"
            self.unchecked.append(unloaded)

    def find_tokenizer(self) -> Sequence[Problem] | None:
        recipe, vocabulary = self.recipe, self.architecture.vocab if self.architecture else None
        self.tokenizer = tokenizer_directory(recipe, self.model)
        if self.tokenizer in known_models().values():
            self.unchecked.append(f"the tokenizer of {recipe.model.path}: not on this machine")
            return template_file_problems(recipe.model.chat_template, recipe) if recipe.model.chat_template else None
        problems = tokenizer_problems(self.tokenizer, recipe, vocabulary) if self.tokenizer else []
        self.templates = None if problems else self.tokenizer
        return problems

    def find_data(self) -> Iterator[Problem]:
        self.absent = absent_data(self.recipe) if self.plan_only else ()
        self.unchecked += [f"{path}: no such file on this machine" for path in self.absent]
        return data_problems(self.recipe, self.absent)

    def find_critic(self) -> None:
        self.critic = critic_directory(self.recipe, self.architecture, self.plan_only)

    def find_sandboxes(self) -> None:
        rewards = [self.recipe.reward, *own_rewards(self.recipe).values()]
        absent = [f"the sandbox of programs: {fault.given}" for reward in rewards for fault in sandbox_problems(reward)]
        self.unchecked += dict.fromkeys(absent)

    def find_agent(self) -> Sequence[Problem]:
        agent = check_agent(self.recipe, self.templates, self.plan_only)
        self.unchecked += agent.unchecked
        self.found |= agent.lines
        return agent.problems

    def find_models_beside(self) -> None:
        self.models_beside = directories_beside(self.recipe, self.plan_only)
        elsewhere = [where for where in self.recipe.models_beside if where not in self.models_beside]
        self.unchecked += [f"{where}: no such directory on this machine" for where in elsewhere]

    def find_teachers(self) -> Sequence[Problem]:
        known = self.tokenizer if self.templates else None
        found = check_teachers(self.recipe, known, self.models_beside, self.absent, self.plan_only)
        self.teachers = found.directories
        self.unchecked += found.unchecked
        return found.problems

    def result(self, epoch_rows: int | None = None) -> Preflight[Any]:
        """Returns what was found. Raises PreflightError if there are problems."""
        if self.problems or not (self.model and self.architecture and self.tokenizer):
            raise PreflightError(self.problems)
        checked = self.recipe, self.architecture, self.model, self.tokenizer, self.critic
        others = self.models_beside, self.teachers
        return Preflight(*checked, tuple(self.unchecked), epoch_rows, *others, self.found)


Check = tuple[Callable[[Checking], object], Callable[[Checking], Iterable[Problem] | None]]
"""The condition under which a check is due, and the function that finds its problems, or raises them."""


def preflight(loaded: LoadedRecipe[Kind], *, plan_only: bool = False, engines_too: bool = True) -> Preflight[Kind]:
    """Runs CHECKS, in about a second.

    `plan_only` does without the safetensors files of a hub model and this machine's GPUs, because the run may start on
    another machine. Data files, a known model's tokenizer and a sandbox that are not here are then unchecked, not
    wrong. Files that are here are always checked (safetensors: their headers). Without `engines_too` the run starts no
    engines, and what they need is not checked. Raises PreflightError with every problem found.
    """
    recipe, checking = loaded.recipe, Checking(loaded.recipe, plan_only, engines_too)
    checking.run(CHECKS)
    run = replace(checking, plan_only=False)
    left = [name for name, (is_due, _) in CHECKS.items() if is_due(run) and not is_due(checking)]
    checking.unchecked += [f"{' and '.join(left)}: checked when the run starts"] if left else []
    checking.problems = [*_located(loaded, checking.problems)]
    train, rows = recipe.data.train, None
    if not checking.problems and plan_only and recipe.train.total_epochs:
        rows = None if any(file.location in checking.absent for file in train) else epoch_rows(train)
    return checking.result(rows)


def _located(loaded: LoadedRecipe[AnyRecipe], problems: Iterable[Problem]) -> Iterator[Problem]:
    """Yields the problems with their fields' places. A path that this machine cannot have comes once for each field."""
    of_paths = set[Problem]()
    for fault in problems:
        if not isinstance(fault, PathProblem):
            yield loaded.places.located(fault)
        elif (located := _by_path(loaded, fault)) not in of_paths:
            of_paths.add(located)
            yield located


def _by_path(loaded: LoadedRecipe[AnyRecipe], of_path: PathProblem) -> Problem:
    wrong, named = Path(of_path.where).absolute(), []
    for at, value in leaves(loaded.recipe.model_dump()):
        for text in value if isinstance(value, list) else [value]:
            path = Path(re.sub(r"\.py:\w+$", ".py", text)).absolute() if text and isinstance(text, str) else None
            if path and (wrong.is_relative_to(path) or path.is_relative_to(wrong)):
                named.append((len(text), at, text))
    _, at, text = max(named, default=(0, "", ""))
    return replace(of_path, where=loaded.places.where(at), given=f"{brief(text)}: {of_path.given}") if at else of_path


def _own_methods(checking: Checking) -> list[Problem]:
    problems: list[Problem] = []
    for method in (checking.recipe.algorithm.advantage, checking.recipe.algorithm.loss):
        if isinstance(method, OwnAdvantageConfig | OwnLossConfig):
            attempt(problems, method.function().load)
    return problems


CHECKS: Mapping[str, Check] = {
    "rules": (lambda c: True, lambda c: broken_rules(c.recipe)),
    "model": (lambda c: True, Checking.find_model),
    "tokenizer": (lambda c: True, Checking.find_tokenizer),
    "data": (lambda c: True, Checking.find_data),
    "critic": (lambda c: c.grpo, Checking.find_critic),
    "sandboxes of this machine": (lambda c: c.grpo and c.plan_only, Checking.find_sandboxes),
    "agent": (lambda c: c.grpo, Checking.find_agent),
    "models beside": (lambda c: c.grpo, Checking.find_models_beside),
    "teachers": (lambda c: c.grpo and c.recipe.teachers, Checking.find_teachers),
    "sizes": (lambda c: c.architecture, lambda c: model_problems(c.recipe, c.architecture)),
    "model class": (lambda c: c.has_files and c.samples, lambda c: c.recipe.rollout.kind.model_problems(c.model)),
    "metrics": (lambda c: c.grpo, lambda c: _metric_problems(c.recipe)),
    "reward functions": (lambda c: c.grpo, lambda c: reward_problems(c.recipe.reward, sandbox=not c.plan_only)),
    "evaluation": (lambda c: c.grpo, lambda c: own_reward_problems(c.recipe, sandbox=not c.plan_only)),
    "methods of your own": (lambda c: c.grpo, _own_methods),
    "room on disk": (
        lambda c: c.architecture and (not c.plan_only or runs_here(c.recipe)),
        lambda c: disk_problems(c.recipe, c.architecture, read_architecture(c.critic) if c.critic else None),
    ),
    "this machine's devices": (
        lambda c: not c.plan_only,
        lambda c: machine.device_problems(c.recipe, c.architecture, engines_too=c.engines_too),
    ),
    "packages": (lambda c: True, lambda c: machine.package_problems(c.recipe, c.architecture)),
    "engines": (lambda c: c.samples, lambda c: machine.engine_problems(c.recipe, c.architecture, c.plan_only)),
    "the cluster's address": (lambda c: True, lambda c: machine.address_problems(c.recipe, c.plan_only)),
    "directories": (lambda c: True, lambda c: machine.directory_problems(c.recipe)),
    "options of Megatron": (  # and their combinations, if nothing else is wrong
        lambda c: True,
        lambda c: machine.megatron_problems(c.recipe, None if c.problems else c.architecture, c.plan_only),
    ),
}
"""The checks before a run, in their order: the first ones find what the others look at."""


def tokenizer_of(recipe: AnyRecipe) -> PreTrainedTokenizerBase:
    """Returns the tokenizer of a recipe's model, with its chat template, which reads the recipe's arguments. Raises
    ModelError."""
    from megagrpo.tokenizer import load_chat_tokenizer  # imports transformers, which takes seconds

    directory = tokenizer_directory(recipe, model_directory(recipe, plan_only=True))
    tokenizer = load_chat_tokenizer(directory or recipe.model.path, recipe.model.chat_template)
    if directory and (problems := template_problems(directory, recipe)):
        raise ModelError(problems)
    return tokenizer


def own_reward_problems(recipe: Recipe, *, sandbox: bool) -> list[Problem]:
    """Returns the problems of the reward functions of evaluation sets."""
    return [
        replace(fault, where=re.sub(r"^reward\b", f"eval.sets.{name}", fault.where))
        for name, reward in own_rewards(recipe).items()
        for fault in reward_problems(reward, sandbox=sandbox)
    ]


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
            yield problem("metric_of_no_source", field=asking, source=source, sources=sources, set=name)
        elif len(sources) == 1:
            yield problem("metric_of_the_only_source", field=asking, source=source, set=name)


# --- megagrpo eval --------------------------------------------------------------------------------------------------


def check_sets(loaded: LoadedRecipe[Recipe]) -> None:
    """Checks rules, evaluation sets, their data and rewards. Raises PreflightError with every problem found."""
    recipe = loaded.recipe
    data = recipe.data.model_copy(update={"train": []})
    checking = Checking(recipe.model_copy(update={"data": data}), problems=broken_rules(recipe))
    checking.problems += [] if recipe.eval.sets else [problem("no_sets")]
    scored = any(not one.functions for one in recipe.eval.sets.values())
    names = ("data", *(["reward functions"] if scored else []), "evaluation", "the cluster's address")
    checking.run({name: CHECKS[name] for name in names})
    if checking.problems:
        raise PreflightError(_located(loaded, checking.problems))


def check_model(recipe: Recipe) -> Preflight[Recipe]:
    """Checks the model at model.path, its tokenizer, engines, reward models and their devices. If others run the
    servers, the weight files are not checked. Raises PreflightError with every problem found."""
    names = ("model", "tokenizer", "agent", "model class", "models beside", "engines")
    checking = Checking(recipe, weights_too=recipe.rollout.kind.started_by_us)
    checking.run({name: CHECKS[name] for name in names} | EVALUATION_CHECKS)
    ready = checking.result()
    model, tokenizer = ready.model_directory.absolute(), ready.tokenizer_directory.absolute()
    return replace(ready, model_directory=model, tokenizer_directory=tokenizer)


def _device_problems(checking: Checking) -> Iterator[Problem]:
    if not machine.joins_cluster(checking.recipe) and device_here(checking.recipe) == "cuda":
        needed, smaller = plan_engines(checking.recipe, "cuda").bundles, "rollout.engines=1, a smaller rollout.layout"
        yield from machine.gpu_problems(needed, "engines and reward models", smaller)


EVALUATION_CHECKS: dict[str, Check] = {
    "lengths": (lambda c: c.architecture, lambda c: token_problems(c.recipe, c.architecture)),
    "devices of engines": (lambda c: True, _device_problems),
}
"""The checks of a model to evaluate that no run has."""

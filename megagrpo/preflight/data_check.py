"""Checks of data: the first rows of its files before a run, and verifiers on each row's own ground truth, for which a
right response must get full marks, and a wrong one must not.

The verifiers' modules make right responses, as far as they can: `solution(ground_truth, ...)` is a response that is
right, None where there is none, ValueError for a ground truth that cannot be used. It may also name extra_info, and
arguments of its `make` by the same names and with the same defaults. Wrong are an empty response, and the right
responses of other rows.
"""

from __future__ import annotations

import inspect
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from megagrpo.data.files import place
from megagrpo.data.locations import files_of, is_absent, is_remote
from megagrpo.data.mixture import FileCount, file_labels, permutation
from megagrpo.data.rows import SchemaOf, data_sources, prompt_schema, quick_look
from megagrpo.errors import DataError, MegagrpoError, PathProblem, Problem, brief
from megagrpo.preflight.model import attempt
from megagrpo.progress import progress
from megagrpo.recipe.defaults import own_rewards
from megagrpo.recipe.reward_functions import executor_of
from megagrpo.recipe.schema import AnyRecipe, DataFileConfig, EntryConfig, Recipe, RewardConfig, SftRecipe
from megagrpo.recipe.schema.data import DecontaminateConfig
from megagrpo.recipe.schema.reward import RewardFunctionConfig
from megagrpo.reward.functions import FunctionSpec, function_specs, solution_maker, static_problems
from megagrpo.reward.scorer import Scorer
from megagrpo.section import problem
from megagrpo.types import Group, Prompt, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

AT_ONCE = 256
WORKERS_MAX = 4
SAMPLE, SAMPLE_SECONDS = 32, 30
"""Prompts of a run that are checked at its start, and the most seconds for it."""
FULL_MARKS = 1 - 1e-6
OTHERS = 3
"""Right responses of other rows to try before a row is reported to accept a wrong one."""
Solution = Callable[[str, Mapping[str, Any]], str | None]
Functions = dict[str, list[tuple[FunctionSpec, Solution | None]]]
"""The functions of each list of the recipe; None: not called by a check."""
ELSEWHERE = ("remote", "agent")
"""A server's scores cost something, as models' do; an agent's need a rollout."""
FORM = ("format", "language", "length", "repetition")
"""Functions that look at the form of a response alone, and may take an empty one for right."""


def prompt_lists(recipe: Recipe) -> dict[str, tuple[Sequence[DataFileConfig], RewardConfig]]:
    """Returns each list of prompt files in the recipe, by its path, with the reward that scores its rows."""
    rewards, sets = own_rewards(recipe), recipe.eval.files_of_sets()
    held_out = {f"eval.sets.{name}.files": (sets[name], rewards.get(name, recipe.reward)) for name in sets}
    return {"data.train": (recipe.data.train, recipe.reward), **held_out}


def lists_of(recipe: AnyRecipe) -> Mapping[str, tuple[Sequence[EntryConfig], RewardConfig | None]]:
    """Returns each list of data in the recipe, like prompt_lists. Conversations have no reward."""
    if isinstance(recipe, SftRecipe):
        return {"data.train": (recipe.data.train, None), "eval.files": (recipe.eval.files, None)}
    return {**prompt_lists(recipe)}


def absent_data(recipe: AnyRecipe) -> list[str]:
    """Returns paths that may be on the cluster: nothing here is under them, and no file here has a similar name."""
    absent = []
    for path in dict.fromkeys(file.location for files, _ in lists_of(recipe).values() for file in files):
        with suppress(OSError):  # data_problems reports it
            absent += [path] if is_absent(path) else []
    return absent


def data_problems(recipe: AnyRecipe, absent: Collection[str]) -> Iterator[Problem]:
    """Yields the problems of the data files that are here. Each names the recipe's field before the file."""
    for section, (files, reward) in lists_of(recipe).items():
        for index, file in enumerate(files):
            if not file.location or file.location in absent:
                continue
            where = f"{section}.{index}.path"
            problems: list[Problem] = []
            problems += attempt(problems, _entry_problems, file, reward) or []
            for fault in problems:
                yield fault if isinstance(fault, PathProblem) else replace(fault, where=f"{where}: {fault.where}")


def sources_of(files: Sequence[DataFileConfig]) -> set[str]:
    """Returns all data sources of these files; an empty set if a file is not here or wrong."""
    sources: set[str] = set()
    try:
        for file in files:
            for path in files_of(file.location):
                if quick_look(path, prompt_schema(file.columns)):
                    return set()
                sources |= {source for _, source in data_sources(path, file.columns)}
    except DataError:
        return set()
    return sources


def _entry_problems(file: EntryConfig, reward: RewardConfig | None) -> list[Problem]:
    """Returns an entry's problems. `reward` scores the rows; None for conversations. Raises DataError and OSError."""
    paths = files_of(file.location)
    if not isinstance(file, DataFileConfig) or reward is None:
        from megagrpo.data.messages import CONVERSATION_ROWS  # imports transformers, which takes seconds

        return _looked_at(paths, CONVERSATION_ROWS)
    problems = _looked_at(paths, prompt_schema(file.columns))
    if not problems and not reward.functions:
        for path in (path for path in paths if not is_remote(path)):
            unscored = (reward.source_problem(name, place(path, row)) for row, name in data_sources(path, file.columns))
            problems += filter(None, unscored)
    return problems


def _looked_at(paths: Sequence[str], schema_of: SchemaOf[Any]) -> list[Problem]:
    """Returns the problems of the first file that has any: those of one folder are mostly alike."""
    return next((problems for path in paths if (problems := quick_look(path, schema_of))), [])


@dataclass
class Checked:
    """The results of a check. By function: `unchecked`, rows with which it is not called; `only_empty`, rows for which
    no right response is known, so that an empty one alone is tried."""

    rows: int = 0
    problems: list[Problem] = field(default_factory=list)
    unchecked: Counter[str] = field(default_factory=Counter)
    only_empty: Counter[str] = field(default_factory=Counter)
    lengths: list[int] = field(default_factory=list)  # of prompts, in tokens

    def lines(self) -> Iterator[str]:
        """Yields the results of the checks, a line each."""
        if self.lengths:
            middle, longest = np.percentile(self.lengths, [50, 100])
            yield f"{self.rows} rows checked, of {middle:.0f} tokens in the middle and {longest:.0f} at most"
        for name, count in self.unchecked.items():
            yield f"{name} is not called but in a run: {count} rows are not checked with it"
        for name, count in self.only_empty.items():
            yield f"{name} makes no right response of its own: {count} rows are checked with an empty one alone"


class TimeIsUpError(MegagrpoError):
    """The error of a check that exceeds its time limit."""


def check_recipe(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, rows: int | None = None
) -> Iterator[tuple[str, Sequence[FileCount], Checked]]:
    """Checks all data of a recipe: files, template, lengths, and so many rows of each section, or all.

    Yields the name of data.train and of each evaluation set, its files, if they could be read, and the results.
    """
    from megagrpo.data.prompts import load_prompts  # imports transformers, which takes seconds

    of_sets = [file for files in recipe.eval.files_of_sets().values() for file in files]
    held_out = [file for file in of_sets if sources_of([file])]  # others are named with their set
    reported = (recipe.data.decontaminate or DecontaminateConfig()).model_copy(update={"action": "report"})
    data = recipe.data.model_copy(
        update={"decontaminate": reported if held_out or reported.against else None, "deduplicate": False}
    )
    for path, (files, reward) in prompt_lists(recipe).items():
        name = path.removesuffix(".files")
        against = held_out if name == "data.train" else None
        whole = [file.model_copy(update={"amount": "all", "weight": None}) for file in files]
        try:
            mixture = load_prompts(whole, tokenizer, data, recipe.seed, reward.source_problem, against)
        except DataError as error:
            yield name, (), Checked(problems=list(error.problems))
            continue
        if problems := static_problems(reward):
            yield name, mixture.files, Checked(problems=problems)
            continue
        checked = check_rows(mixture.items, reward, namer(files), rows=rows, seed=recipe.seed)
        yield name, mixture.files, checked


def sample_warnings(prompts: Sequence[Prompt], reward: RewardConfig) -> Iterator[str]:
    """Yields the warnings that a run prints at its start about some of its prompts; nothing if all is well."""
    try:
        checked = check_rows(prompts, reward, lambda name: f"prompt {name}", seconds=SAMPLE_SECONDS)
    except TimeIsUpError:
        yield f"warning: reward functions took more than {SAMPLE_SECONDS} s on their own ground truths: not all checked"
        return
    if checked.problems:
        yield f"warning: {len(checked.problems)} of {checked.rows} prompts fail with their own ground truth, such as"
        yield str(checked.problems[0])
        yield "`megagrpo data check RECIPE` names all of them"


def namer(files: Sequence[DataFileConfig]) -> Callable[[str], str]:
    """Returns a function that names the row of a prompt's id in errors: its file and number."""
    paths = [path for file in files for path in files_of(file.location)]
    by_label = dict(zip(file_labels(paths), paths, strict=True))

    def name(prompt: str) -> str:
        label, _, number = prompt.rpartition(":")
        return place(by_label[label], int(number)) if label in by_label else prompt

    return name


def check_rows(
    prompts: Sequence[Prompt],
    reward: RewardConfig,
    where: Callable[[str], str],
    *,
    rows: int | None = None,
    seed: int = 0,
    seconds: float | None = None,
) -> Checked:
    """Checks so many rows, drawn by the seed, or all. `where` names the row of a prompt's id in a problem.

    Functions that ask models or servers, and a user's own, are not called. Raises RewardError if a function cannot be
    loaded, TimeIsUpError after so many seconds.
    """
    checked = Checked()
    functions: Functions = {field: [] for field in reward.lists()}
    for spec in function_specs(reward):
        functions[spec.where.rpartition("[")[0]].append((spec, solution_of(spec)))
    order = np.arange(len(prompts)) if rows is None else np.sort(permutation(len(prompts), seed)[:rows])
    ends = math.inf if seconds is None else time.monotonic() + seconds

    def check_time() -> None:
        if time.monotonic() > ends:
            raise TimeIsUpError(Problem(f"after {checked.rows} rows", f"{seconds:g} s", "less time for each row"))

    scorer = Scorer(_runnable(reward, functions), 1, check=check_time) if any(functions.values()) else None
    indices = iter(order.tolist())
    with progress("checking rows", len(order)) as work, closing(scorer) if scorer else nullcontext():
        while batch := [prompts[index] for index in islice(indices, AT_ONCE)]:
            checked.rows += len(batch)
            checked.lengths += [len(prompt.tokens) for prompt in batch]
            _check_batch(checked, batch, reward, functions, scorer, where)
            work.advance(len(batch))
    return checked


def _runnable(reward: RewardConfig, functions: Functions) -> RewardConfig:
    """Returns the reward with only the functions that are called, by their names in the whole."""

    def kept(field: str) -> list[RewardFunctionConfig]:
        named = zip(reward.lists().get(field, []), functions.get(field, []), strict=True)
        return [entry.model_copy(update={"name": spec.name}) for entry, (spec, solution) in named if solution]

    by_source = {source: kept(f"reward.by_source.{source}") for source in reward.by_source}
    workers = min(reward.workers, WORKERS_MAX)  # the recipe counts the workers of all nodes
    changed = {"functions": kept("reward.functions"), "by_source": by_source, "failed_share_max": 1.0}
    return reward.model_copy(update={**changed, "workers": workers})


def _check_batch(
    checked: Checked,
    prompts: Sequence[Prompt],
    reward: RewardConfig,
    functions: Functions,
    scorer: Scorer | None,
    where: Callable[[str], str],
) -> None:
    lists = [str(reward.list_of(prompt.data_source)) for prompt in prompts]
    no_tokens = np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32)
    groups: list[Group] = []
    tried: list[tuple[FunctionSpec, str | None, list[str]]] = []
    for row, prompt in enumerate(prompts):
        for spec, solution in functions.get(lists[row], ()):  # teachers alone: none
            if solution is None:
                checked.unchecked[spec.name] += 1
                continue
            right = _response(solution, prompt)
            others = (
                wrong
                for other in (*range(row + 1, len(prompts)), *range(row))
                if lists[other] == lists[row] and prompts[other].ground_truth != prompt.ground_truth
                if (wrong := _response(solution, prompts[other])) not in (None, right)
            )
            wrongs = [] if right is None else [text for text in islice(others, OTHERS) if text is not None]
            checked.only_empty.update([spec.name] if right is None else [])
            texts = enumerate(["", *([] if right is None else [right]), *wrongs])
            groups.append(Group(prompt, tuple(Sample(prompt.id, n, *no_tokens, "stop", text) for n, text in texts)))
            tried.append((spec, right, wrongs))
    scored = scorer.score_unshaped(groups) if scorer and groups else []
    for group, (spec, right, wrongs) in zip(scored, tried, strict=True):
        checked.problems += _problems(group, spec, right, wrongs, where(group.prompt.id))


def _response(solution: Solution, prompt: Prompt) -> str | None:
    try:
        response = solution(prompt.ground_truth, prompt.extra_info)
    except ValueError:  # an unusable ground truth: calling the function reports it
        return prompt.ground_truth
    if response is not None and "</think>" not in response and prompt.text.rstrip().endswith("<think>"):
        return f"</think>{response}"
    return response


def _problems(
    group: Group, spec: FunctionSpec, right: str | None, others: Sequence[str], where: str
) -> Iterator[Problem]:
    """Yields at most one problem of one row with one function. The responses are an empty one, the right one if any is
    known, and the others."""
    row = {"row": where, "name": spec.name, "truth": brief(group.prompt.ground_truth)}
    scores = [score.parts.get(spec.name) for score in group.scores]
    marks = [mark or 0.0 for mark in scores]
    if None in scores[:2]:
        yield problem("truth_not_used", **row, error=group.scores[scores.index(None)].error)
    elif right is not None and marks[1] < FULL_MARKS:
        yield problem("truth_not_right", **row, mark=marks[1], response=brief(right))
    elif marks[0] >= FULL_MARKS and spec.function not in FORM:
        yield problem("empty_response_right", **row, mark=marks[0])
    elif others and all(mark >= FULL_MARKS for mark in marks[2:]):
        yield problem("other_answer_right", **row, response=brief(others[0]))


def solution_of(spec: FunctionSpec) -> Solution | None:
    """Returns the maker of right responses for a function of the recipe; it makes none if the module has none.
    Returns None for functions that only a run calls: a user's own, those that ask models, and ELSEWHERE."""
    if not spec.built_in or spec.function in ELSEWHERE or executor_of(spec.function) == "asking":
        return None
    make = solution_maker(spec.function)
    if make is None:
        return lambda ground_truth, extra_info: None
    parameters = inspect.signature(make).parameters
    arguments = {name: value for name, value in spec.arguments.items() if name in parameters}

    return lambda ground_truth, extra_info: make(
        ground_truth, **({"extra_info": extra_info} if "extra_info" in parameters else {}), **arguments
    )

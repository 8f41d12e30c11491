"""From the recipe's `reward:` section to function specs, with everything wrong found before a run starts."""

from __future__ import annotations

import difflib
import importlib.util
from collections import Counter

from megagrpo.errors import Problem, RewardError
from megagrpo.recipe import schema
from megagrpo.reward.loading import BUILT_IN, FunctionSpec, load_built_in, user_file_problem
from megagrpo.reward.workers import load_problems

INLINE = ("gsm8k",)
"""Run in the caller's process: fast whatever the response. A `format` pattern can backtrack for hours, so it is not."""

TAKEN_NAMES = ("mean", "std", "max", "min", "errors", "solved_share", "truncated_masked", "overlong", "greedy")
"""Metrics of the whole reward: a function of that name would have the same `reward/NAME`."""


def function_specs(reward: schema.RewardConfig) -> tuple[FunctionSpec, ...]:
    """One spec per entry. A second function of the same name is called `name_2`, and so on."""
    seen: Counter[str] = Counter()
    specs = []
    for index, entry in enumerate(reward.functions):
        name = entry.function.rpartition(":")[2]
        seen[name] += 1
        unique = name if seen[name] == 1 else f"{name}_{seen[name]}"
        specs.append(
            FunctionSpec(unique, entry.function, entry.weight, entry.arguments, where=f"reward.functions[{index}]")
        )
    return tuple(specs)


def load_functions(reward: schema.RewardConfig) -> tuple[FunctionSpec, ...]:
    """The specs, or RewardError for what is known without running a user's code (workers do that when they start)."""
    problems = _static_problems(reward)
    if problems:
        raise RewardError(problems)
    return function_specs(reward)


def reward_problems(reward: schema.RewardConfig) -> list[Problem]:
    """Everything wrong with the section. Files of the user's own are imported, in a process that ends afterwards."""
    problems = _static_problems(reward)
    loadable = [spec for spec in function_specs(reward) if not spec.built_in and user_file_problem(spec) is None]
    return problems + (load_problems(loadable) if loadable else [])


def _static_problems(reward: schema.RewardConfig) -> list[Problem]:
    specs = function_specs(reward)
    problems = [problem for spec in specs for problem in _spec_problems(spec)]
    isolated = [spec.function for spec in specs if spec.function not in INLINE]
    if isolated and reward.workers == 0:
        problems.append(Problem("reward.workers", given="0", needed=f"at least 1, for {', '.join(isolated)}"))
    return problems


def _spec_problems(spec: FunctionSpec) -> list[Problem]:
    if spec.name in TAKEN_NAMES:
        return [
            Problem(
                f"{spec.where}.function",
                given=f"a function called {spec.name}, which is the metric reward/{spec.name} of the whole reward",
                needed=f"a name other than {', '.join(TAKEN_NAMES)}",
                fix=f"rename it, such as {spec.name}_score",
            )
        ]
    if not spec.built_in:
        near = difflib.get_close_matches(spec.function, BUILT_IN, n=1)
        problem = user_file_problem(spec)
        if problem is not None and near:
            return [Problem(problem.where, problem.given, problem.needed, fix=f"did you mean {near[0]}?")]
        return [problem] if problem is not None else []
    if spec.function == "math":  # its make() imports sympy, which takes longer than a check should
        if spec.arguments:
            return [
                Problem(
                    f"{spec.where}.arguments", given=", ".join(spec.arguments), needed="none: math has no arguments"
                )
            ]
        if importlib.util.find_spec("math_verify") is None:
            return [
                Problem(
                    f"{spec.where}.function",
                    given="math",
                    needed="the package math-verify",
                    fix="pip install math-verify",
                )
            ]
        return []
    try:
        load_built_in(spec)
    except RewardError as error:
        return list(error.problems)
    return []

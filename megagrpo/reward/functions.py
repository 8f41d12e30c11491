"""Reward functions: how they are called, what they may return, and how the recipe's entries become callables.

Worker processes import this module, so it imports nothing heavy.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import math
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megagrpo.errors import Problem, RewardError, brief
from megagrpo.user_functions import file_problem, load_function, refused_call

if TYPE_CHECKING:
    from megagrpo.recipe.schema import RewardConfig

RewardReturn = float | Mapping[str, Any]
RewardCallable = Callable[..., RewardReturn | Awaitable[RewardReturn]]
"""Called by keyword: (data_source: str, response: str, ground_truth: str, extra_info: Mapping)."""

METRICS_MAX = 100
"""How many numbers a function may return beside its score for one response."""
ERROR_CHARACTERS_MAX, TRACE_CHARACTERS_MAX = 300, 4000

CALL_ARGUMENTS = ("data_source", "response", "ground_truth", "extra_info")

BUILT_IN = ("gsm8k", "math", "format")
"""Each is the module of that name in this package, with `make(**arguments) -> RewardCallable`."""

INLINE = ("gsm8k",)
"""Called in the scorer's process, because they are fast whatever the response. `format` is not: a pattern can backtrack
for hours."""

TAKEN_NAMES = ("mean", "std", "max", "min", "errors", "solved_share", "truncated_masked", "overlong", "greedy")
"""Metrics of the whole reward: a function of that name would have the same `reward/NAME`."""


@dataclass(frozen=True, slots=True)
class Task:
    """One response for one function."""

    data_source: str
    response: str
    ground_truth: str
    extra_info: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one function returned for one response: a finite score with other metrics, or an error."""

    score: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    error: str = ""
    trace: str = ""
    """Where a function raised, as Python tells it; the last lines of it."""


def call(function: RewardCallable, task: Task) -> RewardReturn | Awaitable[RewardReturn]:
    return function(
        data_source=task.data_source,
        response=task.response,
        ground_truth=task.ground_truth,
        extra_info=task.extra_info,
    )


def outcome_of(returned: object) -> Outcome:
    """Checks a return value: a finite number, or a mapping with a finite `score` and other finite metrics."""
    if type(returned) is float and math.isfinite(returned):  # nearly always
        return Outcome(returned)
    values = dict(returned) if isinstance(returned, Mapping) else {"score": returned}
    if "score" not in values:
        keys = ", ".join(map(str, values)) or "(none)"
        return Outcome(None, error=f"returned a mapping without 'score': keys {keys}")
    if len(values) - 1 > METRICS_MAX:
        return Outcome(None, error=f"returned {len(values) - 1:,} metrics, not at most {METRICS_MAX}")
    metrics: dict[str, float] = {}
    for name, value in values.items():
        number = _number(value)
        if number is None:
            return Outcome(None, error=f"returned {brief(value)} as {name}, not a number")
        if not math.isfinite(number):
            return Outcome(None, error=f"returned {number} as {name}, not a finite number")
        metrics[str(name)[:ERROR_CHARACTERS_MAX]] = number
    return Outcome(metrics.pop("score"), metrics)


def checked_outcome(message: Mapping[str, Any]) -> Outcome:
    """The Outcome whose fields came from another process. Raises ValueError if they are no Outcome's."""
    score, metrics, error, trace = (message.get(name) for name in ("score", "metrics", "error", "trace"))
    if not isinstance(metrics, dict) or not isinstance(error, str) or not isinstance(trace, str):
        raise ValueError("an answer without its fields")
    if (score is None) != bool(error):
        raise ValueError("an answer with neither a score nor an error, or with both")
    outcome = Outcome(None) if score is None else outcome_of({**metrics, "score": score})
    if outcome.error:
        raise ValueError(outcome.error)
    return replace(outcome, error=error[: 4 * ERROR_CHARACTERS_MAX], trace=trace[-TRACE_CHARACTERS_MAX:])


def failure_of(raised: BaseException) -> Outcome:
    """The outcome of a function that raised."""
    trace = "".join(traceback.format_exception(raised))[-TRACE_CHARACTERS_MAX:]
    try:
        text = f"{type(raised).__name__}: {raised}"
    except Exception:  # noqa: BLE001  (an exception of a user's may fail to say what it is)
        text = type(raised).__name__
    return Outcome(None, error=text.removesuffix(": ").splitlines()[0][:ERROR_CHARACTERS_MAX], trace=trace)


def timed_out(timeout_seconds: float) -> Outcome:
    """The outcome of a function that did not return in time."""
    return Outcome(None, error=f"took longer than {timeout_seconds:g} s")


def _number(value: object) -> float | None:
    # __float__ admits numpy and torch scalars, Decimal and Fraction, and keeps out text.
    if not hasattr(value, "__float__"):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None


# --- from the recipe's entries to callables ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FunctionSpec:
    """One entry of reward.functions. `name` is unique among them and is its key in Score.parts."""

    name: str
    function: str
    weight: float
    arguments: Mapping[str, Any]
    where: str
    source: bytes | None = None
    """The text of the user's file, once it has been read: whatever becomes of the file, workers run the same."""

    @property
    def built_in(self) -> bool:
        return self.function in BUILT_IN


def function_specs(reward: RewardConfig) -> tuple[FunctionSpec, ...]:
    """One spec per entry. A second function of the same name is called `name_2`, and so on."""
    seen: Counter[str] = Counter()
    specs = []
    for index, entry in enumerate(reward.functions):
        name = entry.function.rpartition(":")[2]
        seen[name] += 1
        unique = name if seen[name] == 1 else f"{name}_{seen[name]}"
        where = f"reward.functions[{index}]"
        specs.append(FunctionSpec(unique, entry.function, entry.weight, entry.arguments, where))
    return tuple(specs)


def static_problems(reward: RewardConfig) -> list[Problem]:
    """What is wrong with the section, as far as it is known without running a user's code."""
    specs = function_specs(reward)
    problems = [problem for spec in specs for problem in _spec_problems(spec)]
    isolated = [spec.function for spec in specs if spec.function not in INLINE]
    if isolated and reward.workers == 0:
        problems.append(Problem("reward.workers", given="0", needed=f"at least 1, for {', '.join(isolated)}"))
    return problems


def _spec_problems(spec: FunctionSpec) -> list[Problem]:
    where = f"{spec.where}.function"
    if spec.name in TAKEN_NAMES:
        given = f"a function called {spec.name}, which is the metric reward/{spec.name} of the whole reward"
        needed = f"a name other than {', '.join(TAKEN_NAMES)}"
        return [Problem(where, given, needed, fix=f"rename it, such as {spec.name}_score")]
    if not spec.built_in:
        problem = user_file_problem(spec)
        return [problem] if problem else []
    if spec.function == "math":  # its make() imports sympy, which takes longer than a check should
        if spec.arguments:
            needed = "none: math has no arguments"
            return [Problem(f"{spec.where}.arguments", given=", ".join(spec.arguments), needed=needed)]
        if importlib.util.find_spec("math_verify") is None:
            return [Problem(where, "math", needed="the package math-verify", fix="pip install math-verify")]
        return []
    try:
        _load_built_in(spec)
    except RewardError as error:
        return list(error.problems)
    return []


def user_file_problem(spec: FunctionSpec) -> Problem | None:
    """What can be known of FILE.py:FUNCTION without running the file."""
    problem = file_problem(spec.function, f"{spec.where}.function", f"{', '.join(BUILT_IN)}, or ")
    if problem is not None and (near := difflib.get_close_matches(spec.function, BUILT_IN, n=1)):
        return replace(problem, fix=f"did you mean {near[0]}?")
    return problem


def with_source(spec: FunctionSpec) -> FunctionSpec:
    """The spec with the text of the user's file. Raises RewardError if it cannot be read."""
    if spec.built_in:
        return spec
    if problem := user_file_problem(spec):
        raise RewardError(problem)
    file = Path(spec.function.rpartition(":")[0])
    try:
        return replace(spec, source=file.read_bytes())
    except OSError as error:
        raise RewardError(Problem(f"{spec.where}.function", f"{file}: {error.strerror}", "a file to read")) from error


def load(spec: FunctionSpec) -> RewardCallable:
    """The callable of a spec, arguments bound. Raises RewardError. Importing a user's file runs its code."""
    return _load_built_in(spec) if spec.built_in else _load_user_function(spec)


def _load_built_in(spec: FunctionSpec) -> RewardCallable:
    make = importlib.import_module(f"megagrpo.reward.{spec.function}").make
    where = f"{spec.where}.arguments"
    if refusal := refused_call(make, **spec.arguments):
        raise RewardError(Problem(where, given=refusal, needed=f"{spec.function}{inspect.signature(make)}"))
    try:
        return make(**spec.arguments)
    except ValueError as error:
        raise RewardError(Problem(where, given=str(error))) from None


def _load_user_function(spec: FunctionSpec) -> RewardCallable:
    where, name = f"{spec.where}.function", spec.function.rpartition(":")[2]
    function = load_function(spec.function, where, RewardError, spec.source)
    if refusal := refused_call(function, **dict.fromkeys(CALL_ARGUMENTS, ""), **spec.arguments):
        needed = f"{name}({', '.join([*CALL_ARGUMENTS, *spec.arguments])}), called by these names"
        raise RewardError(Problem(where, given=f"{name}{inspect.signature(function)}: {refusal}", needed=needed))
    return partial(function, **spec.arguments)

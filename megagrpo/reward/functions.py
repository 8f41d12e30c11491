"""Reward functions: their arguments, their return values, and the loading of the recipe's entries.

Worker processes import this module, so it imports nothing heavy.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import math
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import ModuleType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Self, get_args, get_origin

from megagrpo.errors import Problem, RewardError, brief
from megagrpo.recipe.reward_functions import BUILT_IN, executor_of
from megagrpo.reward.sandbox.sandbox import Isolation
from megagrpo.user_functions import file_problem, load_function, refused_call

if TYPE_CHECKING:  # a worker needs neither pydantic nor numpy
    from megagrpo.recipe.schema import RewardConfig
    from megagrpo.types import Prompt, Sample

RewardReturn = float | Mapping[str, Any]
RewardCallable = Callable[..., Any]
"""Called by keyword with those of RESPONSE_ARGUMENTS or GROUP_ARGUMENTS that its parameters name."""

METRICS_MAX = 100
"""Most numbers that a function may return beside its score for one response."""
ERROR_CHARACTERS_MAX, TRACE_CHARACTERS_MAX = 300, 4000

ROW_ARGUMENTS = ("data_source", "prompt", "prompt_text", "ground_truth", "ability", "extra_info")
AGENT_ARGUMENTS = ("messages", "tool_calls", "agent_reward")
"""The conversation with its answers, the calls in it, and what the agent gave: a mapping with "score", or None."""
RESPONSE_ARGUMENTS = (*ROW_ARGUMENTS, "response", "solution_str", "tokens", "finish", *AGENT_ARGUMENTS)
"""Names of the arguments of a function of one response; solution_str is verl's name of the response."""
GROUP_ARGUMENTS = (*ROW_ARGUMENTS, "responses", "tokens", "finish", *AGENT_ARGUMENTS)
"""Names of the arguments of a function of a group, which names `responses`. Values per response are lists."""
BY_NAME = ("solution_str", *AGENT_ARGUMENTS)
"""Arguments that a function gets only if a parameter names them: **arguments is not enough."""

ANSWER = "answer"
NOTE_CHARACTERS_MAX = 2000
NOTES_MAX = 20

SANDBOXED = ("code", "reasoning_gym")
"""Verifiers that score in a sandbox, for `seconds` at most; `isolation` selects the sandbox."""

TAKEN_NAMES = (
    "mean", "std", "max", "min", "errors", "errors_share", "solved_share", "truncated_masked", "overlong", "greedy",
)  # fmt: skip
"""Metrics of the whole reward: a function of such a name would write the same `reward/NAME`."""


@dataclass(frozen=True, slots=True)
class Signature:
    """The names of the arguments that a reward function takes, and whether it is async."""

    wanted: tuple[str, ...]
    is_async: bool

    @property
    def by_group(self) -> bool:
        """Returns whether one call scores all responses of a group."""
        return "responses" in self.wanted


@dataclass(frozen=True, slots=True)
class Function(Signature):
    """A loaded reward function."""

    function: RewardCallable
    arguments: Any = None
    """Checked arguments of a function that is called with a model first: they name it and say how it is asked."""

    @classmethod
    def of(cls, function: RewardCallable, arguments: Any = None) -> Self:
        """Makes a Function from a built-in one, whose parameters name what it takes."""
        return cls(wanted_arguments(function, {}), inspect.iscoroutinefunction(function), function, arguments)


def messages_of(prompt: Prompt, sample: Sample) -> list[dict[str, Any]]:
    """Returns the messages of the whole conversation, answers included."""
    if sample.agent is not None:
        return [dict(message) for message in sample.agent.messages]
    return [*map(dict, prompt.messages), {"role": "assistant", "content": sample.text}]


def tool_calls_of(prompt: Prompt, sample: Sample) -> list[dict[str, Any]]:
    """Returns the calls in the policy's answers: name, arguments, and result (the text that came back, or None). Leaves
    out calls that the row or the agent gives as examples."""
    if sample.agent is None:
        return []
    messages = sample.agent.messages
    answers = [event["said"] for event in sample.agent.events if event["kind"] == "turn"]
    results = {message.get("tool_call_id"): message.get("content") for message in messages if message["role"] == "tool"}
    return [
        {**{key: call["function"][key] for key in ("name", "arguments")}, "result": results.get(call.get("id"))}
        for message in messages
        for call in message.get("tool_calls") or ()
        if message in answers
    ]


OF_SAMPLE: dict[str, Callable[[Prompt, Sample], Any]] = {
    **dict.fromkeys(("response", "responses", "solution_str"), lambda prompt, sample: sample.text),
    "tokens": lambda prompt, sample: sample.tokens.tolist(),
    "finish": lambda prompt, sample: sample.finish,
    "messages": messages_of,
    "tool_calls": tool_calls_of,
    "agent_reward": lambda prompt, sample: sample.agent and sample.agent.reward and dict(sample.agent.reward),
}
"""Arguments that each response has of its own. The others are the prompt's."""


@dataclass(frozen=True, slots=True)
class Task:
    """The input of one call: one response to a prompt, or all of a group for a function `by_group`."""

    prompt: Prompt
    samples: tuple[Sample, ...]

    def arguments(self, wanted: Sequence[str]) -> dict[str, Any]:
        """Returns the arguments of these names as plain values."""
        arguments: dict[str, Any] = {}
        for name in wanted:
            if of_sample := OF_SAMPLE.get(name):
                values = [of_sample(self.prompt, sample) for sample in self.samples]
                arguments[name] = values if "responses" in wanted else values[0]
            elif name == "prompt":
                arguments[name] = [dict(message) for message in self.prompt.messages]
            else:
                arguments[name] = getattr(self.prompt, "text" if name == "prompt_text" else name)
        return arguments


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one function for one response: a finite score with metrics and notes, an error, or a mask."""

    score: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)
    """Texts that it returned beside the score. `answer` is the answer that it read."""
    error: str = ""
    trace: str = ""
    """The end of the traceback of a function that raised."""
    masked: str = ""
    """The reason why the recipe leaves the response out: no failure, and no score."""


def outcomes_of(returned: object, by_group: bool, responses: int) -> list[Outcome]:
    """Returns one outcome per response from the return value of a call, which is a list if `by_group`."""
    if not by_group:
        return [outcome_of(returned)]
    if not isinstance(returned, list | tuple) or len(returned) != responses:
        given = f"{len(returned)} values" if isinstance(returned, list | tuple) else brief(returned)
        return [Outcome(None, error=f"returned {given}, not a list of {responses} scores")] * responses
    return [outcome_of(value) for value in returned]


def outcome_of(returned: object) -> Outcome:
    """Checks a return value: a finite number, or a mapping with a finite `score`, other finite metrics, and texts.
    Returns an Outcome unchanged: functions that ask models return one if a single response of several has no score."""
    if isinstance(returned, Outcome):
        return returned
    if type(returned) is float and math.isfinite(returned):  # nearly always
        return Outcome(returned)
    values = dict(returned) if isinstance(returned, Mapping) else {"score": returned}
    if "score" not in values:
        keys = ", ".join(map(str, values)) or "(none)"
        return Outcome(None, error=f"returned a mapping without 'score': keys {keys}")
    if len(values) - 1 > METRICS_MAX:
        return Outcome(None, error=f"returned {len(values) - 1:,} metrics, not at most {METRICS_MAX}")
    metrics: dict[str, float] = {}
    notes: dict[str, str] = {}
    for name, value in values.items():
        if name != "score" and (value is None or isinstance(value, str)):
            if value is not None and len(notes) < NOTES_MAX:
                notes[str(name)[:ERROR_CHARACTERS_MAX]] = value[:NOTE_CHARACTERS_MAX]
            continue
        try:  # __float__ admits numpy and torch scalars, Decimal and Fraction, and keeps out text
            number = float(value) if hasattr(value, "__float__") else None
        except (TypeError, ValueError, OverflowError, RuntimeError):
            number = None
        if number is None:
            return Outcome(None, error=f"returned {brief(value)} as {name}, not a number")
        if not math.isfinite(number):
            return Outcome(None, error=f"returned {number} as {name}, not a finite number")
        metrics[str(name)[:ERROR_CHARACTERS_MAX]] = number
    return Outcome(metrics.pop("score"), metrics, notes)


def checked_outcome(sent: Outcome) -> Outcome:
    """Returns an Outcome that came from another process, within its limits. Raises ValueError if it is invalid."""
    if (sent.score is None) != bool(sent.error):
        raise ValueError("an answer with neither a score nor an error, or with both")
    given = {**sent.metrics, **sent.notes, "score": sent.score}
    outcome = Outcome(None) if sent.score is None else outcome_of(given)
    if outcome.error:
        raise ValueError(outcome.error)
    return replace(outcome, error=sent.error[: 4 * ERROR_CHARACTERS_MAX], trace=sent.trace[-TRACE_CHARACTERS_MAX:])


def failure_of(raised: BaseException) -> Outcome:
    """Returns the outcome of a function that raised."""
    trace = "".join(traceback.format_exception(raised))[-TRACE_CHARACTERS_MAX:]
    text = type(raised).__name__
    with suppress(Exception):  # an exception of a user's may fail to say what it is
        text = f"{text}: {raised}"
    return Outcome(None, error=text.removesuffix(": ").splitlines()[0][:ERROR_CHARACTERS_MAX], trace=trace)


def timed_out(timeout_seconds: float) -> Outcome:
    """Returns the outcome of a function that did not return within the timeout."""
    return Outcome(None, error=f"took longer than {timeout_seconds:g} s")


# --- from the recipe's entries to callables ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FunctionSpec:
    """An entry of reward.functions or of a list of reward.by_source. `name`, its key in Score.parts, is unique in its
    list."""

    name: str
    function: str
    weight: float
    arguments: Mapping[str, Any]
    where: str
    gated: bool = False
    """True if it counts only if the functions of its list without a gate give a sum other than 0."""
    source: bytes | None = None
    """The text of the user's file, once read. Workers run this text, even if the file changes."""

    @property
    def built_in(self) -> bool:
        return self.function in BUILT_IN


def function_specs(reward: RewardConfig) -> tuple[FunctionSpec, ...]:
    """Returns one spec per entry, list after list. Renames a second function of the same name in a list `name_2`, the
    next `name_3`."""
    specs = []
    for where, entries in reward.lists().items():
        counts: Counter[str] = Counter()
        gated = [
            entry.counts == "when_others_score" or (entry.counts == "auto" and entry.function == "format")
            for entry in entries
        ]
        if all(gated):  # none could open a gate: auto then means no gate
            gated = [entry.counts != "auto" for entry in entries]
        for index, entry in enumerate(entries):
            name = entry.name or entry.function.rpartition(":")[2]
            counts[name] += 1
            unique = name if counts[name] == 1 else f"{name}_{counts[name]}"
            place = f"{where}[{index}]"
            specs.append(FunctionSpec(unique, entry.function, entry.weight, entry.arguments, place, gated[index]))
    return tuple(specs)


def static_problems(reward: RewardConfig, *, sandbox: bool = True) -> list[Problem]:
    """Returns the problems of the section that are found without running a user's code.

    Without `sandbox`, does not try out the sandbox that functions need: the run may start on another machine.
    """
    specs = function_specs(reward)
    problems = [problem for spec in specs for problem in _spec_problems(spec, reward.timeout_seconds, sandbox)]
    isolated = list(dict.fromkeys(spec.function for spec in specs if executor_of(spec.function) == "workers"))
    if isolated and reward.workers == 0:
        problems.append(Problem("reward.workers", given="0", needed=f"at least 1, for {', '.join(isolated)}"))
    return problems


def sandbox_problems(reward: RewardConfig) -> list[Problem]:
    """Returns the problems of the section on this machine alone: those of an isolation that it lacks."""
    elsewhere = static_problems(reward, sandbox=False)
    return [] if elsewhere else static_problems(reward)


def _spec_problems(spec: FunctionSpec, timeout_seconds: float, sandbox: bool) -> list[Problem]:
    if spec.name in TAKEN_NAMES:
        given = f"a function called {spec.name}, which is the metric reward/{spec.name} of the whole reward"
        needed = f"a name other than {', '.join(TAKEN_NAMES)}"
        return [Problem(f"{spec.where}.function", given, needed, fix=f"rename it, such as {spec.name}_score")]
    if not spec.built_in:
        problem = user_file_problem(spec)
        return [problem] if problem else []
    if spec.function == "math":  # its make() imports sympy, which takes longer than a check should
        return _argument_problems(spec)
    isolated = spec.function in SANDBOXED
    if isolated and not sandbox and spec.arguments.get("isolation", "auto") in get_args(Isolation):
        spec = replace(spec, arguments={**spec.arguments, "isolation": "none"})
    try:
        load(spec)
    except RewardError as error:
        return list(error.problems)
    if isolated:
        default = inspect.signature(maker_of(spec.function)).parameters["seconds"].default
        seconds = spec.arguments.get("seconds", default)
        if seconds >= timeout_seconds:
            needed = f"less than {timeout_seconds:g}, reward.timeout_seconds: slow programs would have no score"
            where, fix = f"{spec.where}.arguments.seconds", "raise reward.timeout_seconds"
            return [Problem(where, f"{seconds:g}", needed, fix)]
    return []


def user_file_problem(spec: FunctionSpec) -> Problem | None:
    """Returns the problem of FILE.py:FUNCTION that is found without running the file, or None."""
    problem = file_problem(spec.function, f"{spec.where}.function", f"{', '.join(BUILT_IN)}, or ")
    if problem is not None and (near := difflib.get_close_matches(spec.function, BUILT_IN, n=1)):
        return replace(problem, fix=f"did you mean {near[0]}?")
    return problem


def with_source(spec: FunctionSpec) -> FunctionSpec:
    """Returns the spec with the text of the user's file. Raises RewardError if it cannot be read."""
    if spec.built_in:
        return spec
    file = Path(spec.function.rpartition(":")[0])
    try:
        return replace(spec, source=file.read_bytes())
    except OSError as error:
        raise RewardError(Problem(f"{spec.where}.function", f"{file}: {error.strerror}", "a file to read")) from error


def load(spec: FunctionSpec) -> Function:
    """Returns the function of a spec with the recipe's arguments bound. Raises RewardError. Runs a user's file."""
    if spec.built_in:
        if problems := _argument_problems(spec):
            raise RewardError(problems)
        try:
            made = maker_of(spec.function)(**spec.arguments)
        except ValueError as error:
            raise RewardError(Problem(f"{spec.where}.arguments", given=str(error))) from None
        return made if isinstance(made, Function) else Function.of(made)
    where, name = f"{spec.where}.function", spec.function.rpartition(":")[2]
    function = load_function(spec.function, where, RewardError, spec.source)
    wanted = wanted_arguments(function, spec.arguments)
    if refusal := refused_call(function, **dict.fromkeys(wanted, ""), **spec.arguments):
        named = [*spec.arguments, *(RESPONSE_ARGUMENTS if "responses" not in wanted else GROUP_ARGUMENTS)]
        needed = f"a function that can be called by name, with parameters among {', '.join(dict.fromkeys(named))}"
        raise RewardError(Problem(where, given=f"{name}{inspect.signature(function)}: {refusal}", needed=needed))
    if not {"response", "solution_str", "responses", "tokens", *AGENT_ARGUMENTS} & {*wanted, *spec.arguments}:
        needed = "a parameter response, responses, tokens or messages, to be scored"
        raise RewardError(Problem(where, given=f"{name}{inspect.signature(function)}", needed=needed))
    function = partial(function, **spec.arguments) if spec.arguments else function
    return Function(wanted, inspect.iscoroutinefunction(function), function)


def wanted_arguments(function: RewardCallable, bound: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the argument names that a function's parameters ask for, except those that the recipe binds (`bound`)."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a callable written in C may have no signature
        return ("data_source", "response", "ground_truth", "extra_info")
    names = [parameter.name for parameter in parameters]
    known = GROUP_ARGUMENTS if "responses" in names and "responses" not in bound else RESPONSE_ARGUMENTS
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        names = [name for name in known if name not in BY_NAME or name in names]
    return tuple(name for name in known if name in names and name not in bound)


MODULES = {
    **dict.fromkeys(("string_match", "f1", "search_answer"), "words"),
    **dict.fromkeys(("format", "think_answer", "length", "repetition"), "form"),
    **dict.fromkeys(("judge", "judge_pairs", "judge_ranking", "reward_model"), "judges"),
}
"""Modules of reward/verifiers/ with several functions, each made by the function of its name. Any other module has the
name of its only function, which `make` makes."""


def module_of(function: str) -> ModuleType:
    """Imports the module of a built-in function."""
    return importlib.import_module(f"megagrpo.reward.verifiers.{MODULES.get(function, function)}")


def maker_of(function: str) -> Callable[..., Any]:
    """Returns the maker of a built-in function, which gets the recipe's arguments."""
    return getattr(module_of(function), function if function in MODULES else "make")


def solution_maker(function: str) -> Callable[..., str | None] | None:
    """Returns the maker of right responses to a built-in function: NAME_solution or solution of its module, or None."""
    module = module_of(function)
    return getattr(module, f"{function}_solution", getattr(module, "solution", None))


def _argument_problems(spec: FunctionSpec) -> list[Problem]:
    """Returns a problem for each argument whose type differs from its annotation in `make`, or one for them all."""
    where, make = f"{spec.where}.arguments", maker_of(spec.function)
    if refusal := refused_call(make, **spec.arguments):
        return [Problem(where, given=refusal, needed=f"{spec.function}{inspect.signature(make)}")]
    problems, parameters = [], inspect.signature(make, eval_str=True).parameters
    for name, value in spec.arguments.items():
        if name not in parameters or _fits(value, parameters[name].annotation):  # make checks one of **arguments
            continue
        annotation = parameters[name].annotation
        needed = inspect.formatannotation(annotation).replace("collections.abc.", "")
        if get_origin(annotation) is Literal:
            needed = " or ".join(get_args(annotation))
        problems.append(Problem(f"{where}.{name}", brief(value), needed, f"give `{name}` another value, or remove it"))
    return problems


def _fits(value: object, annotation: Any) -> bool:
    """Returns whether a value of YAML fits a type: a whole number fits float, a text does not fit Sequence."""
    if annotation is Any or annotation is inspect.Parameter.empty:
        return True
    origin, inner = get_origin(annotation) or annotation, get_args(annotation)
    if origin is UnionType:
        return any(_fits(value, one) for one in inner)
    if origin is Literal:
        return value in inner
    if origin is float:
        return type(value) in (int, float) and abs(value) <= sys.float_info.max  # type: ignore[arg-type, operator]
    if origin is Sequence:
        return isinstance(value, list | tuple) and all(_fits(one, inner[0]) for one in value)
    if origin is Mapping:
        return isinstance(value, Mapping) and all(_fits(k, inner[0]) and _fits(v, inner[1]) for k, v in value.items())
    return type(value) is (type(None) if origin is None else origin)
